"""What an operator sees of moves: metrics, the log, /debug; and that nothing is seen without."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.moves import CUT, PLAIN, completion, is_told, is_whole, lose, more
from tests.simulate import Client, Outcome


def log_of(outcome: Outcome, event: str) -> list[dict[str, object]]:
    """The log lines of one kind."""
    return [line for line in outcome.log if line["event"] == event]


def test_a_move_is_counted_once_and_in_every_place() -> None:
    outcome = lose()

    assert outcome.moves == {"stream_broken exact": 1}
    assert outcome.count("baton_migration_gap_seconds_count") == 1
    # The next worker needs a second for its first token, and the break came with the fourth.
    assert outcome.count("baton_migration_gap_seconds_sum") == pytest.approx(1.1)
    assert outcome.count("baton_migration_carried_tokens_count") == 1
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="migrated") == 1
    assert outcome.count("baton_stream_outcome_total", worker="w1", outcome="ok") == 1
    for worker, word in (("w0", "error"), ("w1", "success")):
        told = {"worker": worker, "role": "mixed", "outcome": word}
        assert outcome.count("baton_worker_requests_total", **told) == 1
    assert outcome.count("baton_requests_total", route="chat", outcome="finished") == 1
    assert outcome.sum("baton_retries_total") == 0


def test_a_move_is_one_line_in_the_log() -> None:
    outcome = lose()

    (line,) = log_of(outcome, "moved")
    (request,) = log_of(outcome, "request")
    assert line["id"] == request["id"]
    shown = {name: line[name] for name in ("source", "target", "tokens", "mode", "reason")}
    assert shown == {
        "source": "w0", "target": "w1", "tokens": 3, "mode": "exact", "reason": "stream_broken",
    }  # fmt: skip
    assert line["gap_seconds"] == pytest.approx(1.1)
    assert (request["attempts"], request["worker"], request["state"]) == (2, "w1", "finished")
    assert (request["prompt_tokens"], request["completion_tokens"]) == (28, 10)


def test_a_move_is_told_from_its_first_loss_on() -> None:
    """However many were tried after it: what counts is how long the client had nothing, and why."""
    outcome = lose(
        "", Client(tokens=30), kinds="vllm vllm vllm", first_token_timeout_secs=4.0,
        happenings=((0.0, "faults 1 request=1:hang,after_events=1"), (1.35, "drain 0 0")),
    )  # fmt: skip

    (line,) = log_of(outcome, "moved")
    moments = [moment for moment, _ in outcome.one.pieces]
    gap = max(after - before for before, after in pairwise(moments))
    shown = {name: line[name] for name in ("source", "target", "reason")}
    assert shown == {"source": "w0", "target": "w2", "reason": "worker_draining"}
    assert gap > 5  # w1 has four seconds, and w2 needs one
    assert line["gap_seconds"] == pytest.approx(gap)
    assert outcome.count("baton_migration_gap_seconds_sum") == pytest.approx(gap)
    assert outcome.moves == {"worker_draining exact": 1}


@pytest.mark.parametrize(
    ("fault", "client", "kinds", "happenings", "expected"),
    [
        (CUT, PLAIN, "vllm vllm", (), "stream_broken exact"),
        (CUT, PLAIN, "sglang sglang", (), "stream_broken text"),
        ("cut,after_events=1", PLAIN, "vllm vllm", (), "stream_broken restart"),
        ("", PLAIN, "vllm vllm", ((1.35, "drain 0 0"),), "worker_draining exact"),
        ("", PLAIN, "sglang sglang", ((1.35, "drain 0 0"),), "worker_draining text"),
        ("pause,after_events=1,seconds=2", PLAIN, "vllm vllm", ((1.35, "drain 0 0"),),
         "worker_draining restart"),
    ],
)  # fmt: skip
def test_each_reason_and_each_mode(
    fault: str,
    client: Client,
    kinds: str,
    happenings: tuple[tuple[float, str], ...],
    expected: str,
) -> None:
    fault = f"request=1:{fault}" if fault and not fault.startswith("request") else fault

    outcome = lose(fault, client, kinds=kinds, happenings=happenings)

    assert is_whole(outcome)
    assert outcome.moves == {expected: 1}
    assert len(log_of(outcome, "moved")) == 1


@pytest.mark.parametrize(
    ("reason", "client", "longest"),
    [
        ("limit", Client(tokens=60), 999),
        ("poisoned", more(regex="a*"), 999),
        ("too_long", PLAIN, 30),
    ],
)
def test_a_stream_that_could_not_go_on_says_why(reason: str, client: Client, longest: int) -> None:
    # The other reasons are in test_moves_targets and test_moves_time.
    again = ((0.0, "faults 1 request=1:cut,after_events=20"),)

    outcome = lose(
        CUT, client, kinds="vllm vllm vllm", happenings=again, migration_max_tokens=longest
    )

    assert is_told(outcome)
    assert outcome.stuck == {reason: 1}


def test_the_longest_sequence_that_is_carried() -> None:
    # 28 tokens of prompt and 3 of output.
    outcome = lose(migration_max_tokens=31)

    assert is_whole(outcome)


def test_debug_shows_a_request_that_is_being_moved() -> None:
    # Nobody answers for five seconds where the text stands, and then the text is carried.
    moving = Client(
        tokens=10, path="/v1/chat/completions", extra={"stop": ["###"]},
        headers=(("x-request-id", "the-one"),),
    )  # fmt: skip
    looking = {"method": "GET", "path": "/debug/requests/the-one", "stream": False}

    outcome = lose(
        "request=1:cut,after_events=6", moving,
        others=(Client(at=2.0, **looking), Client(at=7.0, **looking), Client(at=20.0, **looking)),  # type: ignore[arg-type]
        happenings=((0.0, "faults 1 path=/detokenize:hang"),),
    )  # fmt: skip

    first, second, last = (got.json for got in outcome.got[1:])
    assert first["state"] == "migrating"
    assert (second["state"], second["worker"], second["attempts"]) == ("resuming", "w1", 2)
    assert last["state"] == "finished"
    assert isinstance(last["transitions"], list)
    assert "migrating" in [each["target"] for each in last["transitions"]]


@pytest.mark.parametrize("fields", [{"n": 2, "temperature": 0.5}, {"regex": "a*"}])
def test_tokens_of_streams_that_cannot_move_are_logged_too(fields: dict[str, object]) -> None:
    usage = {"stream_options": {"include_usage": True}}

    on = lose("", more(**fields, **usage))
    off = lose("", more(**fields, **usage), limit=0)

    told = [log_of(each, "request")[0]["completion_tokens"] for each in (on, off)]
    assert told[0] == told[1] != 0


#### Off


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("client", [PLAIN, completion(), more(stop=["day"])])
def test_without_a_limit_nothing_is_changed_and_nothing_moves(client: Client, kind: str) -> None:
    whole = lose("", client, kinds=kind, limit=0)
    broken = lose(client=client, kinds=f"{kind} {kind}", limit=0)

    (work,) = whole.work(0)
    assert work.body == client.body("tiny")
    assert whole.one.normal == whole.one.direct[0].normal
    assert is_told(broken)
    assert broken.asked(1) == []
    assert broken.moves == broken.stuck == {}
    assert broken.sum("baton_poisoned_total") == 0


@pytest.mark.parametrize("client", [Client(tokens=10, stream=False), Client(path="/tokenize",
    raw_body=b'{"model":"tiny","prompt":"x"}', stream=False)], ids=["whole", "other"])  # fmt: skip
def test_what_is_no_stream_is_not_changed(client: Client) -> None:
    outcome = lose("", client, kinds="vllm")

    sent = [each.body for each in outcome.work(0) if "x-request-id" in each.headers]
    assert sent == [client.body("tiny")]
