"""Baton beside other routers on one machine, in one run, one core each.

Nothing here is imported by the router, and nothing here imports it: a candidate is a command line,
so that Baton is measured exactly as it is started by a user. See README.md for the method and for
how far the numbers can be trusted.
"""
