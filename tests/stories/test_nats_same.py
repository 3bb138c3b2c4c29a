"""Stories that were written for HTTP, told once more with every engine behind NATS.

What a client sees must not depend on the wire: the same breaks, the same moves, the same books.
"""

from __future__ import annotations

import pytest

from tests.stories.test_deaths import *  # noqa: F403  # the stories themselves
from tests.stories.test_endings import *  # noqa: F403
from tests.stories.test_moves import *  # noqa: F403
from tests.stories.test_moves_targets import *  # noqa: F403
from tests.stories.test_moves_time import *  # noqa: F403
from tests.stories.test_retries import *  # noqa: F403


@pytest.fixture(autouse=True)
def _wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulate.WIRE", "nats")
