"""What the router does, one story a behaviour, in the order of a request's life.

dispatch, retries, bytes, endings, breakers, clocks, backpressure, departures, headers, deaths,
fleet, shutdown, admission, local_answers, bad_input.

Every story is a plan, run whole under virtual time; whatever must hold in all of them is asserted
by `simulate` itself (tests/promises.py). Moments are virtual seconds after the plan's begin.
"""
