"""What of a request goes on to the next worker, and what of an answer keeps it from moving.

The scenarios that need a parser, an older release, an adapter or a second name for one request.
"""

from __future__ import annotations

import pytest

from tests.moves import is_told, is_whole, lose, more
from tests.simulate import Client, Engine, Plan, simulate

KINDS = pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang", "vllm sglang"])
#: Its answer is no longer the one that an engine without a parser gives.
PARSED = Client(tokens=10, path="/v1/chat/completions")
TOOL: dict[str, object] = {"type": "function", "function": {"name": "look_up"}}


#### What a parser found (scenarios 13 to 15)


@KINDS
@pytest.mark.parametrize("what", ["tool_call", "reasoning"])
def test_what_a_parser_found_does_not_move(kinds: str, what: str) -> None:
    fault = f"request=1:parse,what={what},event=3;request=1:cut,after_events=5"

    outcome = lose(fault, PARSED, kinds=kinds)

    assert is_told(outcome)
    assert outcome.asked(1) == []
    assert outcome.stuck == {"poisoned": 1}
    assert outcome.count("baton_poisoned_total", reason=what) == 1


@pytest.mark.parametrize("what", ["tool_call", "reasoning"])
def test_what_a_parser_found_reaches_the_client_unharmed(what: str) -> None:
    outcome = lose(f"request=1:parse,what={what},event=3", PARSED)

    name = "tool_calls" if what == "tool_call" else what
    assert is_whole(outcome)
    assert any(f'"{name}":' in str(event) for event in outcome.got[0].events)
    assert '"token_ids":[' not in str(outcome.got[0].events)


@pytest.mark.parametrize(
    ("kinds", "choice"), [("vllm vllm", "none"), ("sglang sglang", "auto"), ("vllm sglang", "none")]
)
def test_text_beside_tools_moves_as_a_chat_with_its_tools(kinds: str, choice: str) -> None:
    """A vLLM without a parser refuses tools that may be chosen."""
    outcome = lose(client=more(tools=[TOOL], tool_choice=choice), kinds=kinds)

    assert is_whole(outcome)
    assert outcome.work(1)[-1].path == "/v1/chat/completions"
    assert (outcome.asked(1)[-1]["tools"], outcome.asked(1)[-1]["tool_choice"]) == ([TOOL], choice)


#### Workers that do not do what they are asked


@pytest.mark.parametrize("kinds", ["vllm vllm vllm", "vllm vllm"])
def test_a_worker_that_ignores_the_ids_it_was_sent_shows_nothing(kinds: str) -> None:
    """An older vLLM would answer from the beginning; it is asked with the text instead."""
    engines = [Engine(kind=kind) for kind in kinds.split()]
    engines[0] = Engine(faults="request=1:cut,after_events=4")
    engines[1] = Engine(faults="forget")

    outcome = simulate(
        Plan(
            engines=tuple(engines),
            clients=(Client(tokens=10),),
            settings={"migration_limit": 1, "policy": "round_robin"},
        )
    )

    assert is_whole(outcome)
    assert "kv_transfer_params" in outcome.asked(1)[0]
    assert outcome.moves in ({"stream_broken text": 1}, {"stream_broken exact": 1})


def test_a_worker_that_never_tells_ids_is_read_as_text() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="forget,member=return_token_ids;request=1:cut,after_events=4"),
                     Engine()),
            clients=(Client(tokens=10),),
            settings={"migration_limit": 1},
        )
    )  # fmt: skip

    assert is_told(outcome)
    assert outcome.count("baton_poisoned_total", reason="uncounted") == 1


#### Names of one request (cases 55 to 58)


def test_an_adapter_is_asked_for_again_and_only_of_those_that_serve_it() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="request=1:cut,after_events=4", model="adapter"),
                     Engine(model="base"), Engine(model="adapter")),
            clients=(Client(tokens=10),),
            settings={"migration_limit": 1},
        )
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.asked(1) == []
    assert outcome.asked(2)[0]["model"] == "adapter"


@KINDS
def test_the_names_of_the_first_attempt_are_not_used_again(kinds: str) -> None:
    outcome = lose(client=more(request_id="mine", rid="mine"), kinds=kinds)

    assert is_whole(outcome)
    assert outcome.asked(0)[0]["rid"] == "mine"
    assert {"request_id", "rid"}.isdisjoint(outcome.asked(1)[0])


def test_what_belongs_to_the_request_goes_on_with_it() -> None:
    headers = (("x-session-id", "s1"), ("x-request-id", "r1"), ("traceparent", "00-a-b-01"))
    kept = {"user": "u", "priority": 3, "cache_salt": "c", "seed": 5}
    client = Client(tokens=10, headers=headers, extra=dict(kept))

    outcome = lose(client=client)

    [first], [second] = (
        [each for each in outcome.work(number) if each.path == "/v1/chat/completions"]
        for number in (0, 1)
    )
    assert is_whole(outcome)
    assert {name: outcome.asked(1)[0].get(name) for name in kept} == kept
    for name in ("x-session-id", "x-request-id", "traceparent"):
        assert second.headers.get(name) == first.headers.get(name) is not None
