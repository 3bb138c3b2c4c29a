"""What the log says at its usual level when workers come up, fail and recover."""

from __future__ import annotations

from typing import Literal

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
        ("hang", "stalled", None, "no first token within 10 s"),
        ("hang,at=head", "stalled", 200, "no first token within 10 s"),
        ("hang,after_events=5", "stalled", 200, "silent for 5 s"),
        ("hang,at=finish", "stalled", 200, "silent between its finish and its end"),
        ("status,code=500", "erred", 500, None),
        ("status,code=429", "backpressure", 429, None),
        ("error_event,code=500", "erred", 200, "an error event of status 500"),
        ("end,after_events=2", "lied", 200, "no finish before the end"),
        ("end,after_events=2,done=true", "lied", 200, "[DONE] without a finish"),
        ("abort,after_events=2", "lied", 200, "a finish by which the engine gave up"),
        ("garbage", "broke", None, "not HTTP: Expected HTTP/, RTSP/ or ICE/"),
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


@pytest.mark.parametrize(
    ("fault", "fact", "detail"),
    [
        ("abort", "lied", "a finish by which the engine gave up"),
        ("empty", "lied", "an answer without a body"),
    ],
    ids=str,
)
def test_a_whole_answer_that_is_none_is_told_as_what_it_was(
    fault: str, fact: str, detail: str
) -> None:
    outcome = simulate(
        Plan(engines=(Engine(faults=fault),), clients=(Client(stream=False, tokens=8),))
    )

    (line,) = told(outcome, "lost")
    assert (line["fact"], line["status"], line["detail"]) == (fact, 200, detail)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fault",
    ["status,code=400", "error_event,code=400", "error_event,code=404,after_events=3"],
)
@pytest.mark.parametrize("role", ["mixed", "prefill", "decode"])
def test_a_request_that_was_at_fault_itself_was_lost_by_nobody(
    role: str, fault: str, stream: bool
) -> None:
    roles = ("mixed",) if role == "mixed" else ("prefill", "decode")
    engines = tuple(
        Engine(kind="sglang", role=each, faults=f"always:{fault}" if each == role else "")
        for each in roles
    )

    outcome = simulate(Plan(engines=engines, clients=(Client(tokens=8, stream=stream),)))

    assert told(outcome, "lost") == []


@pytest.mark.parametrize(
    ("fault", "fact", "status", "detail"),
    [
        ("now:refuse", "broke", None, "no connection: [Errno 111] refused"),
        ("cut", "broke", None, "the worker closed the connection"),
        ("hang", "stalled", None, "no prefill within 20 s"),
        ("status,code=500", "erred", 500, None),
        ("status,code=429", "backpressure", 429, None),
        ("status,code=302", "erred", 302, None),
        ("empty", "lied", 200, "an answer that says nothing"),
        ("abort", "lied", 200, "a finish by which the engine gave up"),
        ("error_event,code=500", "erred", 200, "an error event of status 500"),
        ("error_event,code=429", "backpressure", 200, "an error event of status 429"),
        ("error_event,code=500;cut,at=done", "erred", 200, "an error event of status 500"),
    ],
    ids=str,
)
def test_a_lost_prefill_is_one_line_that_says_what_was_met(
    fault: str, fact: str, status: int | None, detail: str | None
) -> None:
    faults = ";".join(each if ":" in each else f"always:{each}" for each in fault.split(";"))
    prefill = Engine(kind="sglang", role="prefill", faults="" if "now:" in faults else faults)
    outcome = simulate(
        Plan(
            engines=(prefill, Engine(kind="sglang", role="decode")),
            clients=(Client(at=1.0, tokens=8),),
            happenings=((0.5, f"faults 0 {faults}"),) if "now:" in faults else (),
            settings={"request_timeout_secs": 20.0, "health_check_interval_secs": 100.0},
        )
    )

    (line,) = told(outcome, "lost")
    met = {"role": "prefill", "fact": fact, "status": status, "detail": detail}
    assert met.items() <= line.items()


@pytest.mark.parametrize("wire", ["agent", "old"])
@pytest.mark.parametrize(
    ("fault", "status", "details"),
    [
        (
            "now:refuse",
            None,
            ("its agent cannot reach the engine", "its agent has reported an error"),
        ),
        (
            "cut",
            None,
            ("its agent has lost the engine's answer", "its agent has reported an error"),
        ),
        ("status,code=500", 500, (None, None)),
    ],
    ids=str,
)
def test_what_an_agent_reports_is_told_in_our_words(
    wire: Literal["agent", "old"], fault: str, status: int | None, details: tuple[str | None, ...]
) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(wire=wire),),
            clients=(Client(at=1.0, tokens=8),),
            happenings=((0.5, f"faults 0 {fault}"),),
            settings={"health_check_interval_secs": 100.0},
        )
    )

    (line,) = told(outcome, "lost")
    expected = details[0] if wire == "agent" else details[1]
    assert (line["status"], line["detail"]) == (status, expected)


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
