"""A rolling restart: every agent of a fleet is told to stop, leaves in time and is replaced.

Streams that can move run without a pause meanwhile. Used by the tests with a small fleet and by
`python -m benchmarks.rolling_restart` with one of five agents and a hundred streams.
"""

import trio
from attrs import Factory, define, frozen

from tests.nats import fleet as f
from tests.real.calls import post

LEAVING_SECONDS = 1.5
"""Beyond the window of a drain: handing back, deregistering, ending."""


@frozen
class Left:
    """How an agent left, and its successor came."""

    worker: str
    exit_code: int
    seconds: float
    back_seconds: float


@define(eq=False)
class Rolled:
    """What came of it."""

    window_seconds: float
    left: list[Left] = Factory(list)
    answers: list[tuple[int, f.Told]] = Factory(list)
    """The number of the question, and what was told."""
    right: list[f.Told] = Factory(list)
    moved: float = 0
    failed_moves: float = 0

    @property
    def failed(self) -> list[f.Told]:
        return [answer for _, answer in self.answers if not answer.is_good]

    @property
    def wrong(self) -> list[f.Told]:
        """Streams that ended well and said something else, or nothing but a part of it."""
        return [
            answer
            for number, answer in self.answers
            if answer.is_good and answer.said != self.right[number].said
        ]

    def __str__(self) -> str:
        slowest = max(each.seconds for each in self.left)
        return (
            f"{len(self.left)} agents restarted under {len(self.right)} streams at a time: "
            f"{len(self.answers)} requests, {len(self.failed)} failed, {len(self.wrong)} wrong, "
            f"{self.moved:.0f} moved; the slowest agent left after {slowest:.2f} s "
            f"(window {self.window_seconds} s)"
        )


async def roll(
    fleet: f.Fleet,
    sims: list[f.Process],
    *,
    streams: int,
    tokens: int,
    token_seconds: float,
    window_seconds: float,
) -> Rolled:
    """One agent for each engine; all are restarted, one after the other."""
    rolled = Rolled(window_seconds)
    router = fleet.router("--migration-limit", str(len(sims) + 1))
    names = [f"w{number}" for number in range(len(sims))]
    window = ["--drain-timeout-secs", str(window_seconds)]
    agents = {
        name: fleet.agent(name, sim.port, *window) for name, sim in zip(names, sims, strict=True)
    }
    await f.all_ready(router, *names)
    questions = [f.chat(f"Story {number}", tokens=tokens) for number in range(streams)]
    rolled.right = [f.told(post(sims[0].port, f.CHAT, body)) for body in questions]
    over = trio.Event()

    async def client(number: int) -> None:
        # Not all in step: the first answer of each is of another length.
        await trio.sleep(tokens * token_seconds * number / streams)
        while not over.is_set():
            body = f.slowly(questions[number], token_seconds)
            rolled.answers.append((number, await f.stream(router.port, body)))

    async with trio.open_nursery() as nursery:
        for number in range(streams):
            nursery.start_soon(client, number)
        await trio.sleep(tokens * token_seconds)
        for (name, agent), sim in zip(agents.items(), sims, strict=True):
            began = trio.current_time()
            agent.terminate()
            code = await agent.ended(window_seconds + 30)
            seconds = trio.current_time() - began
            fleet.agent(name, sim.port, *window)
            await f.all_ready(router, name)
            rolled.left.append(Left(name, code, seconds, trio.current_time() - began))
        over.set()
    rolled.moved = f.metric(router, "baton_migrations_total")
    rolled.failed_moves = f.metric(router, "baton_migrations_failed_total")
    return rolled


def check(rolled: Rolled) -> None:
    """No request failed, no token is wrong, and everybody left in time."""
    print(rolled)
    assert rolled.failed == []
    assert rolled.wrong == []
    assert [each.exit_code for each in rolled.left] == [0] * len(rolled.left)
    latest = rolled.window_seconds + LEAVING_SECONDS
    assert [each for each in rolled.left if each.seconds > latest] == []
    assert rolled.moved > 0
