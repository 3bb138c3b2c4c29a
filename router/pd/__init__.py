"""Prefill/decode pairs: one request on two workers.

Pure: `pairing` (which two), `ranks`, `shaping` (what each is sent), `verdict` (what a prefill's
answer means).
Acting: `attempt` (one request on one pair), `prefill` (a leg that outlives its request), `aborts`
(telling an engine that nobody waits any more). How a pair fails is not decided here: the legs and
the request have their charts, and the coupling between them is a fact.
"""
