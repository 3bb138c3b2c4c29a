"""Errors and ids as clients see them (C26, C27, C34)."""

from __future__ import annotations

from router.conform.case import case
from router.conform.heard import Ask, Headers, Heard
from router.conform.stage import Actor, Failed, Stage


@case(
    "C26",
    done="A body that is no JSON; engines that cut every connection; engines that are gone.",
    expected='Each time an error status with {"error": {"message": ...}}.',
)
async def errors_have_one_shape(stage: Stage) -> None:
    found = {"not JSON": await stage.ask(Ask(body=b"{not json"))}
    if stage.asked(0) or stage.asked(1):
        # An engine has refused it, in whatever shape its errors have.
        found.clear()
    for engine in stage.engines:
        engine.requests.clear()
        engine.add_faults("cut")
    found["cut"] = await stage.ask(Ask(stream=False))
    stage.must_have_asked([0, 1], found["cut"])
    for engine in stage.engines:
        engine.clear_faults()
        engine.add_faults("now:server_dies")
    found["gone"] = await stage.ask(Ask(stream=False))

    for what, heard in found.items():
        if heard.status < 400:
            raise Failed(f"{what}: {heard.summary}")
        if heard.error is None:
            raise Failed(f"{what}: {heard.status} with {heard.body[:50]!r}")


@case(
    "C26",
    done="The engine refuses a request with 400 and a message, another with 429 and Retry-After.",
    expected="The client gets status, message and Retry-After as the engine said them.",
    actors=(Actor(),),
)
async def an_engine_s_error_passes(stage: Stage) -> None:
    engine = stage.engines[0]
    engine.add_faults("status,code=400,message=eleven%20cats")
    refused = await stage.ask(Ask(stream=False))
    engine.clear_faults()
    engine.add_faults("status,code=429,retry_after=7,message=eleven%20dogs")
    busy = await stage.ask(Ask(stream=False))

    for heard, status, message in ((refused, 400, b"eleven cats"), (busy, 429, b"eleven dogs")):
        if heard.status != status:
            raise Failed(f"the engine's {status} became {heard.summary}")
        if message not in heard.body:
            raise Failed(f"the message of the {status} is lost ({heard.body[:50]!r})")
    if busy.headers.get("retry-after") != "7":
        raise Failed("Retry-After of the 429 is lost")


def _named(name: str) -> Headers:
    return (("X-Request-Id", name),)


def _must_bear(heard: Heard, name: str, what: str) -> None:
    if heard.headers.get("x-request-id") != name:
        found = heard.headers.get("x-request-id")
        raise Failed(f"{what} has {f'the id {found}' if found else 'no id'}, not the client's")


@case(
    "C27",
    done="A client names its request in x-request-id; one is answered, one is refused.",
    expected="The engine gets the name, and both answers bear it.",
    actors=(Actor(),),
)
async def ids_are_kept(stage: Stage) -> None:
    served = await stage.ask(Ask(tokens=1, headers=_named("conform-1")))
    stage.engines[0].add_faults("status,code=400")
    refused = await stage.ask(Ask(tokens=1, headers=_named("conform-2")))

    _must_bear(served, "conform-1", "the answer")
    _must_bear(refused, "conform-2", "the error")
    seen = [one.headers.get("x-request-id") for one in stage.asked(0)]
    if seen != ["conform-1", "conform-2"]:
        raise Failed(f"the engine saw {', '.join(map(str, seen)) or 'neither of them'}")


@case(
    "C27",
    done="A named request is tried on an engine that cuts, and then on another one.",
    expected="Both get it under the same name.",
    actors=(Actor("cut"), Actor()),
)
async def ids_survive_retries(stage: Stage) -> None:
    for turn in range(4):
        await stage.ask(Ask(tokens=1, headers=_named(f"conform-{turn}")))

    first, second = (
        {one.headers.get("x-request-id") for one in stage.asked(place)} for place in (0, 1)
    )
    if not stage.asked(0) or not stage.asked(1):
        raise Failed("nothing was tried on a second engine")
    if not first - {None} or not first <= second:
        raise Failed(f"one saw {sorted(map(str, first))}, the other {sorted(map(str, second))}")


@case(
    "C34",
    done="Two engines serve a model each; clients ask for these and for a third.",
    expected="Known models go to the engine that has them; the third is a 404, and no engine is "
    "asked.",
    actors=(Actor(model="tiny"), Actor(model="other")),
    needs={"models": ""},
)
async def unknown_model(stage: Stage) -> None:
    unknown = await stage.ask(Ask(model="third", stream=False))
    if stage.asked(0) or stage.asked(1):
        raise Failed("a model that nobody has was asked of an engine")
    if unknown.status != 404:
        raise Failed(f"a model that nobody has: {unknown.summary}")
    for model in ("tiny", "other") * 3:
        heard = await stage.ask(Ask(model=model, tokens=1, stream=False))
        if not heard.is_whole:
            raise Failed(f"the model {model!r}: {heard.summary}")
