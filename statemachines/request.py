"""One client request, from admission to its last byte.

The client sees one answer, however many workers it takes; this table says which facts end an
attempt, which end the request, and when the answer may go on elsewhere. What separates the states
is what the client has been given: nothing (queued, dispatching), a head (committed), content
(streaming, poisoned, and migrating or resuming after it). Tokens are no facts; they are counted in
plain attributes that the guards read.
"""

from enum import StrEnum

from statemachines.chart import Chart, Edge, each, everywhere

__all__ = ["REQUEST", "RequestState"]


class RequestState(StrEnum):
    QUEUED = "queued"
    DISPATCHING = "dispatching"
    COMMITTED = "committed"
    STREAMING = "streaming"
    POISONED = "poisoned"
    MIGRATING = "migrating"
    RESUMING = "resuming"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    ABANDONED = "abandoned"


S = RequestState

#: The worker's stream is gone, or its end cannot be believed.
LOST = ("leg_lost", "leg_stalled", "leg_lied")

# Two lines a row: the formatter would make seven of them, and nobody could read down a column.
# fmt: off
REQUEST = Chart(
    name="request",
    initial=S.QUEUED,
    final=(S.FINISHED, S.FAILED, S.ABORTED, S.ABANDONED),
    compiled=True,
    states={
        S.QUEUED: "admitted; no worker is chosen yet, and the client has received nothing",
        S.DISPATCHING: "on a worker (or a pair of them); the client has received nothing",
        S.COMMITTED: "answered: the client has the head and at most preamble, no content yet",
        S.STREAMING: "delivering content, and could be continued on another worker",
        S.POISONED: "delivering content that no other worker could continue faithfully",
        S.MIGRATING: "without a worker in the middle of its answer; the next one is being chosen",
        S.RESUMING: "on its next worker, which has not produced new content yet",
        S.FINISHED: "complete: the client has the whole good answer",
        S.FAILED: "over, and the client was told an error (or got a cut body after its head)",
        S.ABORTED: "ended by us before its first token, because its prefill failed",
        S.ABANDONED: "left by its client",
    },
    facts={
        "admitted": "a worker (or a pair) was chosen and its permits are taken",
        "refused": "nobody can take it: no worker or pair, breaker open, queue full or too slow",
        "answered": "the head and at most preamble (role chunk, comments) went to the client",
        "first_token": "the first content of this attempt goes to the client",
        "unreplayable": "an event that no continuation could reproduce was delivered",
        "completed": "the worker's answer ended well and is delivered to its last byte",
        "lost_after_end": "the worker was lost, but a finish or the whole budget was delivered",
        "leg_lost": "the connection to the worker failed, was cut or broke the protocol",
        "leg_stalled": "the worker was silent for longer than its deadline",
        "leg_lied": "an end that is none: abort finish, in-band 5xx, end without a finish",
        "overloaded": "429 or 5xx from the worker before any content, as status or in-band",
        "rejected": "a 4xx: a verdict on the request itself, as status or in-band",
        "handed_back": "the draining worker returned the request unfinished",
        "passed_over": "nobody is there to take it, or it is too large for the way there",
        "prefill_failed": "the prefill leg of the current attempt failed",
        "client_gone": "the client closed its side or stopped reading for too long",
        "deadline_passed": "the one clock of the whole request ran out",
        "shut_down": "the router's drain window is over",
        "crashed": "a bug of ours broke this request",
    },
    guards={
        "can_retry": "further workers (or pairs) may be tried while the client has nothing",
        "can_continue": "what was delivered so far could be continued faithfully elsewhere",
        "can_migrate": "migration is on, moves are left, and the answer is not too long to carry",
        "can_rephrase": "the continuation has another form that was not tried (once)",
    },
    scopes={
        "request": (S.QUEUED, S.DISPATCHING, S.COMMITTED, S.STREAMING, S.POISONED, S.MIGRATING,
                    S.RESUMING),
        "attempt": (S.DISPATCHING, S.COMMITTED, S.STREAMING, S.POISONED, S.RESUMING),
    },
    ends={"attempt": (*LOST, "overloaded", "rejected", "handed_back", "passed_over", "completed",
                      "lost_after_end")},
    groups={"lost": LOST},
    rows=(
        Edge(S.QUEUED, "admitted", S.DISPATCHING,
             "the attempt begins; its legs are sent"),
        Edge(S.QUEUED, "refused", S.FAILED,
             "the client is told who is missing, or gets the last worker's own answer"),

        #### On a worker, nothing sent to the client
        Edge(S.DISPATCHING, "answered", S.COMMITTED,
             "from here on a failure can no longer be hidden behind another status"),
        Edge(S.DISPATCHING, "first_token", S.STREAMING, guard="can_continue",
             why="head and content leave together; the record of the answer begins"),
        Edge(S.DISPATCHING, "first_token", S.POISONED,
             "content of a shape that cannot be continued (choices, tools, structured output)"),
        Edge(S.DISPATCHING, "completed", S.FINISHED,
             "a whole answer at once: unary, or a stream that fits in one read"),
        Edge(S.DISPATCHING, "rejected", S.FAILED,
             "every worker would say the same: the client gets this answer as it is"),
        *each(S.DISPATCHING, (*LOST, "overloaded"), S.QUEUED, guard="can_retry",
              why="the client has received nothing, so another worker may start afresh"),
        *each(S.DISPATCHING, (*LOST, "overloaded"), S.FAILED,
              why="no retries left: the client gets the last worker's answer, or an error"),
        Edge(S.DISPATCHING, "handed_back", S.QUEUED,
             "a drain is nobody's fault: another worker, no retry spent, breaker neutral"),
        Edge(S.DISPATCHING, "passed_over", S.QUEUED,
             "the worker never got it: the next one, no retry spent, breaker neutral"),
        Edge(S.DISPATCHING, "prefill_failed", S.QUEUED, guard="can_retry",
             why="the pair is given up and decode closed; a fresh pair, fresh room and rid"),
        Edge(S.DISPATCHING, "prefill_failed", S.FAILED,
             "decode is closed before its first token; the client gets prefill's status"),

        #### The client has a head, no content
        Edge(S.COMMITTED, "first_token", S.STREAMING, guard="can_continue",
             why="the record of the answer begins"),
        Edge(S.COMMITTED, "first_token", S.POISONED,
             "content of a shape that cannot be continued (choices, tools, structured output)"),
        Edge(S.COMMITTED, "completed", S.FINISHED,
             "an empty answer that ended well"),
        Edge(S.COMMITTED, "lost_after_end", S.FINISHED,
             "the finish of an empty answer was seen; the rest is written here"),
        Edge(S.COMMITTED, "rejected", S.FAILED,
             "the in-band verdict is forwarded, then the body is cut"),
        *each(S.COMMITTED, LOST, S.MIGRATING, guard="can_migrate",
              why="only preamble was delivered: the original request restarts, whatever its shape"),
        *each(S.COMMITTED, LOST, S.FAILED,
              why="no move left: an error event, no [DONE], the body is cut"),
        Edge(S.COMMITTED, "handed_back", S.MIGRATING, guard="can_migrate",
             why="only preamble was delivered: it restarts elsewhere, breaker neutral"),
        Edge(S.COMMITTED, "handed_back", S.FAILED,
             "no move left: the client is told that the worker is shutting down"),
        Edge(S.COMMITTED, "prefill_failed", S.ABORTED,
             "decode would wait for a KV cache that never comes: closed and aborted at once"),

        #### Content flows and could go on elsewhere
        Edge(S.STREAMING, "unreplayable", S.POISONED,
             "from this event on a continuation would be a guess; the stream itself goes on"),
        Edge(S.STREAMING, "completed", S.FINISHED,
             "finish reason and [DONE] are delivered"),
        Edge(S.STREAMING, "lost_after_end", S.FINISHED,
             "completed locally: a move would generate tokens beyond the answer"),
        Edge(S.STREAMING, "rejected", S.FAILED,
             "the in-band verdict is forwarded, then the body is cut"),
        *each(S.STREAMING, LOST, S.MIGRATING, guard="can_migrate",
              why="what the client has is carried to another worker, which goes on from there"),
        *each(S.STREAMING, LOST, S.FAILED,
              why="no move left: an error event, no [DONE], the body is cut"),
        Edge(S.STREAMING, "handed_back", S.MIGRATING, guard="can_migrate",
             why="the draining worker let go of a stream that can move; breaker neutral"),
        Edge(S.STREAMING, "handed_back", S.FAILED,
             "no move left: the client is told that the worker is shutting down"),
        Edge(S.STREAMING, "prefill_failed", S.STREAMING,
             "recorded, nothing else: the first token proves that the KV cache had arrived"),

        #### Content flows and is tied to this worker
        Edge(S.POISONED, "completed", S.FINISHED,
             "finish reason and [DONE] are delivered"),
        Edge(S.POISONED, "lost_after_end", S.FINISHED,
             "completed locally: nothing was missing but the end mark"),
        Edge(S.POISONED, "rejected", S.FAILED,
             "the in-band verdict is forwarded, then the body is cut"),
        *each(S.POISONED, LOST, S.FAILED,
              why="never approximated: an error event, no [DONE], the body is cut"),
        Edge(S.POISONED, "handed_back", S.FAILED,
             "it was marked as movable before it was poisoned; breaker neutral"),
        Edge(S.POISONED, "prefill_failed", S.POISONED,
             "recorded, nothing else: the first token proves that the KV cache had arrived"),

        #### Between two workers
        Edge(S.MIGRATING, "admitted", S.RESUMING,
             "the continuation is sent to a worker that has not failed this request"),
        Edge(S.MIGRATING, "lost_after_end", S.FINISHED,
             "looked at closely, the whole budget was delivered: the end is written here"),
        Edge(S.MIGRATING, "refused", S.FAILED,
             "nobody can continue it: an error event, no [DONE], the body is cut"),

        #### On the next worker, no new content yet
        Edge(S.RESUMING, "first_token", S.STREAMING, guard="can_continue",
             why="the move succeeded, and one move is spent"),
        Edge(S.RESUMING, "first_token", S.POISONED,
             "the move succeeded, but what came cannot be continued once more"),
        Edge(S.RESUMING, "completed", S.FINISHED,
             "nothing was missing but the end"),
        Edge(S.RESUMING, "lost_after_end", S.FINISHED,
             "the continuation's finish was seen; the rest is written here"),
        Edge(S.RESUMING, "rejected", S.MIGRATING, guard="can_rephrase",
             why="the worker dislikes this form (a template, say): another form, once"),
        Edge(S.RESUMING, "rejected", S.FAILED,
             "the 4xx answers a continuation the client never wrote: not forwarded"),
        *each(S.RESUMING, (*LOST, "overloaded"), S.MIGRATING, guard="can_migrate",
              why="the next candidate; no move is spent until one produces content"),
        *each(S.RESUMING, (*LOST, "overloaded"), S.FAILED,
              why="no candidates left to try: an error event, no [DONE], the body is cut"),
        Edge(S.RESUMING, "handed_back", S.MIGRATING,
             "it drains before it began: the next candidate, nothing spent, breaker neutral"),
        Edge(S.RESUMING, "passed_over", S.MIGRATING,
             "the worker never got it: the next candidate, nothing spent, breaker neutral"),
        Edge(S.RESUMING, "prefill_failed", S.MIGRATING, guard="can_migrate",
             why="the prefill of the new pair: decode is closed, a fresh pair is tried"),
        Edge(S.RESUMING, "prefill_failed", S.FAILED,
             "the prefill of the new pair, and no candidates left: error event, body cut"),

        #### From every open state
        everywhere("client_gone", S.ABANDONED,
                   "nobody reads: the engine is freed at once"),
        everywhere("deadline_passed", S.FAILED,
                   "time belongs to the request, not to the attempt: it never moves on"),
        everywhere("shut_down", S.FAILED,
                   "this process is leaving; it does not move its own streams"),
        everywhere("crashed", S.FAILED,
                   "one request fails loudly, the others go on"),
    ),
)
