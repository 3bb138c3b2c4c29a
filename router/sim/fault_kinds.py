"""The ways in which a simulated engine can misbehave: one closed table. Pure data.

An answer fault is for one request, and so is one of half a pair; a connection fault is for one
connection, an engine fault for all of the engine. `faults` reads the language in which they are
asked for.
"""

from typing import Literal

from attrs import frozen

Value = bool | int | float | str
Family = Literal["answer", "half", "connection", "engine"]


@frozen
class Parameter:
    """One parameter of a kind; its default also gives its type."""

    name: str
    default: Value
    text: str
    words: tuple[str, ...] = ()


@frozen
class Kind:
    """One way to misbehave."""

    name: str
    family: Family
    text: str
    parameters: tuple[Parameter, ...] = ()


_PLACES = ("request", "head", "finish", "done")


def _point(at: str, places: tuple[str, ...] = _PLACES) -> tuple[Parameter, ...]:
    where = "before the head, after it, after the last finish, after [DONE]"
    return (
        Parameter("at", at, where, places),
        Parameter("after_events", -1, "instead: once this many events were sent"),
    )


_RESTART = Parameter("restart_after", 0.0, "seconds after which it serves again; 0 = never")
_AFTER_EVENTS = Parameter(
    "after_events", -1, "events of the triggering stream before it; -1 = none"
)
_DONE = Parameter("done", True, "whether [DONE] follows")

