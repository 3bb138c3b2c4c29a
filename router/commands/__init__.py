"""What `baton` can do besides serving: one module a command, and what they share.

They talk to a router from outside, over its HTTP API, or need none at all; `router.cli` finds them
and imports only the one that is asked for.
"""
