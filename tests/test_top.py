"""`baton top`: what is wrong stands first, and what is shown is what the router says."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from router import cli
from router.commands import top
from router.commands.remote import Api
from router.commands.top import Look, look, picture
from tests.routers import Router, standing_in


def worker(
    id: str, state: str = "ready", breaker: str = "closed", inflight: int = 0
) -> top._Worker:
    return top._Worker(id, state, breaker, inflight, "mixed", "vllm", ("tiny",), "passed")


def request(id: str, state: str = "streaming", seconds: float = 1.0) -> top._Request:
    return top._Request(id, state, seconds, 0.5, "w0", 1)


def first_words(lines: list[str], title: str) -> list[str]:
    """The first column of the table with this head."""
    start = next(n for n, line in enumerate(lines) if line.startswith(title))
    rows = lines[start + 1 :]
    return [line.split()[0] for line in rows[: rows.index("") if "" in rows else None]]


def test_workers_that_get_nothing_stand_first_then_doubtful_then_busy_ones() -> None:
    workers = (
        worker("idle"), worker("busy", inflight=3), worker("doubted", breaker="open", inflight=9),
        worker("ill", state="unhealthy"),
    )  # fmt: skip

    lines = picture("http://router", Look(0.0, workers, ()))

    assert first_words(lines, "worker ") == ["ill", "doubted", "busy", "idle"]
    assert lines[0] == "http://router  3 of 4 workers ready  0 requests open"


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 of 0 workers ready  0 requests open"),
        (1, "1 of 1 worker ready  1 request open"),
        (2, "2 of 2 workers ready  2 requests open"),
    ],
)
def test_one_is_not_many(count: int, said: str) -> None:
    look = Look(0.0, (worker("w"),) * count, (request("r"),) * count)

    assert picture("http://router", look)[0] == f"http://router  {said}"


def test_requests_without_a_worker_stand_first_then_the_oldest() -> None:
    requests = (
        request("young"), request("old", seconds=60.0), request("moving", "migrating"),
        request("waiting", "queued", 2.0),
    )  # fmt: skip

    lines = picture("http://router", Look(0.0, (worker("w0"),), requests))

    assert first_words(lines, "request ") == ["waiting", "moving", "old", "young"]
    assert "migrating 1" in lines[1]


def test_rates_are_of_the_time_between_two_looks() -> None:
    counts = dict.fromkeys(top._RATES, 10.0)
    before = Look(100.0, (worker("w0"),), (), counts, {"w0": (10.0, 2.0)})
    now = Look(104.0, (worker("w0"),), (), {**counts, "requests": 30.0}, {"w0": (18.0, 4.0)})

    lines = picture("http://router", now, before)

    assert lines[1].startswith("requests 5.0  failed 0.0  ")
    assert lines[-1].split()[:6] == ["w0", "ready", "closed", "0", "2.0", "0.5"]


def test_a_router_that_was_started_anew_counts_from_nothing() -> None:
    counts = dict.fromkeys(top._RATES, 100.0)
    fresh = dict.fromkeys(top._RATES, 2.0)

    lines = picture("http://router", Look(2.0, (), (), fresh), Look(0.0, (), (), counts))

    assert lines[1].startswith("requests 1.0  ")


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (120, 40), (10, 1)])
@pytest.mark.parametrize("workers", [0, 1, 9, 300])
@pytest.mark.parametrize("requests", [0, 1, 9, 300])
def test_a_picture_fits_and_says_what_it_leaves_out(
    size: tuple[int, int], workers: int, requests: int
) -> None:
    every = tuple(worker(f"w{number}") for number in range(workers))
    live = tuple(request(f"r{number}") for number in range(requests))

    lines = picture("http://router", Look(0.0, every, live), None, size)

    assert max(map(len, lines)) <= size[0]
    assert len(lines) < max(size[1], 10)
    if max(workers, requests) > size[1]:
        assert any(line.startswith("and ") for line in lines)


def test_a_name_does_not_drive_the_terminal() -> None:
    lines = picture("http://router", Look(0.0, (worker("w\x1b[31m0"),), ()))

    assert not any("\x1b" in line for line in lines)


@pytest.fixture
def router() -> Iterator[Router]:
    with standing_in() as stand_in:
        stand_in.answers = {
            "/v1/workers": json.dumps({"workers": [{"id": "w0", "state": "ready"}]}).encode(),
            "/debug/requests": json.dumps({"requests": [{"id": "r1", "state": "queued"}]}).encode(),
            "/metrics": b'baton_requests_total{route="chat",outcome="finished"} 7\n'
            b'baton_requests_total{route="chat",outcome="failed"} 2\n'
            b'baton_worker_requests_total{worker="w0",role="mixed",outcome="success"} 7\n'
            b'baton_worker_requests_total{worker="w0",role="mixed",outcome="error"} 2\n',
        }
        yield stand_in


def test_it_asks_what_the_router_shows(router: Router) -> None:
    found = look(Api(router.url, "key"), 1.0)

    assert [each.id for each in found.workers] == ["w0"]
    assert [each.id for each in found.requests] == ["r1"]
    assert (found.counts["requests"], found.counts["failed"]) == (9.0, 2.0)
    assert found.ends == {"w0": (9.0, 2.0)}
    assert {key for _, _, key, _ in router.asked} == {"Bearer key"}


def test_without_a_terminal_it_prints_one_picture_and_ends(
    router: Router, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)

    code = cli.main(["top", router.url, "--every", "3"])

    out = capsys.readouterr().out
    assert (code, slept) == (0, [3.0])
    assert out.startswith(f"{router.url}  1 of 1 worker ready  1 request open\nrequests 0.0  ")
    assert "\x1b" not in out


def test_a_router_that_does_not_answer_is_asked_again(
    router: Router, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = iter([500, 200])

    def sleep(_: float) -> None:
        router.status = next(statuses, 0)
        if not router.status:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    code = cli.main(["top", router.url])

    screens = capsys.readouterr().out.split("\x1b[H\x1b[J")[1:]
    assert code == 0
    assert ["baton top: " in screen for screen in screens] == [False, True, False]


@pytest.mark.parametrize("every", ["0", "x", "1e9", "nan"])
def test_odd_intervals_are_refused(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", "http://127.0.0.1:1", "--every", every])

    assert ended.value.code == 2
    assert "a number of seconds from 0.1 to 3600" in capsys.readouterr().err