_TABLE = (
    Kind(
        "delay",
        "answer",
        "answer late",
        (
            Parameter("head", 0.0, "seconds before the head"),
            Parameter("first_token", 0.0, "more seconds before the first token"),
            Parameter("token", 0.0, "more seconds before every later token"),
        ),
    ),
    Kind(
        "status",
        "answer",
        "answer with a status and the engine's error body",
        (
            Parameter("code", 503, "the status"),
            Parameter("retry_after", "", "value of a Retry-After header"),
            Parameter("message", "simulated error", "the error's message"),
        ),
    ),
    Kind("empty", "answer", "answer 200 with an empty body of the right type"),
    Kind("hang", "answer", "stay silent from a point on, connection open", _point("request")),
    Kind(
        "cut",
        "answer",
        "close the connection at a point",
        (
            *_point("request"),
            Parameter("inside_bytes", 0, "bytes of the next event (or of the head) still sent"),
            Parameter("reset", False, "RST instead of FIN"),
        ),
    ),
    Kind(
        "pause",
        "answer",
        "go silent at a point, then go on as if nothing had been",
        (
            *_point("head", _PLACES[1:]),
            Parameter("seconds", 1.0, "how long"),
            Parameter("comments_every", 0.0, "seconds between comments meanwhile; 0 = none"),
        ),
    ),
    Kind(
        "error_event",
        "answer",
        "an error event, then a clean end; unary: the error as the answer",
        (
            *_point("head", _PLACES[1:]),
            Parameter("code", 500, "the code in the event"),
            Parameter("message", "simulated error", "the error's message"),
            _DONE,
        ),
    ),
    Kind(
        "abort",
        "answer",
        "finish as aborted, then a clean end",
        (
            *_point("head", _PLACES[1:]),
            _DONE,
            Parameter("reason", "abort", "the finish reason", ("abort", "error")),
        ),
    ),
    Kind(
        "end",
        "answer",
        "end the body cleanly at a point; at=finish: with a finish and without [DONE]",
        (
            *_point("head", _PLACES[1:]),
            Parameter("done", False, "whether [DONE] is sent all the same"),
        ),
    ),
    Kind(
        "garbage",
        "answer",
        "break HTTP or JSON",
        (
            Parameter(
                "what",
                "status_line",
                "which part is wrong",
                (
                    "status_line",
                    "header",
                    "two_lengths",
                    "chunk_size",
                    "chunk_end",
                    "short_body",
                    "long_body",
                    "after_end",
                    "json",
                    "utf8",
                ),
            ),
            Parameter("after_events", 0, "events before it, where it is in the body"),
        ),
    ),
    Kind("gzip", "answer", "compress the body although nobody asked"),
    Kind("close_after", "answer", "answer well, then close the kept-alive connection unannounced"),
    Kind("close_reused", "answer", "on a reused connection: read the request, close, send nothing"),
    Kind("close_delimited", "answer", "no length and no chunks: the body ends with the connection"),
    Kind("interim", "answer", "a 1xx response first", (Parameter("code", 103, "its status"),)),
    Kind(
        "slow_reader",
        "answer",
        "read the request's body slowly",
        (Parameter("bytes_per_second", 1024, "how slowly"),),
    ),
    Kind(
        "dribble",
        "answer",
        "send in small pieces",
        (
            Parameter("bytes", 1, "bytes a piece"),
            Parameter("seconds", 0.0, "pause between pieces"),
        ),
    ),
    Kind("lump", "answer", "send events several at a time", (Parameter("events", 4, "how many"),)),
    Kind("comments", "answer", "a comment before every event", ()),
    Kind("crlf", "answer", "lines of events end with CR LF", ()),
    Kind(
        "parse",
        "answer",
        "the text of one event of a chat is told as a parser does that found more in it",
        (
            Parameter("what", "tool_call", "which parser", ("tool_call", "reasoning")),
            Parameter("event", 2, "which event, counted from 0"),
        ),
    ),
    Kind(
        "forget",
        "answer",
        "not to know a member of the request, as an older release",
        (Parameter("member", "kv_transfer_params", "its name"),),
    ),
    Kind(
        "padding",
        "answer",
        "make the body, or every event, larger",
        (Parameter("bytes", 65536, "by how much"),),
    ),
    Kind(
        "early_head",
        "answer",
        "the head at once, comments while there is nothing to say",
        (Parameter("comments_every", 0.0, "seconds between comments; 0 = none"),),
    ),
    Kind(
        "alone",
        "half",
        "prefill keeps its KV cache and says nothing of it; decode computes the prompt itself",
    ),
    Kind(
        "linger",
        "half",
        "prefill answers later than it hands over its KV cache",
        (Parameter("seconds", 1.0, "how much later"),),
    ),
    Kind("transfer_fails", "half", "the KV cache is not brought over: an error instead of text"),
    Kind(
        "drop",
        "connection",
        "accept a connection and close it at once",
        (Parameter("reset", False, "RST instead of FIN"),),
    ),
    Kind("mute", "connection", "accept a connection and never read from it"),
    Kind("refuse", "engine", "refuse connections; those that are open live on", (_RESTART,)),
    Kind(
        "freeze",
        "engine",
        "stop as under SIGSTOP: connections are accepted, nothing is answered",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "core_dies",
        "engine",
        "vLLM's engine core is killed: error events and [DONE], health 503, gone after 2 s",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "server_dies",
        "engine",
        "the API server is killed: every connection is cut, then refused",
        (_AFTER_EVENTS, Parameter("reset", False, "RST instead of FIN"), _RESTART),
    ),
    Kind(
        "sigterm_abort",
        "engine",
        "vLLM gets SIGTERM: streams finish as aborted, no new connections",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "sigterm_hang",
        "engine",
        "vLLM gets SIGTERM and loses the race: streams go silent, no new connections",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "sigterm_drain",
        "engine",
        "vLLM gets SIGTERM with a shutdown timeout: streams complete, health is 200, new work 500",
        (_AFTER_EVENTS, Parameter("timeout", 20.0, "seconds until the rest is aborted"), _RESTART),
    ),
    Kind(
        "sglang_drain",
        "engine",
        "SGLang gets SIGTERM: streams complete, health 503, new work is served; gone when idle",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "scheduler_dies",
        "engine",
        "SGLang's scheduler is killed: streams stall, then everything is cut and refused",
        (_AFTER_EVENTS, Parameter("stall", 6.0, "seconds until the cut"), _RESTART),
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _TABLE}


def manual() -> str:
    """The table as text, one kind a paragraph."""
    lines = []
    for kind in _TABLE:
        lines.append(f"{kind.name}  {kind.text}")
        lines += [f"    {one.name}={_shown(one)}  {one.text}" for one in kind.parameters]
    return "\n".join(lines)


def _shown(parameter: Parameter) -> str:
    """A default as it is written in the language."""
    value = parameter.default
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "|".join(parameter.words) + f" (default {text})" if parameter.words else text
