"""`python -m benchmarks`: the candidates beside each other, several rounds, and the tables.

Within a round every case visits all candidates one after the other, so that a change of the
machine's mood hits neighbours alike; the order turns by one with every round.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs
import cyclopts
import msgspec

from benchmarks import tables, tools
from benchmarks.candidates import DEFAULT_CANDIDATES, Candidate, chosen, install
from benchmarks.cases import DEFAULT_CASES, Case, named
from benchmarks.measure import MeasurementFailed, measure

GATE_UNARY, GATE_EVENTS, GATE_STREAM_BYTES = 1.2, 1.3, 30_000

app = cyclopts.App(name="python -m benchmarks", help="Baton beside other routers, one core each.")


@app.default
def main(
    *,
    rounds: int = 3,
    seconds: float = 4.0,
    only: Annotated[tuple[str, ...], cyclopts.Parameter(consume_multiple=True)] = DEFAULT_CASES,
    candidates: Annotated[
        tuple[str, ...], cyclopts.Parameter(consume_multiple=True)
    ] = DEFAULT_CANDIDATES,
    nice: int = 0,
    json_file: Annotated[Path | None, cyclopts.Parameter(name="--json")] = None,
    gate: bool = False,
) -> int:
    """Measures every candidate under every case and prints the tables.

    Parameters
    ----------
    rounds
        How often everything is measured.
    seconds
        How long each measurement's window is.
    only
        Cases to run: unary, unary32k, p128, p1000, s128, flat, churn (see README.md).
    candidates
        Names (direct, pass-through, baton, vllm-router, sglang-router, smg), or NAME=COMMAND with
        {port}, {metrics_port}, {workers} and {python} in it.
    nice
        Priority of all processes that are started; below 0 needs rights and is skipped without.
    json_file
        Also write every sample there.
    gate
        Exit 1 when Baton costs more than the limits allow against vllm-router.
    """
    try:
        cases = [named(name) for name in only]
        field = [chosen(text) for text in candidates]
        for program in ("worker", "load"):
            tools.build(program)
    except (KeyError, tools.NoCompiler) as problem:
        return _refuse(problem.args[0])
    if len(os.sched_getaffinity(0)) < 2:
        return _refuse("two cores are needed: one for the candidate, one for workers and clients")
    for candidate in field:
        install(candidate)
    os.sched_setaffinity(0, {1})
    done = [_round(number, field, cases, seconds, nice) for number in range(rounds)]
    names = [candidate.name for candidate in field]
    print(tables.render(done, names, [case.name for case in cases]))
    if json_file is not None:
        _write(json_file, done)
    return _judge(done, cases) if gate else 0


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
    path.write_text(json.dumps(plain, default=msgspec.to_builtins, indent=1) + "\n")


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
    sys.exit(app())
