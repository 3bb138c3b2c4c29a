"""What an answer says is believed over its status, and what it owes is not waited for without end.

Of each kind of answer all are tried: errors and abort finishes inside a whole 200, redirections,
and errors whose body hangs, from prefill, from decode and from mixed workers.
"""

from __future__ import annotations

import pytest

from router.clocks import ERROR_BODY_SECONDS
from tests.pairs import DONE, Half, Pairs, Result, play, run
from tests.plans import Client

GENERATE = Client(stream=False, path="/generate", extra={"text": "a"})
BOOKED = {400: "client_error", 404: "client_error", 429: "backpressure", 503: "backpressure"}
STATUSES = [400, 404, 429, 500, 502, 503]
#: The worker that answers: decode of a pair, or a mixed one.
ROLES = pytest.mark.parametrize("role", ["decode", "mixed"])


def ask(role: str, script: str, client: Client, tries: int = 0) -> Result:
    """Let a worker of this role answer by a script."""
    half, other = Half(script), Half("json@1")
    retries: dict[str, object] = {"pd_max_retries": tries, "request_max_retries": tries}
    if role == "decode":
        return play(
            Pairs(
                prefills=(Half(DONE), Half(DONE)),
                decodes=(half, other)[: tries + 1],
                clients=(client,),
                settings=retries,
                rest=8.0,
            )
        )
    return play(
        Pairs(
            prefills=(),
            decodes=(),
            mixed=(half, other)[: tries + 1],
            clients=(client,),
            settings=retries,
        )
    )


#### Errors and aborts inside a whole 200


@ROLES
@pytest.mark.parametrize("client", [Client(stream=False), GENERATE], ids=["chat", "generate"])
@pytest.mark.parametrize("form", ["inband", "flat"])
@pytest.mark.parametrize("status", STATUSES)
def test_an_error_inside_a_whole_answer_has_its_own_status(
    status: int, form: str, client: Client, role: str
) -> None:
    result = ask(role, f"{form}:{status}@2", client)

    assert (result.one.status, result.one.code) == (status, status)
    assert "x-router-error-code" not in result.one.headers
    assert result.rows_of(role) == [BOOKED.get(status, "error")]


@ROLES
@pytest.mark.parametrize("status", STATUSES)
def test_it_is_tried_elsewhere_unless_it_is_the_clients(status: int, role: str) -> None:
    result = ask(role, f"inband:{status}@2", Client(stream=False), tries=1)

    assert result.one.status == (status if status in (400, 404) else 200)


@ROLES
@pytest.mark.parametrize(
    ("client", "script"), [(Client(stream=False), "jsonabort@2"), (GENERATE, "genabort:a@2")]
)
def test_a_whole_answer_that_was_aborted_has_failed(client: Client, script: str, role: str) -> None:
    result = ask(role, script, client)

    assert (result.one.status, result.one.code) == (502, "upstream_broken")
    assert result.rows_of(role) == ["error"]


@ROLES
@pytest.mark.parametrize("client", [Client(stream=False), Client(), GENERATE])
@pytest.mark.parametrize("script", ["302@2", "307@2", "errorhead:302@2"])
def test_workers_do_not_redirect(script: str, client: Client, role: str) -> None:
    result = ask(role, script, client)

    assert (result.one.status, result.one.code) == (502, "upstream_broken")
    assert "location" not in result.one.headers
    assert result.rows_of(role) == ["error"]


@ROLES
@pytest.mark.parametrize("client", [Client(stream=False), Client(), GENERATE])
@pytest.mark.parametrize("script", ["204@2", "empty@2"])
def test_nothing_is_no_answer(script: str, client: Client, role: str) -> None:
    result = ask(role, script, client)

    assert (result.one.status, result.one.code) == (502, "upstream_broken")
    assert result.rows_of(role) == ["error"]


def test_where_no_text_was_asked_for_nothing_may_be_the_answer() -> None:
    result = ask("mixed", "204@2", Client(stream=False, path="/tokenize", raw_body=b"{}"))

    assert (result.one.status, result.one.ending) == (204, "clean")
    assert result.rows_of("mixed") == ["success"]


#### Errors whose body hangs


@ROLES
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", STATUSES)
def test_an_error_without_its_body_is_told_by_its_status(
    status: int, stream: bool, role: str
) -> None:
    result = ask(role, f"errorhead:{status}@2", Client(stream=stream))

    assert (result.one.status, result.one.code) == (status, status)
    assert result.one.ended_at == pytest.approx(2 + ERROR_BODY_SECONDS)
    assert result.one.headers["retry-after"] == "7"
    assert result.rows_of(role) == [BOOKED.get(status, "error")]


@pytest.mark.parametrize("protocol", ["sglang-bootstrap", "vllm-nixl"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", STATUSES)
def test_a_prefills_error_without_its_body_is_told_fast(
    status: int, stream: bool, protocol: str
) -> None:
    result = run(f"errorhead:{status}@2", "", Client(stream=stream), protocol=protocol)

    expected = (status, status) if status in BOOKED else (502, "prefill_failed")
    assert (result.one.status, result.one.code) == expected
    assert result.one.ended_at == pytest.approx(2 + ERROR_BODY_SECONDS)
    assert result.rows("p0") == [BOOKED.get(status, "error")]
    assert result.rows("d0") == ["cancelled"] * (protocol == "sglang-bootstrap")


@pytest.mark.parametrize("stream", [True, False])
def test_decodes_hanging_error_does_not_hide_prefills_failure(stream: bool) -> None:
    result = run("500@2.5", "errorhead:400@2", Client(stream=stream))

    assert (result.one.status, result.one.code) == (400, 400)
    assert result.one.ended_at == pytest.approx(2 + ERROR_BODY_SECONDS)
    assert (result.rows("p0"), result.rows("d0")) == (["error"], ["client_error"])


#### An answer that was complete


@pytest.mark.parametrize("prefill", ["500@3", "400@3", "cut@3", "head@1,error@3"])
def test_a_finish_that_was_delivered_is_not_taken_back(prefill: str) -> None:
    result = run(prefill, "head@1,role@1,stop@2")

    assert (result.one.status, result.one.ending, result.one.finish) == (200, "clean", "stop")
    assert result.one.is_done
    assert result.one.ended_at == pytest.approx(3)
    assert (result.state, result.facts[-1]) == ("finished", "lost_after_end")
    assert (result.rows("d0"), result.streams("d0")) == (["success"], ["ok"])
    # Decode still waits for its prefill, and is told at once that nobody waits for it.
    assert result.d.left_at == [pytest.approx(3)]
    assert [abort["rid"] for abort, _ in result.d.aborts] == [result.d.bodies[0]["rid"]]


def test_one_finish_of_two_can_still_be_lost() -> None:
    result = run("500@3", "head@1,role@1,stop@2", Client(extra={"n": 2}))

    assert (result.one.ending, result.one.code) == ("cut", "prefill_failed")
    assert result.rows("d0") == ["cancelled"]


def test_silence_after_a_finish_without_content_is_an_end() -> None:
    settings = {"first_token_timeout_secs": 5.0}

    result = run("", "head@1,role@1,stop@2", settings=settings, rest=2000.0)

    assert (result.one.ending, result.one.finish) == ("clean", "stop")
    assert result.facts[-1] == "lost_after_end"
