"""While a stream is moved its client can be sent comments, so that no proxy gives it up."""

from __future__ import annotations

from tests.simulate import Client, Engine, Plan, simulate

COMMENT = b": keep-alive\n\n"


def moved(**settings: object) -> Plan:
    """The next worker takes seven seconds for its first token."""
    return Plan(
        engines=(Engine(faults="cut,after_events=6"), Engine(first_token_seconds=7.0)),
        clients=(Client(tokens=20),),
        settings={"migration_limit": 1, "policy": "round_robin", **settings},
    )


def test_comments_come_while_the_next_worker_prefills() -> None:
    outcome = simulate(moved(migration_keep_alive_secs=2.0))

    assert outcome.one.body.count(COMMENT) == 3
    assert (outcome.one.ending, outcome.one.is_done) == ("clean", True)
    assert outcome.one.text == outcome.one.direct[0].text


def test_without_the_setting_there_are_none() -> None:
    outcome = simulate(moved())

    assert COMMENT not in outcome.one.body
    assert outcome.one.is_done


def test_a_stream_that_moves_quickly_needs_none() -> None:
    outcome = simulate(moved(migration_keep_alive_secs=30.0))

    assert COMMENT not in outcome.one.body
