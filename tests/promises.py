"""What must hold after every simulated run, whatever its plan.

Stories assert only what they are about; these are asserted of all of them, and of every plan that
is drawn by luck. Each function is one promise and its name says which.
"""

from __future__ import annotations

from collections import Counter

import trio
from attrs import define, field

from router.app import App
from router.errors import STATUS_OF
from router.feed import Watcher
from router.logs import HasId, Stamp
from router.ticket import Ticket
from statemachines import LEG, REQUEST, Edge
from statemachines.leg import LegState
from statemachines.request import RequestState
from tests.outcome import Got, Outcome

LOST = {LegState.BROKEN, LegState.PUSHED_BACK, LegState.CRASHED}
#: How the detail of a leg begins that was let go, and is lost all the same.
IN_VAIN = ("lost on its way: ", "nobody listens", "the worker's entry", "did not go on")
DETAIL_CHARACTERS_MAX = 200
_HOP_BY_HOP = {"keep-alive", "proxy-authenticate", "te", "trailer", "upgrade"}
#: At one virtual moment; a megabyte in the smallest pieces takes a tenth of it.
PASSES_MAX = 200_000
#: Seconds by which sums of floating-point moments may differ.
_TIME_SLACK = 1e-6


#### While it runs


def watch_passes(app: App) -> None:
    """After every pass of the reactor: a leg is open exactly in the attempt's states.

    And time goes on: what needs no end of passes at one moment would burn a core for nothing.
    """
    attempt = REQUEST.scopes["attempt"]
    turn, reactor, live = app.reactor.turn, app.reactor, app.serving.live
    moment, passes = -1.0, 0

    def checked_turn(seconds: float = 0.0) -> None:
        nonlocal moment, passes
        turn(seconds)
        if reactor.now != moment:
            moment, passes = reactor.now, 0
        passes += 1
        assert passes < PASSES_MAX, f"no end of passes at {moment}"
        attempts = 0
        for ticket, exchange in live.items():
            leg = exchange.leg
            if leg is None and exchange.pair is not None:
                leg = exchange.pair.awaited
            has_leg = leg is not None and leg.is_open
            assert has_leg == (ticket.state in attempt), (ticket.state, leg)
            attempts += has_leg
        # A prefill may outlive its request.
        loads = sum(len(worker.legs) for worker in app.fleet.all() if worker.role != "prefill")
        assert loads <= attempts, f"{loads} legs on workers, {attempts} attempts"

    app.reactor.turn = checked_turn  # type: ignore[method-assign]


@define(eq=False)
class _Clock(Watcher):
    """A watcher that looks at its watch: each fact is told when the reactor believes it to be."""

    app: App = field(kw_only=True)

    def tell(self, machine: str, subject: HasId, edge: Edge, time: Stamp) -> None:
        if machine in ("request", "leg"):
            now, at = self.app.reactor.now, trio.current_time()
            assert now == at, f"{subject.id}: {edge.fact} at {at}, with the time of {now}"


def watch_time(app: App) -> None:
    """No fact is told with the time of an earlier pass: deadlines and durations are made of it."""
    app.feed.watchers.append(_Clock(app=app))


def everything_is_given_back(app: App) -> None:
    """Before it stops: no request, place, leg or permit is left."""
    assert not app.serving.live, f"left open: {[ticket.id for ticket in app.serving.live]}"
    assert not app.serving.admission.holding
    assert not app.serving.admission.waiting
    for worker in app.fleet.all():
        assert worker.inflight == 0, f"legs left on {worker.id}"
        assert worker.breaker.probe is None, f"permit of {worker.id} did not come back"


#### Afterwards


def check(outcome: Outcome) -> None:
    """Hold a run to every promise."""
    no_bug_was_met(outcome)
    for ticket in outcome.tickets:
        its_history_is_legal(ticket)
        its_attempts_are_bounded(outcome, ticket)
        it_ended_in_time(outcome, ticket)
        its_legs_are_remembered(ticket)
    every_lost_leg_is_a_line(outcome)
    everything_is_counted_once(outcome)
    no_engine_works_for_nobody(outcome)
    no_engine_is_asked_twice(outcome)
    for got in outcome.got:
        if got.client.raw is None:
            it_has_ended(got)
            its_answer_is_right(outcome, got)
            its_budget_is_kept(got)
            it_is_one_stream(outcome, got)
            its_error_has_the_one_shape(outcome, got)
            its_error_is_in_the_log(outcome, got)
            its_rejection_is_the_engine_s_own(outcome, got)
            its_end_is_visible(outcome, got)
            its_headers_are_clean(got)


