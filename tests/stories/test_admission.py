"""The cap on requests at once, and the queue in front of it."""

from __future__ import annotations

from tests.simulate import Client, Engine, Plan, simulate


def test_a_cap_caps_until_the_last_byte() -> None:
    crowd = tuple(Client(at=0.01 * turn, tokens=20) for turn in range(20))
    looks = tuple(0.3 + 0.7 * turn for turn in range(20))

    outcome = simulate(Plan(clients=crowd, settings={"max_concurrent_requests": 4}, looks=looks))

    assert max(sum(look.running) for look in outcome.looks) == 4
    assert {got.ending for got in outcome.got} == {"clean"}


def test_a_place_is_held_while_a_slow_client_reads() -> None:
    slow = Client(tokens=60, fault="padding,bytes=50000", reads_from=20.0)

    outcome = simulate(
        Plan(clients=(slow, Client(at=1.0)), settings={"max_concurrent_requests": 1})
    )

    assert outcome.got[1].head_at > 20


def test_first_come_first_served() -> None:
    crowd = tuple(Client(at=0.01 * turn, tokens=3) for turn in range(6))

    outcome = simulate(Plan(clients=crowd, settings={"max_concurrent_requests": 1}))

    ended = [got.ended_at for got in outcome.got]
    assert ended == sorted(ended)


def test_a_full_queue_is_said_with_when_to_come_again() -> None:
    crowd = tuple(Client(at=0.01 * turn) for turn in range(4))

    outcome = simulate(
        Plan(clients=crowd, settings={"max_concurrent_requests": 1, "queue_size": 2})
    )

    assert [got.status for got in outcome.got] == [200, 200, 200, 429]
    refused = outcome.got[3]
    assert (refused.code, refused.headers["retry-after"]) == ("queue_full", "1")
    assert refused.ended_at < 0.1


def test_the_time_in_the_queue_is_over_once_a_place_was_found() -> None:
    slow = Engine(token_seconds=1.0)
    clients = (Client(tokens=5), Client(at=0.5, tokens=60))

    outcome = simulate(
        Plan(
            engines=(slow,),
            clients=clients,
            settings={"max_concurrent_requests": 1, "queue_timeout_secs": 30.0},
        )
    )

    assert [got.ending for got in outcome.got] == ["clean", "clean"]
    assert outcome.got[1].ended_at > 60


def test_no_queue_at_all() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(), Client(at=0.5)),
            settings={"max_concurrent_requests": 1, "queue_size": 0},
        )
    )

    assert outcome.got[1].code == "queue_full"


def test_a_place_comes_back_however_a_request_ends() -> None:
    ends = ("cut", "status,code=400", "error_event,after_events=4", "abort,after_events=4", "")
    crowd = tuple(Client(at=0.1 * turn, fault=fault) for turn, fault in enumerate(ends))
    leaving = (Client(at=2.0, leaves_at=2.5), Client(at=3.0, fault="hang", leaves_at=9.0))

    outcome = simulate(
        Plan(
            engines=(Engine(),),
            clients=(*crowd, *leaving, Client(at=3.1)),
            settings={"max_concurrent_requests": 1},
        )
    )

    assert outcome.got[-1].ending == "clean"


def test_a_retry_keeps_its_place() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="request=1:status,code=500;delay,head=2"), Engine()),
            clients=(Client(), Client(at=0.5)),
            settings={"max_concurrent_requests": 1},
        )
    )

    first, second = outcome.got
    assert first.ended_at < second.head_at


def test_other_calls_need_no_place() -> None:
    outcome = simulate(
        Plan(
            clients=(
                Client(tokens=50),
                Client(method="GET", path="/v1/models", at=1.0, stream=False),
                Client(method="GET", path="/health", at=1.0, stream=False),
            ),
            settings={"max_concurrent_requests": 1, "queue_size": 0},
        )
    )

    assert [got.status for got in outcome.got] == [200, 200, 200]
