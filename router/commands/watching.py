"""`baton watch URL`: the transitions of a running router, one a line.

It ends when the router stops (exit code 0), when the connection is lost or refused (1), and with
Ctrl-C (0): whoever watches has seen enough.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
import trio
from attrs import define

from router.commands.columns import counted, cut, printable
from router.commands.remote import add_admin_key, reason_of
from router.feed import MACHINES, BadFilter, Lost, Transition, check_machine
from router.websocket import STOPPED, WatchError, WatchRefused, watch
from statemachines import ROUTER_CHARTS

T = TypeVar("T", bound=msgspec.Struct)
COLUMNS = ("time (UTC)", "machine", "id", "source", "fact", "target")
#: The longest id that clients usually choose, a UUID, as the id of a prefill's leg.
ID_CHARACTERS_MAX = 36 + len(".1.prefill")


def _widths() -> tuple[int, ...]:
    """Fixed, so that a line never waits for the next one."""
    states = max(len(str(state.value)) for chart in ROUTER_CHARTS for state in chart.states)
    facts = max(len(fact) for chart in ROUTER_CHARTS for fact in chart.facts)
    machines = max(map(len, MACHINES))
    return len("00:00:00.000"), machines, ID_CHARACTERS_MAX, states, facts, states


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """URL and what to see of it."""
    parser.epilog = (
        "Filters can be given several times; a transition is shown if it fits one of each kind. "
        "What --json prints can be given to baton replay."
    )
    parser.add_argument("url", metavar="URL", help="the router, as http://HOST:PORT")
    parser.add_argument(
        "--machine",
        action="append",
        type=_machine,
        metavar="MACHINE",
        help=f"this machine: {', '.join(MACHINES)}",
    )
    parser.add_argument(
        "--worker",
        action="append",
        metavar="ID",
        help="this worker, its breaker, its legs and the requests it has",
    )
    parser.add_argument(
        "--request", action="append", metavar="ID", help="this request and its legs"
    )
    add_admin_key(parser)
    parser.add_argument("--json", action="store_true", help="print the messages as they come")
    parser.set_defaults(command=run_watch)


def _machine(name: str) -> str:
    try:
        check_machine(name)
    except BadFilter as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    return name


def run_watch(arguments: argparse.Namespace) -> int:
    """Watch until it is over; returns the exit code."""
    screen = Screen(is_json=arguments.json)
    asked = {key: getattr(arguments, key) for key in ("machine", "worker", "request")}
    query = {key: values for key, values in asked.items() if values}
    code = trio.run(_watch, arguments.url, query, arguments.admin_key, screen)
    if code is None:
        raise BrokenPipeError
    if screen.has_begun:
        screen.sum_up()
    return code


async def _watch(
    url: str, query: dict[str, list[str]], admin_key: str | None, screen: Screen
) -> int | None:
    """The exit code; None when nobody reads what is printed."""
    code: int | None = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_told, signals, nursery.cancel_scope)
            code = await _watch_to_its_end(url, query, admin_key, screen)
            nursery.cancel_scope.cancel(reason="nothing more comes")
    return code


async def _watch_to_its_end(
    url: str, query: dict[str, list[str]], admin_key: str | None, screen: Screen
) -> int | None:
    try:
        await watch(url, query=query, admin_key=admin_key, opened=screen.begin, show=screen.show)
    except WatchRefused as refused:
        problem = reason_of(refused.status, refused.body)
    except WatchError as error:
        problem = str(error)
    except BrokenPipeError:
        return None
    else:
        print(f"baton watch: {STOPPED}", file=sys.stderr)
        return 0
    print(f"baton watch: {problem}", file=sys.stderr)
    return 1


async def _cancel_when_told(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel(reason="Ctrl-C")


@define(eq=False)
class Screen:
    """What has been printed."""

    is_json: bool
    has_begun: bool = False
    seen: int = 0
    lost: int = 0
    _widths: tuple[int, ...] = _widths()

    def begin(self) -> None:
        """The head of the table."""
        self.has_begun = True
        if not self.is_json:
            print(self._line(COLUMNS), flush=True)

    def show(self, message: str) -> None:
        """One message of the router; one that this version does not know is passed over."""
        moved = _decode(message, Transition)
        gap = _decode(message, Lost)
        lost = 0 if gap is None else gap.lost
        self.lost += lost
        self.seen += moved is not None
        if self.is_json:
            print(message, flush=True)
            return
        if lost:
            print(f"-- {lost:,} not shown: they came faster than they were read", flush=True)
        if moved is not None:
            time = moved.time.partition("T")[2].removesuffix("Z")
            words = moved.machine, moved.id, moved.source, moved.fact, moved.target
            print(self._line((time, *words)), flush=True)

    def sum_up(self) -> None:
        """The last line, beside the output."""
        print(f"{counted(self.seen, 'transition')}, {self.lost:,} lost", file=sys.stderr)

    def _line(self, words: tuple[str, ...]) -> str:
        fitted = (
            cut(printable(word), width) for word, width in zip(words, self._widths, strict=True)
        )
        return "  ".join(map(str.ljust, fitted, self._widths)).rstrip()


def _decode(message: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(message, type=kind)
    except msgspec.DecodeError:
        return None
