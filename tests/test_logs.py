"""Log lines: fixed fields, one line whatever a value contains, and never an exception."""

import json
import os
import re
import timeit
from collections.abc import Iterator

import pytest
import structlog
from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.logs import Logs, configure
from statemachines import REQUEST
from statemachines.request import RequestState

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@define
class Pipe:
    """A pipe in place of standard error."""

    reader: int = field(init=False)
    writer: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def configure(self, *, format: str = "text", level: str = "info") -> Logs:
        return configure(format=format, level=level, fd=self.writer)

    def lines(self) -> list[str]:
        try:
            text = os.read(self.reader, 1 << 20).decode()
        except BlockingIOError:
            return []
        assert text.endswith("\n")
        return text[:-1].split("\n")

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            try:
                os.close(fd)
            except OSError:
                pass


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()
    structlog.reset_defaults()


def write_request(logs: Logs, id: str = "7f3a", worker: str | None = "w1") -> None:
    logs.request_line(
        id=id,
        route="chat",
        worker=worker,
        attempts=2,
        state="finished",
        status=200,
        code=None,
        prompt_tokens=12,
        completion_tokens=None,
        first_token_seconds=0.25,
        seconds=1.5,
    )


def test_a_request_is_one_text_line_with_its_fields_in_order(pipe: Pipe) -> None:
    write_request(pipe.configure())

    [line] = pipe.lines()
    stamp, rest = line.split(" ", 1)
    assert STAMP.fullmatch(stamp)
    assert rest == (
        "info request id=7f3a route=chat worker=w1 attempts=2 state=finished status=200 code=-"
        " prompt_tokens=12 completion_tokens=- first_token_seconds=0.250000 seconds=1.500000"
    )


def test_a_request_is_one_object_with_the_same_fields(pipe: Pipe) -> None:
    write_request(pipe.configure(format="json"))

    [line] = pipe.lines()
    fields = json.loads(line)
    assert STAMP.fullmatch(fields.pop("time"))
    assert list(fields.items()) == [
        ("level", "info"),
        ("event", "request"),
        ("id", "7f3a"),
        ("route", "chat"),
        ("worker", "w1"),
        ("attempts", 2),
        ("state", "finished"),
        ("status", 200),
        ("code", None),
        ("prompt_tokens", 12),
        ("completion_tokens", None),
        ("first_token_seconds", 0.25),
        ("seconds", 1.5),
    ]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_request_that_nobody_served_has_no_worker_and_no_status(format: str, pipe: Pipe) -> None:
    pipe.configure(format=format).request_line(
        id="x",
        route="chat",
        worker=None,
        attempts=0,
        state="abandoned",
        status=0,
        code="queue_timeout",
        prompt_tokens=None,
        completion_tokens=None,
        first_token_seconds=None,
        seconds=0.0,
    )

    [line] = pipe.lines()
    if format == "json":
        assert json.loads(line)["worker"] is None
        assert json.loads(line)["status"] is None
    else:
        assert " worker=- " in line
        assert " status=- " in line


@define(eq=False)
class Subject:
    id: str = "7f3a"
    state: RequestState = RequestState.QUEUED
    listeners: list[object] = field(factory=list)


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_transition_is_one_line_at_debug(format: str, pipe: Pipe) -> None:
    listener = pipe.configure(format=format, level="debug").transitions("request")
    assert listener is not None

    listener(Subject(), REQUEST.edges[0])

    [line] = pipe.lines()
    edge = REQUEST.edges[0]
    expected = {
        "machine": "request",
        "id": "7f3a",
        "source": edge.source.value,
        "fact": edge.fact,
        "target": edge.target.value,
    }
    if format == "json":
        fields = json.loads(line)
        assert list(fields) == ["time", "level", "event", *expected]
        assert fields.items() >= expected.items()
    else:
        pairs = " ".join(f"{key}={value}" for key, value in expected.items())
        assert line.endswith(f" debug transition {pairs}")


