"""`baton conform`: what users of LLM routers complain about, tried on any router.

A case is a small fleet of simulated engines with a script of faults, a router in front of them,
and clients that look at what comes. Nothing in here knows how a router works inside: it sees what
clients and engines see. The numbers C1, C2, ... are of a survey of issue trackers.
"""
