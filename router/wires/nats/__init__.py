"""Requests that travel over NATS: the broker behind one seam, and the line to a worker over it."""