def test_above_debug_nobody_listens_to_transitions(pipe: Pipe) -> None:
    assert pipe.configure(level="info").transitions("request") is None


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("debug", ["debug", "info", "request", "warning", "error"]),
        ("info", ["info", "request", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_lines_below_the_level_are_not_written(level: str, seen: list[str], pipe: Pipe) -> None:
    logs = pipe.configure(level=level)
    log = structlog.get_logger()

    log.debug("debug")
    log.info("info")
    write_request(logs)
    log.warning("warning")
    log.error("error")

    assert [line.split(" ")[2] for line in pipe.lines()] == seen


def test_other_events_keep_the_order_of_their_fields(pipe: Pipe) -> None:
    pipe.configure()

    structlog.get_logger().info(
        "worker joined", worker="w1", seconds=0.5, role=None, models=("m", "n")
    )

    [line] = pipe.lines()
    assert line.endswith(' info "worker joined" worker=w1 seconds=0.500000 role=- models=m,n')


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_exception_is_one_line_with_its_traceback(format: str, pipe: Pipe) -> None:
    pipe.configure(format=format)

    try:
        raise ValueError("two\nlines")
    except ValueError:
        structlog.get_logger().exception("a bug of ours")

    [line] = pipe.lines()
    assert "Traceback" in line
    assert "ValueError: two" in line


awkward = st.text(
    st.characters() | st.sampled_from("\n\r\x00\x1b\x7f\x85\u2028 =\"'\\"), max_size=20
)


@pytest.mark.parametrize("format", ["text", "json"])
@given(value=awkward)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_no_value_breaks_a_line(format: str, pipe: Pipe, value: str) -> None:
    logs = pipe.configure(format=format, level="debug")
    listener = logs.transitions("request")
    assert listener is not None

    write_request(logs, id=value, worker=value)
    listener(Subject(id=value), REQUEST.edges[0])
    structlog.get_logger().info(value, value=value)

    lines = pipe.lines()
    assert len(lines) == 3
    for line in lines:
        if format == "json":
            assert isinstance(json.loads(line), dict)
        else:
            assert line.isprintable()


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("value", ["\ud800", object(), {1, 2}, 2**80, float("nan")])
def test_a_value_that_has_no_text_is_written_somehow(
    format: str, value: object, pipe: Pipe
) -> None:
    pipe.configure(format=format)

    structlog.get_logger().info("odd", value=value)

    assert len(pipe.lines()) == 1


def test_a_surrogate_in_an_id_is_no_exception(pipe: Pipe) -> None:
    write_request(pipe.configure(format="json"), id="\ud800")

    assert len(pipe.lines()) == 1


def test_a_line_that_nobody_reads_is_dropped_and_counted(pipe: Pipe) -> None:
    logs = pipe.configure()
    os.close(pipe.writer)

    write_request(logs)
    structlog.get_logger().error("nobody reads this")

    assert logs.writer.dropped == 2


def test_a_full_pipe_drops_lines_and_does_not_block(pipe: Pipe) -> None:
    logs = pipe.configure()
    os.set_blocking(pipe.writer, False)

    for _ in range(2000):
        write_request(logs)

    assert logs.writer.dropped > 0
    assert all(" request id=" in line for line in pipe.lines())


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_request_line_is_cheap(format: str) -> None:
    # 3 to 4 us on the machine it was measured on; a processor chain needs 12 to 20.
    with open(os.devnull, "wb") as nowhere:
        logs = configure(format=format, level="info", fd=nowhere.fileno())
        best = min(timeit.repeat(lambda: write_request(logs), number=200, repeat=20)) / 200

    assert best < 15e-6


def test_held_lines_come_whole_and_in_order_at_the_release(pipe: Pipe) -> None:
    logs = pipe.configure()
    logs.writer.hold()
    for number in range(100):
        write_request(logs, id=f"r{number}")
    assert pipe.lines() == []

    logs.writer.release()

    assert [line.split(" id=")[1].split()[0] for line in pipe.lines()] == [
        f"r{number}" for number in range(100)
    ]
    write_request(logs, id="after")
    assert len(pipe.lines()) == 1


def test_held_lines_that_do_not_fit_are_dropped_whole(pipe: Pipe) -> None:
    logs = pipe.configure()
    os.set_blocking(pipe.writer, False)
    logs.writer.hold()
    for _ in range(2000):
        write_request(logs)

    logs.writer.release()

    lines = pipe.lines()
    assert all(line.endswith("seconds=1.500000") for line in lines)
    assert len(lines) + logs.writer.dropped == 2000