def no_bug_was_met(outcome: Outcome) -> None:
    bugs = [line for line in outcome.log if line["event"] == "internal_error"]
    assert not bugs, f"a bug was met: {bugs[0].get('traceback')}"
    assert outcome.sum("baton_internal_errors_total") == 0
    assert not [line for line in outcome.log if line["event"] == "probe crashed"]


def its_history_is_legal(ticket: Ticket) -> None:
    assert ticket.is_over, f"{ticket.id} is still {ticket.state}"
    state: object = RequestState.QUEUED
    for _, edge in ticket.history:
        assert edge.source is state, f"{ticket.id}: {edge.fact} in {edge.source}, was {state}"
        state = edge.target
    assert state is ticket.state


def its_attempts_are_bounded(outcome: Outcome, ticket: Ticket) -> None:
    """Further ones while the client has nothing; later, no worker twice and no move too many.

    Answers that a broker has lost blame nobody: their workers may be asked again.
    """
    name, default = ("pd_max_retries", 0) if ticket.is_paired else ("request_max_retries", 1)
    retries = outcome.plan.settings.get(name, default)
    moves = outcome.plan.settings.get("migration_limit", 0)
    assert isinstance(retries, int)
    assert isinstance(moves, int)
    facts = [(edge.source, edge.fact, edge.target) for _, edge in ticket.history]
    given_back = sum(fact in ("handed_back", "passed_over") for _, fact, _ in facts)
    begun = sum(source is RequestState.QUEUED for source, fact, _ in facts if fact == "admitted")
    assert begun <= 1 + retries + given_back, f"{ticket.id} began {begun} times"
    resumed = ticket.attempts - begun
    rephrased = sum(_is_rephrased(each) for each in facts)
    # Who could not be reached, since the broker was away, may have been asked from the start again.
    others = max(len(outcome.engines) - begun, 0) + rephrased + missed_of(outcome)
    assert resumed <= others, f"{ticket.id} resumed {resumed}"
    made = sum(
        source is RequestState.RESUMING for source, fact, _ in facts if fact == "first_token"
    )
    assert made <= moves, f"{ticket.id} moved {made} times"


def _is_rephrased(taken: tuple[object, str, object]) -> bool:
    return taken[1:] == ("rejected", RequestState.MIGRATING)


def it_ended_in_time(outcome: Outcome, ticket: Ticket) -> None:
    limit = outcome.plan.settings.get("request_timeout_secs", 1800.0)
    assert isinstance(limit, int | float)
    assert ticket.ended_at is not None
    seconds = ticket.ended_at - ticket.started_at
    assert not limit or seconds <= limit + _TIME_SLACK, f"{ticket.id} took {seconds} s"


def its_legs_are_remembered(ticket: Ticket) -> None:
    """Each has ended, by a fact of its chart, and of one that failed it is known why."""
    count = len(ticket.traces)
    assert count == ticket.attempts or (ticket.is_paired and count <= 2 * ticket.attempts)
    targets = {(edge.fact, edge.target) for edge in LEG.rows}
    for trace in ticket.traces:
        assert trace.ended_at is not None, f"{ticket.id}: a leg that has not ended"
        assert ticket.started_at <= trace.began_at <= trace.ended_at
        assert trace.state in LEG.final
        assert (trace.fact, trace.state) in targets
        is_plain = trace.state not in LOST or (trace.status or 0) >= 300
        assert trace.detail or is_plain, f"{ticket.id}: {trace.fact}, and nobody knows why"
        has_reason = trace.state in (LegState.SUCCEEDED, LegState.HANDED_BACK)
        assert not (trace.detail and has_reason), f"{ticket.id}: {trace.fact}: {trace.detail}"
        its_words_are_our_own(trace.detail)


