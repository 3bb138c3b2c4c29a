"""`python -m benchmarks`: the candidates beside each other, several rounds, and the tables.

Within a round every case visits all candidates one after the other, so that a change of the
machine's mood hits neighbours alike; the order turns by one with every round.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec

from benchmarks import tables, tools
from benchmarks.candidates import CANDIDATES, DEFAULT_CANDIDATES, Candidate, chosen, install
from benchmarks.cases import CASES, DEFAULT_CASES, Case, named
from benchmarks.measure import LOAD_CORE, MeasurementFailed, measure

GATE_UNARY, GATE_EVENTS, GATE_STREAM_BYTES = 1.2, 1.3, 30_000


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Baton beside other routers, one core each; see benchmarks/README.md.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often everything is measured (3)")
    add("--seconds", type=float, default=4, help="how long each measurement's window is (4)")
    add(
        "--only",
        nargs="+",
        metavar="CASE",
        default=DEFAULT_CASES,
        help=f"of {', '.join(case.name for case in CASES)}; all but unary32k by default",
    )
    add(
        "--candidates",
        nargs="+",
        metavar="NAME[=COMMAND]",
        default=DEFAULT_CANDIDATES,
        help=f"of {', '.join(known.name for known in CANDIDATES)}, or NAME=COMMAND with {{port}},"
        " {workers}, {metrics_port} and {python} in it; the first four by default",
    )
    add("--nice", type=int, default=0, help="priority of all processes; below 0 needs rights")
    add("--json", type=Path, metavar="FILE", help="write every sample there")
    add("--gate", action="store_true", help="exit 1 when Baton exceeds its share of vllm-router's")
    return parser


def main() -> int:
    given = options().parse_args()
    try:
        cases = [named(name) for name in given.only]
        field = [chosen(text) for text in given.candidates]
        for program in ("worker", "load"):
            tools.build(program)
    except (KeyError, tools.NoCompiler) as problem:
        return _refuse(problem.args[0])
    if len(os.sched_getaffinity(0)) < 2:
        return _refuse("two cores are needed: one for the candidate, one for workers and clients")
    for candidate in field:
        install(candidate)
    os.sched_setaffinity(0, {LOAD_CORE})
    window = given.seconds
    done = [_round(number, field, cases, window, given.nice) for number in range(given.rounds)]
    names = [candidate.name for candidate in field]
    print(tables.render(done, names, [case.name for case in cases]))
    if given.json is not None:
        _write(given.json, done)
    return _judge(done, cases) if given.gate else 0


def _refuse(text: str) -> int:
    print(f"benchmarks: {text}", file=sys.stderr)
    return 2


def _round(
    number: int, field: Sequence[Candidate], cases: Sequence[Case], seconds: float, nice: int
) -> tables.Round:
    logs = tools.BUILD / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    turn = number % len(field)
    samples: tables.Round = {}
    for case in cases:
        for candidate in (*field[turn:], *field[:turn]):
            label = f"round {number + 1}, {case.name}, {candidate.name}:"
            try:
                sample = measure(candidate, case, seconds=seconds, nice=nice, logs=logs)
            except MeasurementFailed as failure:
                print(label, failure, file=sys.stderr)
                continue
            print(label, f"{sample.cpu_us:.1f} µs/{case.operation}", file=sys.stderr)
            samples[candidate.name, case.name] = sample
    return samples


def _write(path: Path, rounds: Sequence[tables.Round]) -> None:
    plain = [[attrs.asdict(sample) for sample in samples.values()] for samples in rounds]
    path.write_text(
        json.dumps(plain, default=msgspec.to_builtins, indent=1) + "\n", encoding="utf-8"
    )


def _judge(rounds: Sequence[tables.Round], cases: Sequence[Case]) -> int:
    verdict = 0
    for case in cases:
        limit = GATE_UNARY if case.mode == "unary" else GATE_EVENTS
        value = tables.ratio(rounds, "baton", case.name)
        if value is None or value > limit:
            print(f"gate: {case.name} at {value} of vllm-router, allowed {limit}", file=sys.stderr)
            verdict = 1
    held = tables.stream_bytes(rounds, "baton", named("p1000"))
    if held is not None and held > GATE_STREAM_BYTES:
        print(f"gate: {held:.0f} bytes a stream, allowed {GATE_STREAM_BYTES}", file=sys.stderr)
        verdict = 1
    return verdict


if __name__ == "__main__":
    sys.exit(main())
