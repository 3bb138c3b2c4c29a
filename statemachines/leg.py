"""One leg: one dispatch of a request to one worker, in a role (mixed, prefill or decode).

A leg knows nothing of the request it serves. How it ended is a fact for its request, one outcome
in its worker's metrics and one verdict for its worker's breaker; what stands behind the chart
says which.
"""

from enum import StrEnum
from typing import Literal

from statemachines.chart import Chart, Edge, each, everywhere

__all__ = [
    "LEG",
    "OUTCOMES",
    "VERDICTS",
    "LegState",
    "Outcome",
    "Verdict",
    "told_by_decode",
    "told_by_prefill",
]


class LegState(StrEnum):
    CONNECTING = "connecting"
    WAITING = "waiting"
    ANSWERING = "answering"
    STREAMING = "streaming"
    SUCCEEDED = "succeeded"
    REFUSED = "refused"
    PUSHED_BACK = "pushed_back"
    BROKEN = "broken"
    HANDED_BACK = "handed_back"
    CLOSED = "closed"
    CRASHED = "crashed"


S = LegState

# fmt: off
LEG = Chart(
    name="leg",
    initial=S.CONNECTING,
    final=(S.SUCCEEDED, S.REFUSED, S.PUSHED_BACK, S.BROKEN, S.HANDED_BACK, S.CLOSED, S.CRASHED),
    compiled=True,
    states={
        S.CONNECTING: "getting a connection; nothing was sent",
        S.WAITING: "sent; the worker has not answered yet",
        S.ANSWERING: "answered with a head, and has brought no content yet",
        S.STREAMING: "bringing content",
        S.SUCCEEDED: "over: a whole good answer was read to its end",
        S.REFUSED: "over: the worker blamed the request (4xx)",
        S.PUSHED_BACK: "over: the worker has no room now (429 or 503)",
        S.BROKEN: "over: the worker failed (cut, silence, nonsense, 5xx, an end that lies)",
        S.HANDED_BACK: "over: the draining worker returned the request",
        S.CLOSED: "over: closed by us, since what it lived in has ended",
        S.CRASHED: "over: a bug of ours",
    },
    facts={
        "connected": "a connection is there and the request is being written",
        "head_arrived": "status and headers of the answer are there",
        "first_token": "the first event with content is there",
        "completed": "the answer ended well",
        "rejected": "4xx other than 429, as status or in-band; told when its body is read",
        "backpressure": "429 or 503, as status or in-band; told when its body is read",
        "erred": "any other 5xx, as status or in-band; told when its body is read",
        "broke": "refused, reset, cut, or not the protocol",
        "stalled": "silent for longer than the deadline of its state",
        "lied": "an end that is none: abort finish, end without a finish, wrong length",
        "handed_back": "the draining worker returned the request unfinished",
        "let_go": "the scope it lived in was left: client gone, deadline, move, failed prefill",
        "bug": "an unexpected exception of ours while it was open",
    },
    scopes={"connection": (S.CONNECTING, S.WAITING, S.ANSWERING, S.STREAMING)},
    rows=(
        Edge(S.CONNECTING, "connected", S.WAITING,
             "the worker may have begun to compute from here on"),
        *each(S.CONNECTING, ("broke", "stalled"), S.BROKEN,
              "unreachable: nothing was sent, any other worker may take it"),

        Edge(S.WAITING, "head_arrived", S.ANSWERING,
             "the status is known; the verdict waits for the body"),
        *each(S.WAITING, ("broke", "stalled"), S.BROKEN,
              "no answer: cut before the head, or silent"),
        Edge(S.WAITING, "handed_back", S.HANDED_BACK,
             "drained before it answered"),

        Edge(S.ANSWERING, "first_token", S.STREAMING,
             "comments, heartbeats and role chunks do not count"),
        Edge(S.ANSWERING, "completed", S.SUCCEEDED,
             "a unary answer, an empty one, or a prefill that is done"),
        Edge(S.ANSWERING, "rejected", S.REFUSED,
             "the request is at fault, the worker is not"),
        Edge(S.ANSWERING, "backpressure", S.PUSHED_BACK,
             "busy is not broken"),
        *each(S.ANSWERING, ("erred", "broke", "stalled", "lied"), S.BROKEN,
              "the worker failed before any content"),
        Edge(S.ANSWERING, "handed_back", S.HANDED_BACK,
             "drained before any content"),

        Edge(S.STREAMING, "completed", S.SUCCEEDED,
             "finish and end mark are there"),
        Edge(S.STREAMING, "rejected", S.REFUSED,
             "an in-band 4xx in the middle of the stream"),
        Edge(S.STREAMING, "backpressure", S.PUSHED_BACK,
             "an in-band 429 or 503 in the middle of the stream"),
        *each(S.STREAMING, ("erred", "broke", "stalled", "lied"), S.BROKEN,
              "the worker failed in the middle of the stream"),
        Edge(S.STREAMING, "handed_back", S.HANDED_BACK,
             "its drain window ended in the middle of the stream"),

        everywhere("let_go", S.CLOSED,
                   "its connection closes, which frees the engine"),
        everywhere("bug", S.CRASHED,
                   "nothing is known about the worker: neither blamed nor praised"),
    ),
)
# fmt: on

Outcome = Literal["success", "client_error", "backpressure", "error", "cancelled"]
Verdict = Literal["success", "failure", "neutral"]

#: The outcome of each way to end, in `baton_worker_requests_total`.
OUTCOMES: dict[LegState, Outcome] = {
    S.SUCCEEDED: "success",
    S.REFUSED: "client_error",
    S.PUSHED_BACK: "backpressure",
    S.BROKEN: "error",
    S.HANDED_BACK: "cancelled",
    S.CLOSED: "cancelled",
    S.CRASHED: "error",
}

#: What each way to end says about the worker to its breaker.
VERDICTS: dict[LegState, Verdict] = {
    S.SUCCEEDED: "success",
    S.REFUSED: "neutral",
    S.PUSHED_BACK: "neutral",
    S.BROKEN: "failure",
    S.HANDED_BACK: "neutral",
    S.CLOSED: "neutral",
    S.CRASHED: "neutral",
}


#### What the end of a leg is for its request

_TOLD = {
    "completed": "completed",
    "rejected": "rejected",
    "broke": "leg_lost",
    "stalled": "leg_stalled",
    "lied": "leg_lied",
    "handed_back": "handed_back",
    "bug": "crashed",
}


def told_by_decode(fact: str, *, answer_began: bool, end_was_seen: bool) -> str:
    """The request's word for the fact that ended its decode leg, or its only one.

    `answer_began`: the client was given something of this leg's answer. `end_was_seen`: a finish
    reason, or the whole budget, was delivered before.
    """
    if end_was_seen and fact not in ("completed", "bug"):
        return "lost_after_end"
    if fact in ("erred", "backpressure"):
        # Inside an answer that has begun, an error is an end that lies; before that it is this
        # worker's refusal, and the next one may do better.
        return "leg_lied" if answer_began else "overloaded"
    return _TOLD[fact]


def told_by_prefill(fact: str, *, answer_began: bool, was_received: bool = True) -> str:
    """The request's word for the fact that ended the prefill leg of its current attempt badly.

    A 4xx is a verdict on the request; once decode's answer has begun nobody can be given it. A bug
    of ours in the reading of a prefill is a failed prefill: decode waits for it just the same.
    Where nobody was there to receive it, nothing of this attempt was tried: the next pair is.
    """
    if not was_received and not answer_began:
        return "passed_over"
    return "rejected" if fact == "rejected" and not answer_began else "prefill_failed"