def its_words_are_our_own(detail: str) -> None:
    """A phrase of a log: short, in one style, and nothing of what a worker has said."""
    assert detail.isascii()
    assert detail == "" or detail.isprintable()
    assert len(detail) <= DETAIL_CHARACTERS_MAX
    assert not detail.endswith(".")
    assert "http:" not in detail
    assert "simulated" not in detail


def every_lost_leg_is_a_line(outcome: Outcome) -> None:
    traces = [trace for ticket in outcome.tickets for trace in ticket.traces]
    lost = [
        (trace.worker, trace.role, trace.fact, trace.status, trace.detail or None)
        for trace in traces
        if trace.state in LOST or trace.was_in_vain
    ]
    in_vain = [trace for trace in traces if trace.was_in_vain]
    assert all(trace.detail.startswith(IN_VAIN) for trace in in_vain), in_vain
    names = ("worker", "role", "fact", "status", "detail")
    lines = [tuple(line[name] for name in names) for line in outcome.log if line["event"] == "lost"]
    assert Counter(lines) == Counter(lost)
    blamed = Counter(worker for worker, _, fact, _, _ in lines if fact not in ("let_go", "bug"))
    # Counts go with their worker; lines stay.
    gone = {line["worker"] for line in outcome.log if line.get("fact") == "left"}
    gone |= {f"w{text.split()[1]}" for _, text in outcome.plan.happenings if text[:6] == "remove"}
    for worker in {trace.worker for trace in traces} - gone:
        counted = sum(
            value
            for name, value in outcome.metrics.items()
            if name.startswith("baton_worker_requests_total{")
            and f'worker="{worker}"' in name
            and ('outcome="error"' in name or 'outcome="backpressure"' in name)
        )
        said = f"{blamed[worker]} lines blame {worker}, and {counted} are counted"
        assert blamed[worker] == counted, said


def everything_is_counted_once(outcome: Outcome) -> None:
    total = outcome.sum("baton_requests_total")
    assert total == len(outcome.tickets), f"{total} requests counted of {len(outcome.tickets)}"
    finals = Counter(ticket.state.value for ticket in outcome.tickets)
    for final, count in finals.items():
        assert _of(outcome, "baton_requests_total", f'outcome="{final}"') == count
    legs = sum(ticket.attempts * (1 + ticket.is_paired) for ticket in outcome.tickets)
    counted = outcome.sum("baton_worker_requests_total")
    # The series of a removed worker vanish with it.
    is_fixed = (
        not any("remove" in what for _, what in outcome.plan.happenings)
        and not any(got.client.method == "DELETE" for got in outcome.got)
        and not any(engine.wire == "agent" for engine in outcome.plan.engines)
    )
    # Of a pair's legs the second may never have been sent.
    is_right = counted <= legs if outcome.plan.has_halves else counted == legs
    assert is_right or not is_fixed, f"{counted} legs counted of {legs}"
    assert outcome.sum("baton_stream_outcome_total") <= counted
    if not outcome.moves:
        assert not _of(outcome, "baton_stream_outcome_total", 'outcome="migrated"')
    lines = [line for line in outcome.log if line["event"] == "request"]
    lines = [line for line in lines if "frames" not in line]  # those are of agents
    assert len(lines) == len(outcome.tickets)
    assert outcome.sum("baton_requests_open") == 0
    assert outcome.sum("baton_worker_inflight") == 0


def _of(outcome: Outcome, name: str, label: str) -> float:
    return sum(v for k, v in outcome.metrics.items() if k.startswith(name) and label in k)


def no_engine_works_for_nobody(outcome: Outcome) -> None:
    for engine in outcome.engines:
        assert engine.inflight == 0, f"{engine.settings.name} still works"


def missed_of(outcome: Outcome) -> int:
    """Answers that were lost on their way, of all requests."""
    return int(outcome.sum("baton_nats_missed_total"))


