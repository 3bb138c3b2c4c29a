"""Settings: one table of options under three spellings; checks are loops over that table."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st

from router.agent.settings import env_for_serve
from router.agent.settings import load_settings as agent_settings
from router.config import (
    NOT_YET,
    OPTIONS,
    NatsUrl,
    NotYet,
    Settings,
    SettingsError,
    Workers,
    WorkerSpec,
    load_settings,
    refuse_unavailable,
)
from router.options import (
    MASK,
    Option,
    Seconds,
    Switch,
    Whole,
    bare,
    is_service_link,
    to_toml,
)
from router.reference import blocks

BY_KEY = {each.key: each for each in OPTIONS}


def sample(each: Option, tmp_path: Path) -> list[str]:
    """Words that are legal for this option and not its default."""
    kind = each.kind
    if kind.choices:
        return [next(choice for choice in kind.choices if choice != each.default)]
    if isinstance(kind, Whole):
        return [str(kind.maximum if each.default == kind.minimum else kind.minimum)]
    if isinstance(kind, Seconds):
        # Long enough for the longest of the cooldowns, whichever option this is.
        return ["61.5" if each.key == "breaker_max_cooldown_secs" else "1.5"]
    if isinstance(kind, Switch):
        return ["true"]
    if isinstance(kind, Workers):
        return ["http://a:1,engine=vllm,id=w1", "https://b:2/base,group=g"]
    if kind.metavar == "FILE":
        file = tmp_path / "a file"
        file.touch()
        return [str(file)]
    if kind.metavar == "PATH":
        return ["/elsewhere"]
    if isinstance(kind, NatsUrl):
        return ["nats://a:1,tls://b"]
    return ["one", "two"] if kind.several else ["one"]


def other(each: Option, words: list[str]) -> list[str]:
    """Different legal words for the same option."""
    if isinstance(each.kind, Switch):
        return ["false"]
    if isinstance(each.kind, Workers):
        return ["http://c:3"]
    if each.kind.metavar == "FILE":
        return [__file__]
    if isinstance(each.kind, NatsUrl):
        return ["nats://c"]
    return each.kind.words(each.default) or ["three"]


def as_toml(each: Option, words: list[str]) -> str:
    if each.kind.several:
        return f"{each.key} = {words}"
    bare = str not in each.kind.toml_types
    return f"{each.key} = {words[0]}" if bare else f"{each.key} = '{words[0]}'"


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "baton.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


every_option = pytest.mark.parametrize("each", OPTIONS, ids=lambda each: each.key)


@every_option
def test_flag_environment_and_file_mean_the_same(each: Option, tmp_path: Path) -> None:
    words = sample(each, tmp_path)
    value = each.kind.parse(words)

    by_flag = load_settings({each.key: words}, {})
    by_env = load_settings({}, {each.env: " ".join(words)})
    by_file = load_settings({}, {}, write(tmp_path, as_toml(each, words)))

    assert value != each.default
    assert by_flag == by_env == by_file
    assert getattr(by_flag, each.key) == value


@every_option
def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    each: Option, tmp_path: Path
) -> None:
    high = sample(each, tmp_path)
    low = other(each, high)
    high_value, low_value = each.kind.parse(high), each.kind.parse(low)
    file = write(tmp_path, as_toml(each, low))

    assert getattr(load_settings({}, {}, file), each.key) == low_value
    assert getattr(load_settings({}, {each.env: " ".join(high)}, file), each.key) == high_value
    by_both = load_settings({each.key: high}, {each.env: " ".join(low)}, file)
    assert getattr(by_both, each.key) == high_value


@every_option
def test_what_is_printed_reads_back_as_the_same_settings(each: Option, tmp_path: Path) -> None:
    if each.kind.secret:
        pytest.skip("a secret is printed as its mask")
    settings = load_settings({each.key: sample(each, tmp_path)}, {})

    printed = to_toml(settings, OPTIONS)

    assert load_settings({}, {}, write(tmp_path, printed)) == settings


@every_option
def test_a_value_in_the_file_has_the_type_of_its_option(each: Option, tmp_path: Path) -> None:
    wrong = "'text'" if str not in each.kind.toml_types else "[[1]]"

    with pytest.raises(SettingsError, match=rf"baton.toml: {each.key}: must be "):
        load_settings({}, {}, write(tmp_path, f"{each.key} = {wrong}"))


@every_option
def test_every_option_says_what_it_means_and_is_a_field(each: Option) -> None:
    assert each.help
    assert each.section
    assert each.key in {field.name for field in fields(Settings)}


def test_no_spelling_belongs_to_two_options() -> None:
    spellings = [flag for each in OPTIONS for flag in (each.flag, *each.aliases)]

    assert len(set(spellings)) == len(spellings)


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = load_settings({}, {})

    assert settings == Settings()
    assert (settings.host, settings.port, settings.policy) == ("127.0.0.1", 8000, "round_robin")
    assert settings.max_body_bytes == 64 * 1024 * 1024
    assert settings.worker_keep_alive_secs < 5, "engines close idle connections after 5 s"


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="wroker_urls: no option has this key"):
        load_settings({}, {}, write(tmp_path, "wroker_urls = []"))


def test_a_table_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="serve: no option has this key"):
        load_settings({}, {}, write(tmp_path, "[serve]\nport = 1"))


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2", "\x00"])
def test_a_file_that_is_not_toml_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not TOML"):
        load_settings({}, {}, write(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config .*nowhere: No such file"):
        load_settings({}, {}, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["BATON_PROT", "BATON_port", "BATON_", "BATON_PRINT_CONFIG"])
def test_an_unknown_variable_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}: no option has this environment name$"):
        load_settings({}, {name: "1"})


def test_variables_of_others_are_left_alone() -> None:
    env = {"PATH": "/bin", "BATON_CONFIG": "x", "BATON_ROUTER_URL": "http://h", "batonic": "1"}

    assert load_settings({}, env) == Settings()


def test_a_bare_environment_has_no_setting_and_no_proxy() -> None:
    env = {"BATON_PORT": "1", "BATON_CONFIG": "x", "http_proxy": "p", "ALL_PROXY": "p", "HOME": "h"}

    assert bare(env) == {"HOME": "h"}


def test_what_kubernetes_adds_beside_a_service_called_baton_is_left_alone() -> None:
    env = {
        "BATON_PORT": "tcp://10.0.0.1:8000",
        "BATON_SERVICE_HOST": "10.0.0.1",
        "BATON_SERVICE_PORT": "8000",
        "BATON_SERVICE_PORT_HTTP": "8000",
        "BATON_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "BATON_PORT_8000_TCP_PROTO": "tcp",
        "BATON_ROUTER_SERVICE_HOST": "10.0.0.2",
        "BATON_ROUTER_PORT": "tcp://10.0.0.2:80",
        "BATON_ROUTER_PORT_80_TCP_ADDR": "10.0.0.2",
    }

    assert load_settings({}, env) == Settings()


@every_option
def test_no_option_is_taken_for_a_service_of_kubernetes(each: Option) -> None:
    assert not is_service_link(each.env, {each.env: "1"})


def test_an_empty_variable_is_not_set_unless_it_is_a_secret() -> None:
    assert load_settings({}, {"BATON_PORT": "", "BATON_WORKER_URLS": " "}) == Settings()
    for name in ("BATON_API_KEY", "BATON_ADMIN_KEY"):
        with pytest.raises(SettingsError, match=f"{name}: is set but empty"):
            load_settings({}, {name: ""})


@pytest.mark.parametrize(
    ("key", "word", "message"),
    [
        ("port", "65536", "--port: must be at most 65535, not 65536"),
        ("port", "-1", "--port: must be at least 0, not -1"),
        ("port", "80a", "--port: must be a whole number, not '80a'"),
        ("port", "1.0", "--port: must be a whole number, not '1.0'"),
        ("connect_timeout_secs", "0", "--connect-timeout-secs: must be above 0 seconds, not 0"),
        ("connect_timeout_secs", "5s", "must be a number of seconds, not '5s'"),
        ("request_timeout_secs", "-1", "must be at least 0 seconds, not -1"),
        ("request_timeout_secs", "nan", "must be a finite number of seconds"),
        ("request_timeout_secs", "inf", "must be a finite number of seconds"),
        ("policy", "robin", "--policy: must be one of round_robin, random"),
        ("host", "", "--host: must not be empty"),
        ("host", "a b", "must not contain spaces or control characters"),
        ("nats_prefix", "a..b", "must be letters, digits, _ and -"),
        ("nats_prefix", "a.*", "must be letters, digits, _ and -"),
        ("nats_prefix", "a\x1b[31m", "must not contain spaces or control characters"),
        ("worker_insecure_skip_verify", "maybe", "must be true or false, not 'maybe'"),
        ("worker_ca_file", "/nowhere", "there is no file '/nowhere'"),
        ("health_check_endpoint", "health", "must begin with a slash"),
        ("breaker_max_cooldown_secs", "1", "is below --breaker-cooldown-secs"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, word: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({key: [word]}, {})

    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_built_in_code_are_checked_too() -> None:
    with pytest.raises(SettingsError, match="port must be at most 65535"):
        Settings(port=70000)


# --- secrets ---------------------------------------------------------------------------------


def test_secrets_are_masked_when_printed() -> None:
    settings = Settings(api_key=("s3cret", "other"), admin_key="adm1n", nats="nats://u:pw@h:4222")

    printed = to_toml(settings, OPTIONS)

    assert not any(word in printed for word in ("s3cret", "other", "adm1n", "pw"))
    assert tomllib.loads(printed)["api_key"] == [MASK, MASK]
    assert tomllib.loads(printed)["nats"] == f"nats://{MASK}@h:4222"


def test_a_mask_that_is_read_back_is_refused_unless_the_secret_comes_from_elsewhere(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, to_toml(Settings(api_key=("s3cret",)), OPTIONS))

    with pytest.raises(SettingsError, match="is the mask"):
        load_settings({}, {}, file)
    assert load_settings({}, {"BATON_API_KEY": "s3cret"}, file).api_key == ("s3cret",)


def test_a_refused_secret_is_not_shown() -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"api_key": ["s3cret\x00"]}, {})

    assert "s3cret" not in str(refused.value)


# --- workers ---------------------------------------------------------------------------------


def test_a_worker_is_a_url_with_options() -> None:
    spec = WorkerSpec.parse("http://Host.Example:8001/base/,engine=vllm,id=w1,group=g")

    assert spec == WorkerSpec(
        url="http://host.example:8001/base",
        scheme="http",
        host="host.example",
        port=8001,
        base_path="/base",
        id="w1",
        engine="vllm",
        group="g",
    )


NATS_URLS = (
    "nats://h:4222",
    "tls://h",
    "nats://u:pw@h",
    "nats://[::1]:4222",
    "nats://a,tls://b:1",
)
NO_NATS_URLS = (
    *("foo", "h:4222", "http://x:1", "ws://h", "nats://", "nats://:4222", "nats://h:x"),
    *("nats://h/x", "nats://a,", "nats://a,b", "nats://[::1", "nats://u:p,w@h", "nats://h:99999"),
)


@pytest.mark.parametrize("settings", [load_settings, agent_settings])
def test_a_broker_is_named_by_one_or_several_urls(settings: Callable[..., object]) -> None:
    for url in NATS_URLS:
        settings({"nats": [url]}, {})
    for url in NO_NATS_URLS:
        with pytest.raises(SettingsError, match="must be nats://HOST:PORT") as refused:
            settings({"nats": [url]}, {})
        assert "p,w" not in str(refused.value)


def test_serve_passes_over_what_only_the_agent_knows() -> None:
    both = {"BATON_ENGINE_URL": "http://h:1", "BATON_ID": "w1", "BATON_NATS": "nats://n"}

    assert env_for_serve(both) == {"BATON_NATS": "nats://n"}
    assert load_settings({}, env_for_serve(both)).nats == "nats://n"
    assert agent_settings({}, {**both, "BATON_PORT": "1"}).id == "w1"
    with pytest.raises(SettingsError, match="BATON_ENGIN_URL"):
        load_settings({}, env_for_serve({"BATON_ENGIN_URL": "x"}))


def test_a_worker_behind_nats_needs_a_nats() -> None:
    with pytest.raises(SettingsError, match="nats:w1 is behind NATS, but --nats does not say"):
        load_settings({"worker_urls": ["nats:w1"]}, {})

    named = load_settings({"worker_urls": ["nats:w1"], "nats": ["nats://h:4222"]}, {})
    assert [worker.id for worker in named.workers] == ["w1"]


def test_an_option_that_equals_the_id_is_written_all_the_same() -> None:
    spec = WorkerSpec.parse("http://h:1,group=h:1")

    assert WorkerSpec.parse(spec.to_text()) == spec


@pytest.mark.parametrize(
    ("url", "host", "port", "id"),
    [
        ("http://h", "h", 80, "h:80"),
        ("https://h", "h", 443, "h:443"),
        ("http://[::1]:9001", "::1", 9001, "[::1]:9001"),
        ("http://10.0.0.1:9001/", "10.0.0.1", 9001, "10.0.0.1:9001"),
        ("http://h:1/a/b", "h", 1, "h:1/a/b"),
    ],
)
def test_what_a_url_leaves_out_is_filled_in(url: str, host: str, port: int, id: str) -> None:
    spec = WorkerSpec.parse(url)

    assert (spec.host, spec.port, spec.id) == (host, port, id)
    assert WorkerSpec.parse(spec.to_text()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h:8000", "begins with http://, https:// or nats:"),
        ("ftp://h", "begins with http://, https:// or nats:"),
        ("http://", "the host is missing"),
        ("http://:80", "the host is missing"),
        ("http://h:99999", "not a URL"),
        ("http://h:0", "port 0"),
        ("http://h:x", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http://u:p@h", "credentials"),
        ("http://h?a=b", "no query"),
        ("http://h:1/v1", "leave out /v1"),
        ("http://h:1/v1/", "leave out /v1"),
        ("http://h\x07", "begins with http://, https:// or nats:"),
        ("http://h,weight=2", "unknown option 'weight=2'"),
        ("http://h,id", "unknown option 'id'"),
        ("http://h,role=decode", "unknown option 'role=decode'"),
        ("http://h,id=a,id=b", "given twice"),
        ("http://h,id=", "id must be"),
        ('http://h,id=a"b', "id must be"),
        ("http://h,engine=tgi", "engine must be one of"),
        ("http://h,bootstrap_port=x", "bootstrap_port must be a whole number"),
        ("http://h,bootstrap_port=70000", "bootstrap_port must be from 1 to 65535"),
        ("http://h,dp_size=x", "dp_size must be a whole number"),
        ("http://h,dp_size=0", "dp_size must be from 1 to 4096"),
        ("http://h,bootstrap_host=a b", "bootstrap_host must be a host"),
        ("nats:", "the id of a worker behind NATS must be"),
        ("nats://h:4222", "the id of a worker behind NATS must be"),
        ("nats:a b", "the id of a worker behind NATS must be"),
        ("nats:w1,id=w2", "the id of a worker behind NATS is in its URL"),
        ("nats:w1,engine=tgi", "engine must be one of"),
    ],
)
def test_a_worker_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        WorkerSpec.parse(text)

    assert message in str(refused.value)


def test_a_worker_behind_nats_is_named_by_its_id() -> None:
    spec = WorkerSpec.parse("nats:10.0.0.1:8000,engine=vllm,group=g,bootstrap_host=10.0.0.1")

    assert spec == WorkerSpec(
        url="nats:10.0.0.1:8000",
        scheme="nats",
        host="",
        port=0,
        base_path="",
        id="10.0.0.1:8000",
        engine="vllm",
        group="g",
        bootstrap_host="10.0.0.1",
    )
    assert WorkerSpec.parse(spec.to_text()) == spec
    assert WorkerSpec.of("nats:w1", id="w1") == WorkerSpec.of("nats:w1")


@given(st.sampled_from(["http://", "nats:", "nats:w,group="]), st.text(max_size=40))
def test_any_other_text_for_a_worker_is_refused_or_read_back_the_same(
    begin: str, text: str
) -> None:
    try:
        spec = WorkerSpec.parse(begin + text)
    except SettingsError:
        return

    assert WorkerSpec.parse(spec.to_text()) == spec


def test_a_number_after_a_prefill_url_is_its_bootstrap_port() -> None:
    typed = ["http://a:1", "8998", "http://b:2,id=b", "http://c:3", "8999"]

    settings = load_settings({"prefill": typed}, {})

    assert [spec.bootstrap_port for spec in settings.prefill] == [8998, None, 8999]
    assert {spec.role for spec in settings.prefill} == {"prefill"}
    assert load_settings({}, {"BATON_PREFILL": " ".join(typed)}) == settings


def test_the_port_of_a_prefill_may_be_said_to_be_none() -> None:
    """SMG's spelling: the engine's own setting counts."""
    settings = load_settings({"prefill": ["http://a:1", "none", "http://b:2", "8999"]}, {})

    assert [spec.bootstrap_port for spec in settings.prefill] == [None, 8999]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("prefill", ["8998"]),
        ("prefill", ["http://a:1", "8998", "8999"]),
        ("decode", ["http://a:1", "8998"]),
        ("worker_urls", ["http://a:1", "8998"]),
    ],
)
def test_a_number_elsewhere_is_no_bootstrap_port(key: str, words: list[str]) -> None:
    with pytest.raises(SettingsError, match="is not a URL"):
        load_settings({key: words}, {})


def test_two_workers_cannot_have_one_id() -> None:
    with pytest.raises(SettingsError, match="two workers have the id a:1"):
        load_settings({"worker_urls": ["http://a:1"], "decode": ["https://a:1"]}, {})


def test_workers_that_do_not_say_get_the_engine_of_the_flag() -> None:
    settings = load_settings(
        {"worker_urls": ["http://a:1", "http://b:2,engine=sglang"], "engine": ["vllm"]}, {}
    )

    assert [(spec.id, spec.engine) for spec in settings.workers] == [
        ("a:1", "vllm"),
        ("b:2", "sglang"),
    ]


# --- what is not there yet -------------------------------------------------------------------


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.key)
def test_a_setting_without_its_feature_is_refused_by_name(row: NotYet, tmp_path: Path) -> None:
    each = BY_KEY[row.key]
    words = [str(row.values[0])] if row.values else sample(each, tmp_path)
    settings = load_settings({row.key: words}, {})

    with pytest.raises(SettingsError) as refused:
        refuse_unavailable(settings)

    assert str(refused.value).startswith(each.flag)
    assert "not available yet in this version" in str(refused.value)


def test_the_defaults_ask_for_nothing_that_is_not_there() -> None:
    refuse_unavailable(Settings())


def test_the_table_in_the_docs_is_fresh() -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert f"<!-- generated: options -->\n{blocks()['options']}<!-- /generated -->" in page


def test_the_readme_names_what_is_not_there_yet() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for row in NOT_YET:
        assert f"`{BY_KEY[row.key].flag}`" in readme, row
        for value in row.values:
            assert f"`{value}`" in readme, row
