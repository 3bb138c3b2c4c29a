"""Real prefill/decode pairs on a CPU: SGLang over Mooncake, vLLM over NIXL, both over TCP.

The halves hand over through loopback. A half that was killed is started again when it is asked for,
since a start costs half a minute and most tests leave both halves alive.
"""

import contextlib
import random
import socket
from collections.abc import Callable, Iterator, Mapping

from attrs import Factory, define, field, frozen

from tests.real.engines import Engine, sglang, vllm
from tests.real.processes import members
from tests.real.router import routed_pair

PREFILL_CONTEXT = 1024
"""Shorter than decode's, so that a prompt can be too long for prefill alone."""
_NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@frozen
class Half:
    """One half at work; `bootstrap` is where SGLang's decode finds its prefill."""

    engine: Engine
    bootstrap: int | None = None

    @property
    def lives(self) -> bool:
        return bool(members(self.engine.process.pid))


def quiet_port() -> int:
    """A free port that no outgoing connection takes while the engine is starting."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def sglang_half(role: str) -> Iterator[Half]:
    bootstrap = quiet_port()
    flags = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"]
    if role == "prefill":
        flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
        flags += ["--context-length", str(PREFILL_CONTEXT)]
    settings = {
        "SGLANG_HOST_IP": "127.0.0.1",
        "MC_FORCE_TCP": "1",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    }
    with sglang(*flags, settings=settings) as engine:
        yield Half(engine, bootstrap if role == "prefill" else None)


@contextlib.contextmanager
def vllm_half(role: str) -> Iterator[Half]:
    flags = ["--kv-transfer-config", _NIXL]
    if role == "prefill":
        flags += ["--max-model-len", str(PREFILL_CONTEXT)]
    settings = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(quiet_port()),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
    }
    with vllm(*flags, settings=settings) as engine:
        yield Half(engine)


HALVES: Mapping[str, Callable[[str], contextlib.AbstractContextManager[Half]]] = {
    "sglang": sglang_half,
    "vllm": vllm_half,
}


@define(eq=False)
class Pair:
    """Both halves of one kind, each alive whenever it is asked for."""

    kind: str
    _halves: dict[str, Half] = field(factory=dict)
    _running: dict[str, contextlib.ExitStack] = Factory(dict)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for role in list(self._running):
            self._running.pop(role).close()

    @property
    def prefill(self) -> Half:
        return self._living("prefill")

    @property
    def decode(self) -> Half:
        return self._living("decode")

    def _living(self, role: str) -> Half:
        half = self._halves.get(role)
        if half is None or not half.lives:
            if (ended := self._running.pop(role, None)) is not None:
                ended.close()
            stack = contextlib.ExitStack()
            half = self._halves[role] = stack.enter_context(HALVES[self.kind](role))
            self._running[role] = stack
        return half

    @contextlib.contextmanager
    def routed(self, flags: str = "") -> Iterator[int]:
        """A router in front of both; its port."""
        prefill, decode = self.prefill, self.decode
        flags = f"--engine {self.kind} {flags}"
        url = prefill.engine.url
        with routed_pair(url, prefill.bootstrap, decode.engine.url, flags) as port:
            yield port
