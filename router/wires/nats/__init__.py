"""Requests to workers over NATS: the broker, what is said over it, and the line."""
