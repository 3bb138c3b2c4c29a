"""What the log says at its usual level when workers come up, fail and recover."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate


def told(outcome: Outcome, event: str) -> list[dict[str, object]]:
    """The lines of one kind, without time and level."""
    return [
        {name: value for name, value in line.items() if name not in ("time", "event")}
        for line in outcome.log
        if line["event"] == event
    ]


def test_a_worker_s_illness_is_told_once_with_what_its_probe_met() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=1), Client(at=60.0, tokens=1)),
            settings={"health_check_interval_secs": 2.0},
            happenings=((3.0, "faults 0 now:server_dies,restart_after=20"),),
        )
    )

    ready = {"level": "info", "fact": "ready", "worker": "w0"}
    first, ill, again = (line for line in told(outcome, "worker") if line["worker"] == "w0")
    assert (first, again) == (ready, ready)
    assert ill.pop("detail")
    assert ill == {"level": "warning", "fact": "unhealthy", "worker": "w0", "probe": "refused"}


def test_a_worker_that_does_not_come_up_is_told_of_once() -> None:
    # SGLang 0.5.23 takes at least a second for its /health, so with less time it is never ready.
    slow = Engine(faults="path=/health:delay,head=1.1")

    outcome = simulate(
        Plan(
            engines=(slow, Engine()),
            clients=(Client(at=60.0, tokens=1),),
            settings={"health_check_timeout_secs": 1.0},
        )
    )

    assert [line for line in told(outcome, "worker") if line["worker"] == "w0"] == [
        {"level": "warning", "fact": "not_ready", "worker": "w0", "probe": "timed_out",
         "detail": None},
    ]  # fmt: skip


def test_a_breaker_that_opens_and_closes_is_told_of() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="request=1..3:cut,at=head"), Engine()),
            clients=tuple(Client(at=moment, tokens=1) for moment in (0.0, 1, 2, 3, 4, 5, 30, 31)),
            settings={"breaker_failure_threshold": 3, "breaker_cooldown_secs": 10.0},
        )
    )

    assert told(outcome, "breaker") == [
        {"level": "warning", "fact": "opened", "worker": "w0", "failures": 3},
        {"level": "info", "fact": "closed", "worker": "w0"},
    ]


#### Legs that cost their request an attempt


@pytest.mark.parametrize(
    ("fault", "fact", "status", "detail"),
    [
        ("now:refuse", "broke", None, "no connection: [Errno 111] refused"),
        ("cut", "broke", None, "the worker closed the connection"),
        ("cut,at=head", "broke", 200, "the worker closed the connection"),
        ("cut,after_events=2", "broke", 200, "the worker closed the connection"),
        ("hang", "stalled", None, "No first token within 10 s."),
        ("hang,at=head", "stalled", 200, "No first token within 10 s."),
        ("hang,after_events=5", "stalled", 200, "The worker was silent for 5 s."),
        ("hang,at=finish", "stalled", 200, "silent between its finish and its end"),
        ("status,code=500", "erred", 500, None),
        ("status,code=429", "backpressure", 429, None),
        ("error_event,code=500", "erred", 200, "an error event of status 500"),
        ("end,after_events=2", "lied", 200, "no finish before the end"),
        ("abort,after_events=2", "lied", 200, "an end that is none"),
    ],
    ids=str,
)
def test_a_lost_leg_is_one_line_that_says_what_was_met(
    fault: str, fact: str, status: int | None, detail: str | None
) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(), Engine()),
            clients=(Client(at=1.0, tokens=8, headers=(("x-request-id", "mine"),)), path(40.0)),
            happenings=((0.5, f"faults 0 {fault}"),),
            settings={
                "first_token_timeout_secs": 10.0,
                "stream_idle_timeout_secs": 5.0,
                "migration_limit": 1,
                "health_check_interval_secs": 100.0,
            },
        )
    )

    met = {"worker": "w0", "role": "mixed", "fact": fact, "status": status, "detail": detail}
    (line,) = told(outcome, "lost")
    assert 0 <= line.pop("seconds") <= 10  # type: ignore[operator]
    assert line == {"level": "info", "id": "mine.1", **met}
    legs = outcome.got[1].json["legs"]
    assert isinstance(legs, list)
    assert met.items() <= legs[0].items()
    assert [leg["state"] for leg in legs[1:]] in ([], ["succeeded"])


def test_a_request_s_line_has_the_code_that_its_client_was_told() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang,after_events=5"),),
            clients=(Client(tokens=8, headers=(("x-request-id", "mine"),)), path(30.0)),
            settings={"stream_idle_timeout_secs": 5.0},
        )
    )

    (line,) = told(outcome, "request")
    assert (line["state"], line["status"], line["code"]) == ("failed", 200, "stream_idle_timeout")
    assert outcome.got[1].json["code"] == "stream_idle_timeout"
    assert outcome.got[0].code == "stream_idle_timeout"


def test_both_legs_of_a_pair_are_remembered() -> None:
    halves = (
        Engine(kind="sglang", role="prefill", faults="status,code=500"),
        Engine(kind="sglang", role="decode"),
    )
    named = Client(tokens=2, headers=(("x-request-id", "mine"),))

    outcome = simulate(Plan(engines=halves, clients=(named, path(30.0))))

    legs = outcome.got[1].json["legs"]
    assert isinstance(legs, list)
    seen = [(leg["role"], leg["state"], leg["fact"], leg["status"]) for leg in legs]
    assert seen == [("prefill", "broken", "erred", 500), ("decode", "closed", "let_go", None)]


def path(at: float) -> Client:
    """Who asks for the way of the request `mine`."""
    return Client(method="GET", path="/debug/requests/mine", at=at)
