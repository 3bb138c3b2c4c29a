"""The parts of the agent that need no stage: tombstones, settings, and the chart's coverage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import trio
from attrs import frozen

from router import cli
from router.agent import settings as agent_settings
from router.agent.settings import OPTIONS, AgentSettings, load_settings
from router.agent.tombstones import Tombstones
from router.config import OPTIONS as SERVE_OPTIONS
from router.options import SettingsError
from statemachines import HANDBACK, Edge
from statemachines.handback import LAST_FRAMES
from tests.agents import HOST, PORT, Stage, Story, play

#### Tombstones


def test_a_tombstone_is_taken_once() -> None:
    stones = Tombstones(3, 10.0)
    stones.put("a", 0.0)

    assert stones.has("a", 1.0)
    assert stones.take("a", 1.0)
    assert not stones.take("a", 1.0)


def test_the_oldest_tombstones_go_first() -> None:
    stones = Tombstones(3, 10.0)
    for moment, name in enumerate("abcad"):
        stones.put(name, moment)

    assert [name for name in "abcd" if stones.has(name, 5.0)] == ["a", "c", "d"]
    assert [name for name in "abcd" if stones.has(name, 12.5)] == ["a", "d"]
    assert len(stones) == 2
    stones.put("e", 100.0)
    assert len(stones) == 1


#### Settings

URLS = {"engine_url": ["http://h:8000"], "nats": ["nats://n"]}


def test_the_id_is_the_engine_s_place_unless_told() -> None:
    assert load_settings(URLS, {}).worker_id() == "h:8000"
    assert load_settings({**URLS, "id": ["w1"]}, {}).worker_id() == "w1"
    assert load_settings({"id": ["w1"]}, {}).worker_id() == "w1"


def test_variables_of_infera_count_after_ours() -> None:
    env = {"NATS_SERVER": "nats://theirs", "INFERA_NATS_REQ_IDLE_TIMEOUT": "7"}

    assert load_settings({}, env).nats == "nats://theirs"
    assert load_settings({}, env).nats_req_idle_timeout == 7.0
    assert load_settings({}, env | {"BATON_NATS": "nats://ours"}).nats == "nats://ours"
    assert load_settings({"nats": ["nats://typed"]}, env).nats == "nats://typed"


def test_every_name_of_infera_belongs_to_an_option() -> None:
    assert set(agent_settings.INFERA_NAMES) <= {each.key for each in OPTIONS}


def test_variables_of_the_router_are_passed_over_and_others_are_not() -> None:
    env = {"BATON_WORKER_URLS": "http://w", "BATON_PORT": "8000", "BATON_LOG_FORMAT": "json"}

    assert load_settings(URLS, env).log_format == "json"
    with pytest.raises(SettingsError, match="BATON_ENGIN_URL"):
        load_settings(URLS, {"BATON_ENGIN_URL": "http://w"})


def test_an_option_that_both_commands_know_takes_the_same_words() -> None:
    """They share environment names, so a value that one takes must not stop the other."""
    of_serve = {each.key: each for each in SERVE_OPTIONS}

    for each in OPTIONS:
        if each.key in of_serve:
            theirs = of_serve[each.key].kind
            assert each.kind.toml_types == theirs.toml_types, each.key
            assert each.kind.choices == theirs.choices, each.key
            assert each.kind.several == theirs.several, each.key


@pytest.mark.parametrize(
    "values, problem",
    [
        ({"nats_prefix": "a b"}, "must not contain spaces"),
        ({"nats_prefix": "a.*"}, "nats_prefix"),
        ({"nats_prefix": "a."}, "nats_prefix"),
        ({"engine_url": "nats:w1"}, "--engine-url"),
        ({"engine_url": "h:8000"}, "--engine-url"),
        ({"engine_url": "http://h:8000/v1"}, "leave out /v1"),
        ({"engine_url": "http://h:8000", "id": "a b"}, "id"),
        ({"engine_url": "http://h:8000", "role": "decoder"}, "role"),
        ({"health_check_endpoint": "health"}, "slash"),
    ],
)
def test_what_cannot_be_used_is_refused(values: Mapping[str, str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        AgentSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words, problem",
    [
        ([], "--nats is missing"),
        (["--nats", "nats://n"], "--engine-url is missing"),
        (["--nats", "nats://n", "--drain"], "--engine-url is missing"),
        (["--nats", "nats://n", "--engine-url", "h:1"], "--engine-url h:1"),
        (["--nats", "nats://n", "--engine-url", "http://h", "--port", "1"], "--port"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    words: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NATS_SERVER", raising=False)

    assert cli.main(["agent", *words]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert told.count("\n") == 1


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["agent", "--help"])

    told = capsys.readouterr().out
    assert [each.flag for each in OPTIONS if each.flag not in told] == []
    assert "--drain " in told


#### Every row of the chart is taken by the agent


@frozen
class Way:
    """How to see one row taken."""

    #: The state in which it happens.
    state: str
    #: What is done then.
    act: Callable[[Stage], object]
    payload: bytes | None = None
    migratable: bool = True
    settings: Mapping[str, object] = {}


def crash(stage: Stage) -> None:
    for proxied in list(stage.agent.intake.open.values()):
        proxied.crashed(ZeroDivisionError())


def cancel(stage: Stage) -> None:
    for asked in stage.asked.values():
        stage.cancel(asked)


def stop(stage: Stage) -> None:
    stage.agent.intake.stop()


def drain(stage: Stage) -> None:
    stage.agent.ask_to_stop()


def vanish(stage: Stage) -> None:
    for asked in stage.asked.values():
        asked.vanish()


def nothing(_: Stage) -> None:
    pass


AT_ONCE: Mapping[str, object] = {"drain_timeout_secs": 0.0}
SHORT: Mapping[str, object] = {"nats_req_max_duration": 2.0}
IMPATIENT: Mapping[str, object] = {"nats_req_idle_timeout": 2.0}
CUT = "now:server_dies"

OPEN = ("queued", "asking", "streaming")
WAYS: dict[tuple[str, str, str], Way] = {
    ("queued", "sent", "asking"): Way("asking", nothing),
    ("queued", "malformed", "failed"): Way("", nothing, payload=b"{"),
    ("queued", "broke", "failed"): Way("queued", nothing, settings={"connect_timeout_secs": 1.0}),
    ("asking", "answered", "streaming"): Way("streaming", nothing),
    ("asking", "broke", "failed"): Way("asking", lambda s: s.engine.add_faults(CUT)),
    ("asking", "stalled", "failed"): Way("asking", nothing, settings=IMPATIENT),
    ("streaming", "ended", "done"): Way("streaming", nothing),
    ("streaming", "broke", "failed"): Way("streaming", lambda s: s.engine.add_faults(CUT)),
    ("streaming", "stalled", "failed"): Way(
        "streaming", lambda s: s.engine.add_faults("now:freeze"), settings=IMPATIENT
    ),
    ("streaming", "clogged", "failed"): Way("streaming", lambda s: s.server.cut(s.broker)),
    **{
        (state, "window_over", target): Way(
            state, drain, migratable=target == "handed_back", settings=AT_ONCE
        )
        for state in OPEN
        for target in ("handed_back", "failed")
    },
    **{(state, "overdue", "failed"): Way(state, nothing, settings=SHORT) for state in OPEN},
    **{(state, "cancel_came", "cancelled"): Way(state, cancel) for state in OPEN},
    **{(state, "unheard", "failed"): Way(state, vanish) for state in OPEN},
    **{(state, "stop_came", "failed"): Way(state, stop) for state in OPEN},
    **{(state, "bug", "failed"): Way(state, crash) for state in OPEN},
}


def words(edge: Edge) -> tuple[str, str, str]:
    return str(edge.source.value), edge.fact, str(edge.target.value)


def test_there_is_a_way_to_every_row() -> None:
    assert set(WAYS) == {words(edge) for edge in HANDBACK.edges}


def test_every_end_has_its_last_frame() -> None:
    assert set(LAST_FRAMES) == set(HANDBACK.final)


@pytest.mark.parametrize("row, way", WAYS.items(), ids=["-".join(row) for row in WAYS])
def test_the_agent_takes_every_row_of_its_chart(row: tuple[str, str, str], way: Way) -> None:
    stage = play(
        _story_of(way),
        settings=way.settings,
        bugs=int("bug" in row),
        token_seconds=0.5,
        is_lossy="clogged" in row,
    )

    assert row in [words(edge) for edge in stage.edges]
    ends = [edge.target for edge in stage.edges if edge.target in HANDBACK.final]
    asked = next(iter(stage.asked.values()))
    kinds = {"done": "done", "notice": "notice", "error": "error", "none": "nothing"}
    # Where nobody listens the last frame goes out all the same.
    heard = ["nothing" if "unheard" in row else kinds[LAST_FRAMES[end]] for end in ends]  # type: ignore[index]
    assert [asked.ending] == heard


def _story_of(way: Way) -> Story:
    async def story(stage: Stage) -> None:
        if way.state == "queued":
            stage.agent.line.close()
            stage.network.silent.add((HOST, PORT))
        fault = "delay,head=1" if way.state == "asking" else ""
        if (way.settings in (IMPATIENT, SHORT) or way.act is vanish) and way.state == "asking":
            fault = "hang"
        asked = stage.ask(
            20 if way.act is vanish else 6,
            migratable=way.migratable,
            fault=fault,
            payload=way.payload,
        )
        await stage.reach(lambda: not way.state or way.state in _states(stage))
        way.act(stage)
        await trio.sleep(5.0)
        stage.network.silent.clear()
        if stage.broker.is_cut:
            stage.server.mend(stage.broker)
        await stage.settle()
        assert asked.inbox not in stage.agent.intake.open

    return story


def _states(stage: Stage) -> list[str]:
    return [proxied.state.value for proxied in stage.agent.intake.open.values()]
