"""The simulated engines' shapes against what real ones sent (tests/traces).

Compared is everything but values: keys and their order, nulls, types, which chunk carries
what. Errors are compared with their type, parameter and code.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from router.sim import SimEngine, SimSettings
from router.sim.settings import EngineKind
from tests.simclient import Heard, connect

TRACES = Path(__file__).parent / "traces"
ENGINES: tuple[EngineKind, ...] = ("vllm", "sglang")

# Keys whose values are compared, not only their types.
TELLING = {"object", "finish_reason", "role", "type", "param", "code", "owned_by", "detail"}
# Keys that come and go with the state of an engine's cache.
PASSING = {"cached_tokens_details", "response_sent_to_client_ts"}
# What depends on the text that a model happens to write.
BY_CHANCE = {"cmpl-stop", "cmpl-stop-unary", "cmpl-stopid", "chat-stop", "cmpl_max_tokens_null"}
# Where the imitation is known to be coarser than the engine.
COARSER = {
    # Batches of SGLang's own endpoint are answered with a list.
    "gen-batch",
    # SGLang's own log probabilities.
    "gen-logprob",
    # An echo in chat brings log probabilities of the prompt.
    "chat_echo_continue",
    # What the tokens of a vocabulary are called inside.
    "tok-strs",
}


def recordings(engine: str) -> Iterator[dict[str, Any]]:
    for one in json.loads((TRACES / f"{engine}.json").read_text(encoding="utf-8")):
        if one["name"] not in BY_CHANCE | COARSER:
            yield one


def cases() -> list[Any]:
    return [
        pytest.param(engine, one, id=f"{engine} {one['name']}")
        for engine in ENGINES
        for one in recordings(engine)
    ]


def skeleton(value: object, key: str = "") -> object:
    """A value without its content."""
    if isinstance(value, dict):
        if key == "top_logprobs":
            return "by token"
        shown = {name: inner for name, inner in value.items() if name not in PASSING}
        return {name: skeleton(inner, name) for name, inner in shown.items()}
    if isinstance(value, list):
        return [skeleton(value[0], key)] if value else []
    if value is None or isinstance(value, bool):
        return value
    if key in TELLING:
        return value
    return "number" if isinstance(value, int | float) else "text"


def skeletons(events: list[str]) -> list[str]:
    """The shapes of a stream's events in order, each run of equal ones once."""
    found: list[str] = []
    for event in events:
        name, _, data = event.partition("data: ")
        shape = data if data == "[DONE]" else json.dumps(skeleton(json.loads(data)))
        if found[-1:] != [name + shape]:
            found.append(name + shape)
    return found


def has_several_choices(request: dict[str, Any]) -> bool:
    return request.get("n", 1) > 1 or isinstance(request.get("prompt"), list)


async def replay(engine: SimEngine, one: dict[str, Any]) -> Heard:
    request = one["request"]
    body = request.encode() if isinstance(request, str) else request
    async with trio.open_nursery() as nursery:
        heard = await connect(engine, nursery).ask(
            one["path"], body, method=one["method"], headers=one.get("headers")
        )
        nursery.cancel_scope.cancel()
    return heard


@pytest.mark.parametrize(("engine", "one"), cases())
async def test_shape_is_the_recorded_one(engine: EngineKind, one: dict[str, Any]) -> None:
    heard = await replay(SimEngine(SimSettings(engine, context_length=2048)), one)

    assert heard.status == one["status"], heard.body
    assert heard.headers.get("content-type") == one["content_type"]
    if "events" in one:
        sent = skeletons(heard.body.decode().rstrip("\n").split("\n\n"))
        recorded = skeletons(one["events"])
        if has_several_choices(one["request"]):
            # Their chunks come in any order.
            sent, recorded = sorted(set(sent)), sorted(set(recorded))
        assert sent == recorded
    elif isinstance(one.get("body"), dict | list):
        assert json.dumps(skeleton(json.loads(heard.body))) == json.dumps(skeleton(one["body"]))
    elif one.get("body") is None:
        assert heard.body == b""
    else:
        assert heard.body.decode().strip('"') == one["body"]


# --- what a structure does not show --------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]
ANSWERED = [*HELLO, {"role": "assistant", "content": " well, my friend"}]
CONTINUE: dict[str, object] = {"continue_final_message": True, "add_generation_prompt": False}


