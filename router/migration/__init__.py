"""Carrying a streaming generation to another worker: the pure core.

A `Shape` says what of a request decides whether it can be continued, an `Asking` what is added to
the body so that it can, a `Record` what the client has been given, an `Attempt` reads one worker's
events into the record and returns what to forward, `seek` finds how many ids the text stands for,
and `build` writes the next request. Nothing here does I/O, and nothing of it runs while migration
is off. It never approximates: what cannot be continued faithfully is poisoned, with a reason.
"""
