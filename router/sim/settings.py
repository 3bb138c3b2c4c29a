"""What a simulated engine is told when it starts."""

from collections.abc import Iterable
from typing import Literal

from attrs import field, frozen

from router.sim.faults import parse_faults

EngineKind = Literal["vllm", "sglang", "openai"]
Role = Literal["mixed", "prefill", "decode"]
SigtermBehaviour = Literal["native", "abort", "hang", "drain", "exit"]


def _as_tuple(faults: str | Iterable[str]) -> tuple[str, ...]:
    return (faults,) if isinstance(faults, str) else tuple(faults)


def _check_faults(_: object, __: object, faults: tuple[str, ...]) -> None:
    for text in faults:
        parse_faults(text)


@frozen
class SimSettings:
    """One simulated engine. Equal `seed`, `eos_every` and `ambiguous` mean equal weights.

    `name` is what faults and logs call this engine. `token_seconds` is the time between two
    steps, `first_token_seconds` the time before the first; with both 0 it runs as fast as its
    client reads. `sigterm` is what SIGTERM does to the process (native: as the engine does
    by default). `role` is half of a pair's, and `bootstrap_port` where it hands over its KV cache
    (SGLang's bootstrap server, vLLM's side channel). `faults` are in the language of
    `router.sim.faults`; what cannot be read raises a ValueError here. `unix_time` is what the
    clock shows at the start, so that tests are exact.
    """

    engine: EngineKind = "vllm"
    model: str = "tiny"
    name: str = "sim"
    host: str = "127.0.0.1"
    port: int = 0
    context_length: int = 4096
    token_seconds: float = 0.0
    first_token_seconds: float = 0.0
    tokens_per_chunk: int = 1
    eos_every: int = 0
    ambiguous: bool = False
    seed: int = 0
    faults: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_check_faults)
    sigterm: SigtermBehaviour = "native"
    role: Role = "mixed"
    bootstrap_port: int = 0
    keep_alive_seconds: float = 5.0
    unix_time: float = 1_800_000_000.0
