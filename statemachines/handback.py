"""One request as the agent beside the worker sees it: taken, answered, or handed back in a drain.

The agent stands between the router's message and the engine. Which frame is the last one that the
router gets follows from the final state (`LAST_FRAMES`), so there is exactly one, and a request
that was handed back is never told an error as well. A cancel for a request that is over, or that
is not known, concerns no machine and is told to none.
"""

from enum import StrEnum
from typing import Literal

from statemachines.chart import Chart, Edge, each, everywhere

__all__ = ["HANDBACK", "LAST_FRAMES", "HandbackState", "LastFrame"]


class HandbackState(StrEnum):
    QUEUED = "queued"
    ASKING = "asking"
    STREAMING = "streaming"
    DONE = "done"
    HANDED_BACK = "handed_back"
    FAILED = "failed"
    CANCELLED = "cancelled"


S = HandbackState

# fmt: off
HANDBACK = Chart(
    name="handback",
    initial=S.QUEUED,
    final=(S.DONE, S.HANDED_BACK, S.FAILED, S.CANCELLED),
    compiled=True,
    states={
        S.QUEUED: "taken from its subject; the engine has not got it yet",
        S.ASKING: "with the engine, which has not answered yet",
        S.STREAMING: "being answered: what the engine sends goes out as it comes",
        S.DONE: "over: the engine's answer went out whole, whatever its status",
        S.HANDED_BACK: "over: returned with the drain notice, to go on elsewhere",
        S.FAILED: "over: an error went out",
        S.CANCELLED: "over: nobody wants it, and nothing more goes out",
    },
    facts={
        "sent": "a connection to the engine is there and the request is being written",
        "answered": "status and headers of the engine's answer are there",
        "ended": "the answer is complete, and its last frame waits for the broker at most",
        "malformed": "the message is none that an engine could be asked with",
        "broke": "the engine refuses connections, or cut this one",
        "stalled": "the engine was silent for longer than --nats-req-idle-timeout",
        "clogged": "the broker takes no more, so that a part of the answer is missing",
        "unheard": "nobody listens to its answer any more, since its router was killed",
        "overdue": "it has taken longer than --nats-req-max-duration",
        "cancel_came": "its router gave it up, perhaps before it came",
        "window_over": "the window of a drain has ended, or it was stored before the agent began",
        "stop_came": "the agent must stop at once: a second signal, or an error it cannot outlive",
        "bug": "an unexpected exception of ours while it was open",
    },
    guards={
        "is_migratable": "its router has promised to continue it elsewhere if it is handed back",
    },
    scopes={
        "engine": (S.QUEUED, S.ASKING, S.STREAMING),
    },
    rows=(
        Edge(S.QUEUED, "sent", S.ASKING,
             "from here on the engine may compute"),
        Edge(S.QUEUED, "malformed", S.FAILED,
             "its router hears what is wrong with it, and the engine nothing"),
        Edge(S.QUEUED, "broke", S.FAILED,
             "the engine is not there; its router tries another worker"),
        Edge(S.QUEUED, "window_over", S.HANDED_BACK, guard="is_migratable",
             why="not begun here, so it can begin elsewhere"),
        Edge(S.QUEUED, "window_over", S.FAILED,
             "its router has nowhere to continue it, and must hear that it ends"),

        Edge(S.ASKING, "answered", S.STREAMING,
             "also where the status is an error: that is an answer, too"),
        *each(S.ASKING, ("broke", "stalled"), S.FAILED,
              "no answer; its router may ask another worker"),
        Edge(S.ASKING, "window_over", S.HANDED_BACK, guard="is_migratable",
             why="nothing of it went out, so nothing is lost"),
        Edge(S.ASKING, "window_over", S.FAILED,
             "its router has nowhere to continue it, and must hear that it ends"),

        Edge(S.STREAMING, "ended", S.DONE,
             "all of it went out, and the engine's status with it"),
        *each(S.STREAMING, ("broke", "stalled"), S.FAILED,
              "the rest will not come; what went out stays true"),
        Edge(S.STREAMING, "clogged", S.FAILED,
             "a stream with a hole is worse than one that ends; the engine is freed"),
        Edge(S.STREAMING, "window_over", S.HANDED_BACK, guard="is_migratable",
             why="what went out is carried along by its router"),
        Edge(S.STREAMING, "window_over", S.FAILED,
             "its router has nowhere to continue it, and must hear that it ends"),

        everywhere("overdue", S.FAILED,
                   "its router counts the same time and has given up as well"),
        everywhere("cancel_came", S.CANCELLED,
                   "the engine is freed at once, and nobody listens any more"),
        everywhere("unheard", S.FAILED,
                   "the engine is freed; a router that was only cut off need not wait"),
        everywhere("stop_came", S.FAILED,
                   "no notice: who stops abruptly promises nothing"),
        everywhere("bug", S.FAILED,
                   "that one request, loudly"),
    ),
)
# fmt: on

LastFrame = Literal["done", "notice", "error", "none"]

#: What the router is sent last, by the state that a request ended in.
LAST_FRAMES: dict[HandbackState, LastFrame] = {
    S.DONE: "done",
    S.HANDED_BACK: "notice",
    S.FAILED: "error",
    S.CANCELLED: "none",
}