def no_engine_is_asked_twice(outcome: Outcome) -> None:
    """One request goes to one worker once; twice only where a kept connection was stale.

    A continuation that was refused may come again in its other form, and half of a pair may be
    asked again when its partner has failed: that is another room, and another name. So may whoever
    had its answer lost by a broker.
    """
    named = Counter(ticket.id for ticket in outcome.tickets)
    for ticket in outcome.tickets:
        facts = [(edge.source, edge.fact, edge.target) for _, edge in ticket.history]
        named[ticket.id] += sum(map(_is_rephrased, facts))
        named[ticket.id] += (ticket.attempts - 1) * ticket.is_paired + missed_of(outcome)
    for number, engine in enumerate(outcome.engines):
        asked: dict[str, list[bool]] = {}
        for each in outcome.work(number):
            if "x-request-id" in each.headers:  # else a question of the router's own
                asked.setdefault(each.headers["x-request-id"], []).append(each.reused)
        for id, reused in asked.items():
            is_once = len(reused) == 1 or reused == [True, False] or named[id] > 1
            assert is_once, f"{id} was sent to {engine.settings.name} {len(reused)} times"


def it_has_ended(got: Got) -> None:
    assert got.ending in ("clean", "cut", "left", "refused", "unsent"), got.ending


def its_budget_is_kept(got: Got) -> None:
    """No more tokens than were asked for, however many workers they came from."""
    if not got.client.is_judged or {"n", "max_tokens"} & set(got.client.extra):
        return
    assert len(got.ids) <= got.client.tokens
    for usage in got.usages:
        told = usage["completion_tokens"]
        assert isinstance(told, int)
        assert told <= got.client.tokens, usage


def its_answer_is_right(outcome: Outcome, got: Got) -> None:
    if not got.client.is_judged or got.status != 200:
        return
    right = [direct.text for direct in got.direct]
    fitting = [text for text in right if text.startswith(got.text)]
    assert fitting, f"{got.text!r} is the beginning of none of {right}"
    if got.ending == "clean" and not _counts_more(outcome):
        assert got.text in right, f"an incomplete answer ended cleanly: {got.text!r} of {right}"


def _counts_more(outcome: Outcome) -> bool:
    """Half a character of merged tokens is counted, and a move that carries only text loses it.

    The answer may then end early, and its usage says what the engines have generated.
    """
    is_merged = any(engine.tokens_per_chunk > 1 for engine in outcome.plan.engines)
    return is_merged and any(name.endswith(" text") for name in outcome.moves)


def it_is_one_stream(outcome: Outcome, got: Got) -> None:
    """However many workers it took: one identity, role, finish, usage and end; no foreign ids."""
    if not (got.client.is_judged and got.is_events and got.status == 200):
        return
    for name in ("id", "object", "created", "model"):
        assert len({str(chunk.get(name)) for chunk in got.chunks}) <= 1, f"two values of {name}"
    choices = max(1, len(got.indices))
    assert got.roles <= choices, f"{got.roles} roles"
    assert len(got.finishes) <= choices, f"finished as {got.finishes}"
    assert len(got.usages) <= 1, got.usages
    assert got.events.count(b"[DONE]") <= 1, "[DONE] came twice"
    assert not got.ids or got.client.extra.get("return_token_ids"), "ids that nobody asked for"
    assert not got.is_done or got.events[-1] == b"[DONE]", "something came after [DONE]"
    if got.ending == "clean" and got.is_done and len(got.indices) == 1:
        is_told = [one for one in got.direct if one.text == got.text]
        mine = _facts_of(got, usage=not _counts_more(outcome))
        known = [_facts_of(one) for one in is_told]
        if _may_lack_usage(outcome):
            known += [_facts_of(one, usage=False) for one in is_told]
        assert mine in known or not is_told, f"{mine}, not {known}"


def _may_lack_usage(outcome: Outcome) -> bool:
    """Where an end was written by the router, the engine may never have told it."""
    told = {edge.fact for ticket in outcome.tickets for _, edge in ticket.history}
    faults = [engine.faults for engine in outcome.plan.engines]
    faults += [got.client.fault for got in outcome.got]
    has_trouble = any(faults) or bool(outcome.plan.happenings)
    return has_trouble or bool(outcome.moves) or "lost_after_end" in told


