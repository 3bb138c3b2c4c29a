"""Which prefill and which decode worker serve a request together.

Pure. A decode worker comes from its prefill's group, speaks the same protocol and serves the same
model; a prefill without such a partner is never chosen. Both permits are taken here, before
anything is sent, and a pair is never forced: where every breaker is shut, nothing goes out, since
half a pair that is sent keeps the other half waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from attrs import define, field, frozen

from router.choosing import Choice, Chooser
from router.errors import Refusal
from router.worker import Fleet, Worker

BOOTSTRAP = "sglang-bootstrap"
NIXL = "vllm-nixl"

#: What both halves of a pair have in common: their group and their protocol.
Kind = tuple[str | None, str]


class PairChoice(NamedTuple):
    """Two workers and the leave to send one leg to each."""

    prefill: Choice
    decode: Choice

    @property
    def worker(self) -> Worker:
        """The one that the client's answer comes from."""
        return self.decode.worker

    def give_back(self, now: float) -> None:
        """Nothing is sent after all."""
        self.prefill.give_back(now)
        self.decode.give_back(now)


@frozen(eq=False)
class _Halves:
    """The ready workers that have a partner, for one model."""

    #: What this was made from; `Fleet.ready` gives the same tuples until something changes.
    ready: tuple[tuple[Worker, ...], tuple[Worker, ...]]
    prefills: tuple[Worker, ...]
    decodes: dict[Kind, tuple[Worker, ...]]


@define(eq=False)
class Pairing:
    """Chooses pairs. Turns of decode workers are kept apart by kind."""

    fleet: Fleet
    #: As configured: a protocol, or `auto`.
    protocol: str
    prefill_chooser: Chooser
    make_decode_chooser: Callable[[], Chooser]
    _decode_choosers: dict[Kind, Chooser] = field(factory=dict)
    _known: dict[str | None, _Halves] = field(factory=dict)

    def protocol_of(self, worker: Worker) -> str:
        """How this worker is joined with its partner; `auto` goes by the engine."""
        if self.protocol != "auto":
            return self.protocol
        return NIXL if worker.engine == "vllm" else BOOTSTRAP

    def is_complete(self, model: str | None = None) -> bool:
        """Some pair could serve that model."""
        return bool(self._halves(model).prefills)

    def missing(self, model: str | None = None) -> Refusal:
        """Which half of a pair is not there."""
        if not self.fleet.ready("prefill", model):
            return Refusal("no_prefill_workers", "No prefill worker is ready.", retry_after=1)
        if not any(self._can_be_met(worker) for worker in self.fleet.ready("prefill", model)):
            message = "The bootstrap port of no prefill worker is known."
            return Refusal("no_prefill_workers", message, retry_after=1)
        if not self.fleet.ready("decode", model):
            return Refusal("no_decode_workers", "No decode worker is ready.", retry_after=1)
        message = "No prefill worker has a decode worker of its group that is ready."
        return Refusal("no_compatible_pd_group", message, retry_after=1)

    def has_other(self, model: str | None, tried: Collection[Worker]) -> bool:
        """Some pair is left that has not failed this request."""
        halves = self._halves(model)
        return any(
            prefill not in tried
            and any(decode not in tried for decode in halves.decodes[self._kind(prefill)])
            for prefill in halves.prefills
        )

    def choose(
        self, model: str | None, now: float, tried: Collection[Worker] = ()
    ) -> PairChoice | Refusal:
        """A pair and its permits, or why there is none: a half is missing, or breakers are open.

        Workers in `tried` are not chosen. Giving back or closing the permits is the caller's duty.
        """
        halves = self._halves(model)
        excluded = set(tried)
        while True:
            prefill = self.prefill_chooser.choose_open(halves.prefills, now, excluded, model)
            if prefill is None:
                break
            kind = self._kind(prefill.worker)
            chooser = self._decode_chooser(kind)
            decode = chooser.choose_open(halves.decodes[kind], now, tried, model)
            if decode is not None:
                return PairChoice(prefill, decode)
            prefill.give_back(now)
            excluded.update(each for each in halves.prefills if self._kind(each) == kind)
        if not self.has_other(model, tried):
            return self.missing(model)
        message = "Every pair has a worker that has just failed too often."
        return Refusal("breaker_open", message, retry_after=1)

    def _can_be_met(self, prefill: Worker) -> bool:
        """Decodes know where to find it; SGLang 0.5.23 waits 300 s where they are not told."""
        return self.protocol_of(prefill) == NIXL or prefill.bootstrap_port is not None

    def _kind(self, worker: Worker) -> Kind:
        return worker.group, self.protocol_of(worker)

    def _decode_chooser(self, kind: Kind) -> Chooser:
        chooser = self._decode_choosers.get(kind)
        if chooser is None:
            chooser = self._decode_choosers[kind] = self.make_decode_chooser()
        return chooser

    def _halves(self, model: str | None) -> _Halves:
        ready = self.fleet.ready("prefill", model), self.fleet.ready("decode", model)
        known = self._known.get(model)
        if known is not None and known.ready[0] is ready[0] and known.ready[1] is ready[1]:
            return known
        halves = self._find_halves(ready)
        if model is None or any(model in worker.models for worker in ready[0]):
            self._known[model] = halves  # only names that a worker has named: clients add none
        return halves

    def _find_halves(self, ready: tuple[tuple[Worker, ...], tuple[Worker, ...]]) -> _Halves:
        decodes: dict[Kind, tuple[Worker, ...]] = {}
        for worker in ready[1]:
            kind = self._kind(worker)
            decodes[kind] = (*decodes.get(kind, ()), worker)
        prefills = tuple(
            worker
            for worker in ready[0]
            if self._can_be_met(worker) and self._kind(worker) in decodes
        )
        return _Halves(ready, prefills, decodes)
