"""What names every worker of a large fleet is made piece by piece, and streams go on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import trio

from router import api
from router.worker import Worker
from router.workerspec import WorkerSpec
from tests.cluster import WARM_UP_SECONDS, Answer, Cluster, Routed, run

COUNT = 450


def fill(router: Routed) -> None:
    for number in range(COUNT):
        router.app.fleet.add(WorkerSpec.parse(f"http://10.0.0.1:{number + 1},engine=vllm"))


@pytest.mark.parametrize("has_nats", [True, False])
@pytest.mark.parametrize("count", [0, COUNT])
def test_the_list_is_whole(has_nats: bool, count: int) -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(has_nats=has_nats)
        await trio.sleep(WARM_UP_SECONDS)
        if count:
            fill(router)
        answer = await router.get("/v1/workers")

        assert answer.is_whole
        found = answer.json
        workers = msgspec.convert(found["workers"], list[dict[str, object]])
        assert [each["id"] for each in workers] == [each.id for each in router.app.fleet.all()]
        assert ("registry" in found) is has_nats

    run(story)


@pytest.mark.parametrize("path", ["/v1/workers", "/metrics"])
def test_others_have_their_turn_while_it_is_made(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    between: list[int] = []
    gathered = api._gathered

    async def watched(pieces: Iterator[bytes]) -> bytes:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_count, between)
            try:
                return await gathered(pieces)
            finally:
                nursery.cancel_scope.cancel(reason="made")

    monkeypatch.setattr(api, "_gathered", watched)

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router()
        await trio.sleep(WARM_UP_SECONDS)
        fill(router)
        answers: list[Answer] = []
        answers.append(await router.get(path))

        assert answers[0].is_whole
        assert len(between) >= 5

    run(story)


async def _count(between: list[int]) -> None:
    while True:
        between.append(1)
        await trio.lowlevel.checkpoint()


def test_a_client_that_leaves_before_its_list_is_there_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[Worker] = []
    show = api._show_worker

    def slow(worker: Worker) -> dict[str, object]:
        shown.append(worker)
        return show(worker)

    monkeypatch.setattr(api, "_show_worker", slow)

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router()
        await trio.sleep(WARM_UP_SECONDS)
        fill(router)
        stream = router.network.open_client()
        await stream.send_all(b"GET /v1/workers HTTP/1.1\r\nhost: baton\r\n\r\n")
        while not shown:
            await trio.lowlevel.checkpoint()
        assert len(shown) < COUNT
        stream.close()
        await trio.sleep(1.0)
        again = await router.get("/v1/workers")
        assert again.is_whole

    run(story)