async def ask(engine: EngineKind, path: str, body: dict[str, object], **settings: Any) -> Heard:
    one = {"method": "POST", "path": path, "request": {"model": "tiny"} | body}
    return await replay(SimEngine(SimSettings(engine, **settings)), one)


async def chat(engine: EngineKind, body: dict[str, object], **settings: Any) -> Heard:
    return await ask(engine, "/v1/chat/completions", body, **settings)


async def complete(engine: EngineKind, body: dict[str, object], **settings: Any) -> Heard:
    return await ask(engine, "/v1/completions", body, **settings)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_completion_continues_exactly_from_ids(engine: EngineKind) -> None:
    asked: dict[str, object] = {"prompt": "Once", "stream": True, "return_token_ids": True}
    whole = await complete(engine, asked | {"max_tokens": 20})
    first: Any = whole.chunks[0]["choices"]
    carried = first[0]["prompt_token_ids"] + whole.ids[:9]
    rest = await complete(engine, asked | {"prompt": carried, "max_tokens": 11})

    assert rest.ids == whole.ids[9:]
    assert len(whole.ids) == 20


async def test_engines_of_one_seed_write_the_same_whatever_they_imitate() -> None:
    asked: dict[str, object] = {"prompt": "Once", "max_tokens": 20, "stream": True}

    texts = {(await complete(kind, asked)).text for kind in (*ENGINES, "openai")}

    assert len(texts) == 1


async def test_vllm_chat_continues_from_ids_given_in_place_of_a_kv_transfer() -> None:
    asked: dict[str, object] = {"messages": HELLO, "stream": True, "return_token_ids": True}
    whole = await chat("vllm", asked | {"max_tokens": 12})
    prompt: Any = whole.chunks[0]["prompt_token_ids"]
    carried = {"kv_transfer_params": {"prompt_token_ids": prompt + whole.ids[:5]}}
    rest = await chat("vllm", asked | carried | {"max_tokens": 7})

    assert rest.chunks[0]["prompt_token_ids"] == prompt + whole.ids[:5]
    assert rest.ids == whole.ids[5:]


async def test_sglang_chat_continues_from_input_ids() -> None:
    asked: dict[str, object] = {"messages": HELLO, "stream": True}
    rendered = await ask("sglang", "/v1/tokenize", {"messages": HELLO})
    whole = await chat("sglang", asked | {"max_tokens": 12, "return_output_ids_in_sglext": True})
    extension: Any = whole.chunks[-1]["sglext"]
    prompt: Any = rendered.json["tokens"]
    carried = {"input_ids": prompt + extension["output_ids"][0][:5]}
    rest = await chat("sglang", asked | carried | {"max_tokens": 7})

    assert whole.text.endswith(rest.text)
    assert len(rest.text) > 7


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_final_assistant_turn_continues_as_text(engine: EngineKind) -> None:
    whole = await chat(engine, {"messages": HELLO, "max_tokens": 12, "stream": True})
    said = whole.text[: whole.text.rindex(" ")]
    turn = {"role": "assistant", "content": said}
    asked: dict[str, object] = {"messages": [*HELLO, turn], "max_tokens": 1, "stream": True}
    rest = await chat(engine, asked | CONTINUE)

    assert whole.text.startswith(said + rest.text)
    assert rest.text != ""


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_final_assistant_turn_is_not_continued_unasked(engine: EngineKind) -> None:
    asked: dict[str, object] = {"messages": ANSWERED, "max_tokens": 8, "stream": True}
    turned = [*HELLO, {"role": "user", "content": " well, my friend"}]

    plain = await chat(engine, asked)
    continued = await chat(engine, asked | CONTINUE)
    as_user = await chat(engine, asked | {"messages": turned})

    assert plain.text != continued.text
    # SGLang makes a user's turn of it.
    assert (plain.text == as_user.text) is (engine == "sglang")


async def test_vllm_refuses_a_continuation_beside_a_generation_prompt() -> None:
    asked: dict[str, object] = {"messages": ANSWERED, "max_tokens": 8}

    heard = await chat("vllm", asked | {"continue_final_message": True})

    assert heard.status == 400


PROMPT = [40] * 50


