"""Clocks, leaving clients and silence around a move: time belongs to the request."""

from __future__ import annotations

import attrs
import pytest

from tests.moves import CUT, LONG, PLAIN, completion, is_told, is_whole, lose, more
from tests.simulate import Client, Engine, Plan, simulate

#: Breaks at 1.3 s, and the next worker has its first token at 2.3 s.
BREAK, RESUMED = 1.3, 2.3
#: A stream whose place only a worker can tell, and none that does.
ASKING = ((0.0, "faults 1 path=/detokenize:hang"),)
HELD: dict[str, object] = {"stop": ["###"]}


def test_the_one_clock_goes_on_over_a_move() -> None:
    outcome = lose(client=Client(tokens=30), request_timeout_secs=3.0)

    assert is_told(outcome)
    assert outcome.one.code == "request_timeout"
    assert outcome.one.ended_at == pytest.approx(3.0)
    assert sum(outcome.moves.values()) == 1
    assert outcome.stuck == {}


def test_a_deadline_in_the_middle_moves_nothing() -> None:
    outcome = lose("", Client(tokens=30), request_timeout_secs=2.0)

    assert is_told(outcome)
    assert outcome.facts[-1] == "deadline_passed"
    assert outcome.asked(1) == []
    assert outcome.stuck == {}


def test_a_deadline_before_the_next_first_token_is_a_failed_move() -> None:
    outcome = lose(request_timeout_secs=2.0)

    assert outcome.one.code == "request_timeout"
    assert outcome.one.ended_at == pytest.approx(2.0)
    assert outcome.stuck == {"deadline": 1}
    assert outcome.count("baton_stream_outcome_total", worker="w1", outcome="expired") == 1


def test_a_deadline_while_a_worker_is_asked_is_a_failed_move() -> None:
    outcome = lose(
        "request=1:cut,after_events=6", more(**HELD), happenings=ASKING,
        request_timeout_secs=3.0, looks=(2.0, 3.5),
    )  # fmt: skip

    assert outcome.one.code == "request_timeout"
    assert outcome.one.ended_at == pytest.approx(3.0)
    assert outcome.stuck == {"deadline": 1}
    assert [look.states for look in outcome.looks] == [["migrating"], []]
    assert outcome.asked(1) == []


def test_nobody_is_asked_for_longer_than_five_seconds() -> None:
    client = Client(tokens=10, path="/v1/chat/completions", extra=HELD)

    outcome = lose("request=1:cut,after_events=6", client, happenings=ASKING)

    assert is_whole(outcome)
    assert 7 < outcome.one.ended_at < 8.5


def test_the_time_of_asking_is_not_the_next_workers() -> None:
    client = Client(tokens=10, path="/v1/chat/completions", extra=HELD)

    outcome = lose(
        "request=1:cut,after_events=6", client, happenings=ASKING, first_token_timeout_secs=4.0
    )

    assert is_whole(outcome)


@pytest.mark.parametrize("way", ["leaves_at", "half_closes_at", "resets_at"])
@pytest.mark.parametrize("moment", [BREAK, 1.7, 2.25])
def test_a_client_that_leaves_during_a_move_frees_everybody(way: str, moment: float) -> None:
    client = Client(tokens=20, **{way: moment})  # type: ignore[arg-type]  # names above

    outcome = lose(client=client, looks=(moment + 0.1,))

    assert outcome.tickets[0].state.value == "abandoned"
    assert outcome.look.running == [0, 0]
    assert outcome.moves == outcome.stuck == {}


@pytest.mark.parametrize("way", ["leaves_at", "resets_at"])
def test_a_client_that_leaves_while_a_worker_is_asked_ends_the_asking(way: str) -> None:
    client = Client(tokens=10, extra=HELD, **{way: 2.0})  # type: ignore[arg-type]

    outcome = lose("request=1:cut,after_events=6", client, happenings=ASKING, looks=(1.9, 2.1))

    assert [look.states for look in outcome.looks] == [["migrating"], []]
    assert outcome.tickets[0].state.value == "abandoned"
    assert outcome.stuck == {}
    assert outcome.asked(1) == []


def test_nothing_more_is_asked_for_a_request_that_is_over() -> None:
    def questions(client: Client, timeout: float = 60.0) -> int:
        outcome = lose(
            "request=1:cut,after_events=6", attrs.evolve(client, extra=HELD),
            happenings=((0.0, "faults 1 path=/detokenize:delay,head=1"),),
            request_timeout_secs=timeout,
        )  # fmt: skip
        return [each.path for each in outcome.work(1)].count("/detokenize")

    assert questions(PLAIN) > 1
    for client in (Client(leaves_at=2.0), Client(resets_at=2.0)):
        assert questions(client) == 1
    assert questions(PLAIN, timeout=2.0) == 1


def test_a_stop_of_the_router_is_no_failed_move() -> None:
    outcome = lose(happenings=((1.6, "stop"), (1.7, "stop")))

    assert is_told(outcome)
    assert outcome.one.code == "shutting_down"
    assert outcome.stuck == {}


def test_a_router_that_drains_still_moves_its_streams() -> None:
    outcome = lose(happenings=((1.1, "stop"),))

    assert is_whole(outcome)


#### Silence


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang"])
def test_silence_is_a_loss_and_what_comes_late_is_not_read(kinds: str) -> None:
    outcome = lose(
        "request=1:pause,after_events=4,seconds=20", kinds=kinds, stream_idle_timeout_secs=5.0
    )

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1
    assert outcome.one.ended_at < 10
    assert outcome.engines[0].disconnects == 1


def test_a_silent_worker_that_nobody_reaches_is_given_up_early() -> None:
    outcome = lose("request=1:sigterm_hang,after_events=4")

    assert is_whole(outcome)
    assert outcome.one.ended_at < 15


def test_the_next_worker_has_its_own_patience() -> None:
    outcome = lose(
        kinds="vllm vllm vllm", happenings=((0.0, "faults 1 request=1:hang,after_events=1"),),
        first_token_timeout_secs=4.0,
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.one.ended_at == pytest.approx(BREAK + 4 + 1 + 0.6, abs=0.05)
    assert sum(outcome.moves.values()) == 1


def test_a_slow_client_gets_everything() -> None:
    client = Client(tokens=300, reads_from=30.0)

    outcome = simulate(
        Plan(
            engines=(Engine(faults="request=1:cut,after_events=60"), Engine()),
            clients=(client,),
            settings={"migration_limit": 1},
            pipe_bytes=2000,
        )
    )

    assert is_whole(outcome)


def test_a_slow_client_holds_up_the_next_worker_too() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(token_seconds=0.001), Engine(token_seconds=0.001)),
            clients=(Client(tokens=3000, reads_from=20.0),),
            settings={"migration_limit": 1},
            pipe_bytes=2000,
            happenings=((5.0, "drain 0 0"),),
            looks=(4.9, 10.0, 19.0),
        )
    )

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1
    assert len({look.backlog_bytes for look in outcome.looks}) == 1


def test_it_is_not_seen_that_a_completion_moved() -> None:
    outcome = lose(CUT, completion(), looks=(1.5,))

    assert outcome.look.states == ["resuming"]
    assert is_whole(outcome)
    assert LONG is not PLAIN
