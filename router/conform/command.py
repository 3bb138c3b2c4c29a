"""`baton conform`: reads its flags, tries the cases, prints the matrix."""

from __future__ import annotations

import argparse
import resource
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio
from attrs import define, field

from router.conform import matrix
from router.conform.case import KNOBS, Case
from router.conform.cases import CASES, LEFT_OUT
from router.conform.loopback import opened
from router.conform.routers import SETTINGS, Candidate, chosen, installed
from router.conform.running import Verdict, try_case

_EPILOG = f"""\
routers:
  A preset (baton, vllm-router, sglang-router, smg), or --launch 'NAME=COMMAND' for any other. Its
  COMMAND may hold {{port}}, {{metrics_port}} and, as a word of its own, {{workers}}: their URLs.

      baton conform --launch 'mine=./mine --port {{port}} --backends {{workers}}' \\
          --set 'mine.cap=--max-concurrent {{}}' --set mine.ready=/readyz

  --set NAME.KEY=VALUE says how a router does what a case wants; a case whose flag is not known is
  not applicable. KEY is one of {", ".join(SETTINGS)}, or:

{chr(10).join(f"      {name:12} {text}" for name, text in KNOBS.items())}

  The value of those is the flags, with {{}} where the number goes; empty if it does so by default.
  To try pairs, the COMMAND has {{fleet}}, for which `mixed` or `pd` is put; `mixed` holds
  {{workers}}, `pd` holds {{prefill}} and {{decode}}, which are made of pd-prefill and pd-decode
  with their {{url}} and {{bootstrap_port}}. `ready` is the path of its readiness endpoint.

exit code: 0 when every case passed or was not applicable, 1 when one failed, 2 for a mistake.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `baton conform`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("routers", nargs="*", metavar="ROUTER", help="presets to try (default baton)")
    add(
        "--launch",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="try a router that is started so",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="what else is to be known of a router",
    )
    add("--bin", default="", metavar="DIR", help="where presets are installed (default: the PATH)")
    add(
        "--engine",
        choices=("vllm", "sglang", "openai"),
        help="what the engines imitate (default: what each router is made for)",
    )
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="CASE",
        help="only these cases, by name or complaint",
    )
    add("--list", action="store_true", help="list the cases and end")
    form = parser.add_mutually_exclusive_group().add_argument
    form("--json", action="store_true", help="print the verdicts as JSON")
    form("--markdown", action="store_true", help="print the matrix, reasons and flags as Markdown")
    add("--jobs", type=int, default=4, metavar="N", help="cases tried at a time (default 4)")
    add("--logs", metavar="DIR", help="keep what the routers print")


class BadCall(ValueError):
    """What was typed makes no sense; the message says why."""


def run(arguments: argparse.Namespace) -> int:
    """Try what was asked for and print it; the exit code. Raises BadCall and BadRouter."""
    cases = _cases(arguments.only)
    if arguments.list:
        print(_listed(cases))
        return 0
    if arguments.jobs < 1:
        raise BadCall("--jobs: at least 1")
    folder = f"{arguments.bin.rstrip('/')}/" if arguments.bin else ""
    candidates = [installed(one, folder) for one in _candidates(arguments)]
    _raise_descriptor_limit()
    with TemporaryDirectory(prefix="baton-conform-") as temporary:
        logs = _made(Path(arguments.logs or temporary))
        run = Run(candidates, cases, folder, logs)
        trio.run(run.all, arguments.jobs)
    if run.stopped_by:
        return 128 + run.stopped_by  # what a shell says of it
    if arguments.json:
        print(matrix.as_json(candidates, run.results))
    elif arguments.markdown:
        print(matrix.as_markdown(cases, candidates, run.results))
    else:
        print(matrix.as_table(cases, run.results))
    return 1 if run.has_failed else 0


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadCall(f"--logs {folder}: {problem.strerror}") from None
    return folder


def _cases(only: Sequence[str]) -> list[Case]:
    known = {word for one in CASES for word in (one.name, one.complaint)}
    unknown = [word for word in only if word not in known]
    if unknown:
        left_out = LEFT_OUT.get(unknown[0])
        why = f": it is left out, because {left_out}" if left_out else " (see --list)"
        raise BadCall(f"--only: there is no case {unknown[0]}{why}")
    return [one for one in CASES if not only or one.name in only or one.complaint in only]


def _listed(cases: Sequence[Case]) -> str:
    width = max(len(one.name) for one in cases)
    return "\n".join(f"{one.complaint:4} {one.name:{width}}  {one.done}" for one in cases)


def _candidates(arguments: argparse.Namespace) -> list[Candidate]:
    names = arguments.routers or ([] if arguments.launch else ["baton"])
    candidates = chosen(names, arguments.launch, arguments.set)
    if arguments.engine:
        both = {"engine": arguments.engine, "pd_engine": arguments.engine}
        candidates = [attrs.evolve(one, **both) for one in candidates]
    return candidates


def _raise_descriptor_limit() -> None:
    """A stream takes a descriptor at its client and one at its engine, and both are here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@define(eq=False)
class Run:
    """All cases on all routers."""

    candidates: list[Candidate]
    cases: list[Case]
    folder: str
    logs: Path
    stopped_by: int = 0
    results: dict[str, dict[str, Verdict]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.results = {one.name: {} for one in self.candidates}

    @property
    def has_failed(self) -> bool:
        return any(
            verdict.outcome == "fail"
            for verdicts in self.results.values()
            for verdict in verdicts.values()
        )

    async def all(self, jobs: int) -> None:
        """Router by router. A signal ends it early, and every router with it."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:

                async def wait_told() -> None:
                    async for number in signals:
                        self.stopped_by = number
                        nursery.cancel_scope.cancel("a signal")

                nursery.start_soon(wait_told)
                await self._all(jobs)
                nursery.cancel_scope.cancel("all are tried")

    async def _all(self, jobs: int) -> None:
        """Heavy cases one at a time, after the others."""
        for candidate in self.candidates:
            limit = trio.CapacityLimiter(jobs)
            async with trio.open_nursery() as nursery:
                for case in self.cases:
                    if not case.is_heavy:
                        nursery.start_soon(self._try, candidate, case, limit)
            for case in self.cases:
                if case.is_heavy:
                    await self._try(candidate, case, limit)
            # In the order of the table, not in that in which they ended.
            found = self.results[candidate.name]
            self.results[candidate.name] = {one.name: found[one.name] for one in self.cases}

    async def _try(self, candidate: Candidate, case: Case, limit: trio.CapacityLimiter) -> None:
        async with limit:
            verdict = await self._verdict(candidate, case)
        self.results[candidate.name][case.name] = verdict
        reason = f": {verdict.reason}" if verdict.reason else ""
        print(
            f"{candidate.name}: {case.name}: {verdict.outcome}{reason} ({verdict.seconds:.1f} s)",
            file=sys.stderr,
            flush=True,
        )

    async def _verdict(self, candidate: Candidate, case: Case) -> Verdict:
        lacking = candidate.lacks(case)
        if lacking is not None:
            return Verdict("n/a", lacking)
        log = self.logs / f"{candidate.name}-{case.name}.log"
        place = partial(opened, candidate, self.folder, log)
        return await try_case(case, place, candidate.knobs(case), candidate.engine_for(case))