@pytest.mark.parametrize(
    ("engine", "path", "body", "count"),
    [
        ("vllm", "/v1/completions", {"prompt": PROMPT}, 16),
        ("sglang", "/v1/completions", {"prompt": PROMPT}, 16),
        (
            "vllm",
            "/v1/chat/completions",
            {"messages": HELLO, "kv_transfer_params": {"prompt_token_ids": PROMPT}},
            150,
        ),
        ("sglang", "/v1/chat/completions", {"messages": HELLO, "input_ids": PROMPT}, 148),
        ("sglang", "/generate", {"input_ids": PROMPT}, 128),
    ],
)
async def test_budgets_that_are_not_given(
    engine: EngineKind, path: str, body: dict[str, object], count: int
) -> None:
    heard = await ask(engine, path, body, context_length=200)
    usage: Any = heard.json.get("usage") or heard.json.get("meta_info")

    assert usage["completion_tokens"] == count


@pytest.mark.parametrize(
    ("engine", "budget", "status", "count"),
    [("vllm", 60, 200, 50), ("sglang", 60, 400, 0), ("sglang", 50, 200, 48)],
)
async def test_a_budget_beyond_the_context_is_cut_by_vllm_and_refused_by_sglang(
    engine: EngineKind, budget: int, status: int, count: int
) -> None:
    """SGLang (0.5.23) grants all of its context, and ends two tokens before it is full."""
    asked: dict[str, object] = {"prompt": PROMPT, "max_tokens": budget}

    heard = await complete(engine, asked, context_length=100)

    assert heard.status == status
    if status == 200:
        usage: Any = heard.json["usage"]
        assert usage["completion_tokens"] == count


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_prompt_beyond_the_context_is_refused(engine: EngineKind) -> None:
    heard = await complete(engine, {"prompt": [40] * 101, "max_tokens": 1}, context_length=100)

    assert heard.status == 400
    assert b"101" in heard.body


async def test_vllm_refuses_ids_outside_its_vocabulary() -> None:
    heard = await complete("vllm", {"prompt": [40, 2048], "max_tokens": 1})

    assert heard.status == 400


@pytest.mark.parametrize("engine", ENGINES)
async def test_choices_of_one_prompt_differ_and_all_end(engine: EngineKind) -> None:
    heard = await complete(engine, {"prompt": "Once", "n": 2, "max_tokens": 6})
    choices: Any = heard.json["choices"]
    first, second = choices

    assert (first["index"], second["index"]) == (0, 1)
    assert first["text"] != second["text"]
    assert first["finish_reason"] == second["finish_reason"] == "length"


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_stream_says_what_the_whole_answer_says(engine: EngineKind) -> None:
    asked: dict[str, object] = {"prompt": "Once", "max_tokens": 30, "stop": ["zzz"]}
    whole = await complete(engine, asked)
    streamed = await complete(engine, asked | {"stream": True})
    choices: Any = whole.json["choices"]

    assert streamed.text == choices[0]["text"]
    assert streamed.finish == choices[0]["finish_reason"]


@pytest.mark.parametrize("engine", ENGINES)
async def test_tokens_and_text_are_told_apart(engine: EngineKind) -> None:
    tokens = await ask(engine, "/tokenize", {"prompt": "the world 🙂<|im_end|>"})
    text = await ask(engine, "/detokenize", {"tokens": tokens.json["tokens"]})

    assert tokens.json["count"] == len(tokens.json["tokens"])  # type: ignore[arg-type]  # a list
    # vLLM shows special tokens, SGLang leaves them out.
    shown = "the world 🙂<|im_end|>" if engine == "vllm" else "the world 🙂"
    assert text.json == {"prompt" if engine == "vllm" else "text": shown}


async def test_a_plain_server_gives_nothing_of_itself_away() -> None:
    asked = {"model": "tiny", "prompt": "a", "stream": True, "return_token_ids": True}
    found = {}
    async with trio.open_nursery() as nursery:
        client = connect(SimEngine(SimSettings("openai")), nursery)
        for path in ("/health", "/version", "/server_info", "/model_info", "/load", "/v1/models"):
            found[path] = (await client.ask(path)).status
        models = await client.ask("/v1/models")
        streamed = await client.ask("/v1/completions", asked)
        nursery.cancel_scope.cancel()

    assert {path for path, status in found.items() if status == 200} == {"/v1/models"}
    assert b"max_model_len" not in models.body
    assert b"token_ids" not in streamed.body
    assert "server" not in models.headers
