"""Stories of prefill/decode pairs, told once more with both halves behind NATS."""

from __future__ import annotations

import pytest

from tests.stories.test_pd_moves import *  # noqa: F403  # the stories themselves


@pytest.fixture(autouse=True)
def _wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulate.WIRE", "nats")