def _facts_of(got: Got, *, usage: bool = True) -> object:
    """What of a whole stream does not depend on who wrote it, besides its text."""
    counts = [
        {name: told.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        for told in got.usages
        if usage
    ]
    return got.finishes, counts, got.ids if got.client.extra.get("return_token_ids") else []


def its_end_is_visible(outcome: Outcome, got: Got) -> None:
    """A stream that failed never ends cleanly, and says why; one that ended well says so."""
    if got.status != 200 or not got.is_events or "content-encoding" in got.headers:
        return
    if got.ending == "clean":
        assert got.error is None, "an error, and then a clean end"
        assert got.is_done or not got.client.is_judged, "a clean end without [DONE]"
        assert got.finish in ("stop", "length", None)
        assert got.finish is not None or not got.client.is_judged, "no finish, and a clean end"
    if got.ending != "cut" or _was_given_up(outcome, got):
        return
    assert not got.is_done, "[DONE] before a cut"
    if not got.client.http_10:  # a reset, which may overtake the last words
        assert got.plain.endswith((b"\n\n", b"\r\n\r\n")), "an event was cut"
        assert got.error is not None, "cut without a word"


def _was_given_up(outcome: Outcome, got: Got) -> bool:
    """The router took it for gone, or could not wait for it: it is told nothing more."""
    if got.client.half_closes_at is not None:
        return True
    if got.client.reads_from and any(what == "stop" for _, what in outcome.plan.happenings):
        return True
    id = got.headers["x-request-id"]
    states = {ticket.state for ticket in outcome.tickets if ticket.id == id}
    return RequestState.ABANDONED in states


def its_error_has_the_one_shape(outcome: Outcome, got: Got) -> None:
    if got.status < 400 and got.error is None:
        return
    error, own = got.error, got.headers.get("x-router-error-code")
    if own is not None:
        assert error is not None, got.body
        assert set(error) == {"message", "type", "param", "code"}
        assert got.status == STATUS_OF[own]
        assert error["code"] == own
        assert "127.0.0.1" not in str(error["message"]), "an address of a worker was told"
    elif got.status < 400:
        assert error is not None
        assert isinstance(error["message"], str)
    assert b"Traceback" not in got.body


def its_error_is_in_the_log(outcome: Outcome, got: Got) -> None:
    """The code that the client was told; none where it got an engine's own words."""
    if got.status == 0 or got.ending not in ("clean", "cut") or _was_given_up(outcome, got):
        return
    id = got.headers["x-request-id"]
    codes = {ticket.code for ticket in outcome.tickets if ticket.id == id}
    if got.error is None and got.ending == "cut":
        return  # no stream of events, so that nobody could tell it
    if len(codes) == 1:
        own = got.headers.get("x-router-error-code")
        if got.status == 200 and got.code in STATUS_OF:
            own = str(got.code)
        assert codes == {own}


def its_rejection_is_the_engine_s_own(outcome: Outcome, got: Got) -> None:
    """A 4xx of an engine is its word on the request: as a status, or as an event in a stream."""
    if got.ending not in ("clean", "cut") or got.error is None or _was_given_up(outcome, got):
        return
    id = got.headers["x-request-id"]
    tickets = [ticket for ticket in outcome.tickets if ticket.id == id]
    if len(tickets) != 1 or tickets[0].is_paired or not tickets[0].history:
        return
    (_, last), own = tickets[0].history[-1], got.headers.get("x-router-error-code")
    # What an engine says to a continuation is not for its client.
    if last.fact == "rejected" and last.source is not RequestState.RESUMING and own is None:
        assert got.status >= 400 or got.error["code"] not in STATUS_OF, got.error
        assert not got.status >= 500, got.error


def its_headers_are_clean(got: Got) -> None:
    if got.status == 0:
        return
    names = Counter(name for name, _ in got.header_list)
    assert not _HOP_BY_HOP & set(names), names
    assert got.headers.get("x-request-id"), "an answer without a request id"
    framings = names["content-length"] + names["transfer-encoding"]
    assert framings <= 1, f"framed twice: {got.header_list}"
    assert names["x-request-id"] == 1
    if got.is_events and got.status == 200:
        assert got.headers["cache-control"] == "no-cache"
        assert got.headers["x-accel-buffering"] == "no"
