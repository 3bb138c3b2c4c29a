"""`baton agent`: what stands beside one engine and serves it to routers over NATS."""
