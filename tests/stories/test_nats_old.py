"""Stories that were written for HTTP, with every engine behind an old worker's NATS.

It numbers no frames and tells the status at the end; what a client sees must be the same.
"""

from __future__ import annotations

import pytest

from tests.stories.test_deaths import *  # noqa: F403  # the stories themselves
from tests.stories.test_endings import *  # noqa: F403
from tests.stories.test_retries import *  # noqa: F403

#: What its protocol cannot tell.
_UNTOLD = {
    "sigterm_hang": "it does not say that its engine refuses connections",
    "test_the_last_workers_own_answer_is_told": "Retry-After does not travel",
    "test_retry_after_is_kept": "Retry-After does not travel",
}


@pytest.fixture(autouse=True)
def _wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reason in _UNTOLD.items():
        if name in request.node.name:
            pytest.skip(reason)
    monkeypatch.setattr("tests.simulate.WIRE", "old")
