"""What the router answers itself: models, health, metrics, what is going on; and who may ask."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Got, Plan, simulate


def get(path: str, at: float = 1.0, key: str = "", method: str = "GET") -> Client:
    """A client that asks the router itself."""
    headers = (("authorization", f"Bearer {key}"),) if key else ()
    return Client(method=method, path=path, at=at, stream=False, headers=headers)


def ids(got: Got) -> list[str]:
    """The models of a list."""
    data = got.json["data"]
    assert isinstance(data, list)
    return [model["id"] for model in data]


def test_models_are_those_of_all_ready_workers() -> None:
    engines = (
        Engine(model="a"),
        Engine(model="b", kind="sglang"),
        Engine(model="a"),
        Engine(model="c", faults="path=/health:status,code=500"),
    )

    outcome = simulate(Plan(engines=engines, clients=(get("/v1/models"), get("/v1/models/b"))))

    assert ids(outcome.got[0]) == ["a", "b"]
    model = outcome.got[1].json
    assert (model["id"], model["object"], model["max_model_len"]) == ("b", "model", 4096)


def test_a_model_that_nobody_serves() -> None:
    outcome = simulate(Plan(clients=(get("/v1/models/none"),)))

    assert (outcome.one.status, outcome.one.code) == (404, "model_not_found")


def test_ready_as_long_as_somebody_can_serve() -> None:
    outcome = simulate(
        Plan(
            clients=(get("/readyz", 1.0), get("/readyz", 3.0), get("/readyz", 5.0)),
            happenings=((2.0, "drain 0"), (4.0, "drain 1")),
        )
    )

    assert [got.status for got in outcome.got] == [200, 200, 503]
    assert outcome.got[2].code == "no_workers"


def test_not_ready_before_the_first_worker_is() -> None:
    slow = Engine(faults="path=/health,request=1:delay,head=3")

    outcome = simulate(
        Plan(engines=(slow,), clients=(get("/readyz", 0.5), get("/readyz", 5.0)), begin=1.0)
    )

    assert [got.status for got in outcome.got] == [503, 200]


def test_health_says_only_that_the_process_is_up() -> None:
    outcome = simulate(Plan(engines=(), clients=(get("/health"),)))

    assert outcome.one.status == 200


def test_metrics_are_a_page_for_prometheus() -> None:
    outcome = simulate(Plan(clients=(Client(), get("/metrics", 5.0))))

    page = outcome.got[1]
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'baton_requests_total{outcome="finished",route="chat"} 1.0' in page.body
    assert b'baton_worker_state{state="ready",worker="w0"} 1.0' in page.body


def test_requests_are_shown_without_their_prompts() -> None:
    secret = Client(prompt="the secret prompt", headers=(("x-request-id", "mine"),), tokens=60)

    outcome = simulate(
        Plan(
            clients=(
                secret,
                get("/debug/requests", 3.0),
                get("/debug/requests/mine", 3.0),
                get("/debug/requests/mine", 20.0),
                get("/debug/requests/other", 20.0),
            )
        )
    )

    live, one, ended, unknown = outcome.got[1:]
    requests = live.json["requests"]
    assert isinstance(requests, list)
    (shown,) = requests
    assert (shown["id"], shown["state"], shown["worker"]) == ("mine", "streaming", "w0")
    assert (shown["attempts"], shown["seconds_in_state"]) == (1, pytest.approx(2, abs=0.1))
    assert one.json["state"] == "streaming"
    transitions = ended.json["transitions"]
    assert isinstance(transitions, list)
    assert [each["fact"] for each in transitions][-1] == "completed"
    assert unknown.status == 404
    assert not any(b"secret" in got.body for got in outcome.got[1:])


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nowhere", "GET", 404),
        ("/nowhere", "POST", 404),
        ("/v1/chat/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/health", "DELETE", 405),
        ("/v1/models", "HEAD", 200),
    ],
)
def test_paths_and_methods(path: str, method: str, status: int) -> None:
    outcome = simulate(Plan(clients=(get(path, method=method),)))

    assert outcome.one.status == status
    assert outcome.sent == [0, 0]


#### Keys

KEYS: dict[str, object] = {"api_key": ("sesame", "other"), "admin_key": "root"}


def asking(key: str, scheme: str = "Bearer") -> Client:
    """A client with this key."""
    return Client(tokens=1, headers=(("authorization", f"{scheme} {key}"),))


@pytest.mark.parametrize(
    ("client", "status"),
    [
        (asking("sesame"), 200),
        (asking("other"), 200),
        (asking("sesame", scheme="bearer"), 200),
        (asking("root"), 401),
        (asking("sesam"), 401),
        (asking("sesame", scheme="Basic"), 401),
        (Client(tokens=1), 401),
    ],
)
def test_a_key_is_asked_for(client: Client, status: int) -> None:
    outcome = simulate(Plan(clients=(client,), settings=KEYS))

    assert outcome.one.status == status
    assert sum(outcome.sent) == (status == 200)
    assert outcome.one.code == (None if status == 200 else "unauthorized")


@pytest.mark.parametrize("head", [b"content-length: 50000000\r\n\r\n", None])
def test_a_large_body_is_not_read_without_a_key(head: bytes | None) -> None:
    # Anybody could make the router hold --max-body-bytes a connection.
    chunks = b"transfer-encoding: chunked\r\n\r\n" + b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n" + (
        head or chunks + 2 * (b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
    )

    outcome = simulate(Plan(clients=(Client(raw=raw),), settings=KEYS))

    assert outcome.one.raw.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in outcome.one.raw


def test_a_large_body_is_read_with_a_key() -> None:
    client = Client(
        tokens=1, extra={"user": "x" * 100_000}, headers=(("authorization", "Bearer sesame"),)
    )

    outcome = simulate(Plan(clients=(client,), settings=KEYS))

    assert outcome.one.status == 200


@pytest.mark.parametrize(("keys", "is_passed_on"), [(KEYS, False), ({"admin_key": "root"}, True)])
def test_workers_see_a_key_only_where_the_router_asks_for_none(
    keys: dict[str, object], *, is_passed_on: bool
) -> None:
    cut = Engine(faults="times=1:cut,after_events=1")
    settings = keys | {"migration_limit": 1}

    client = Client(tokens=4, headers=(("authorization", "Bearer sesame"),))

    outcome = simulate(Plan(engines=(cut, Engine()), clients=(client,), settings=settings))

    keys_seen = {
        (place, request.headers.get("authorization"))
        for place in (0, 1)
        for request in outcome.work(place)
        if "x-request-id" in request.headers
    }
    key = "Bearer sesame" if is_passed_on else None
    assert keys_seen == {(0, key), (1, key)}  # a continuation is like every other request


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", "sesame", 200),
        ("/v1/models", "", 401),
        ("/v1/workers", "root", 200),
        ("/v1/workers", "sesame", 401),
        ("/debug/requests", "root", 200),
        ("/debug/requests", "sesame", 401),
        ("/debug/requests", "", 401),
        ("/health", "", 200),
        ("/readyz", "", 200),
        ("/metrics", "", 200),
    ],
)
def test_which_key_opens_what(path: str, key: str, status: int) -> None:
    outcome = simulate(Plan(clients=(get(path, key=key),), settings=KEYS))

    assert outcome.one.status == status
