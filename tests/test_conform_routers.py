"""What `baton conform` finds out of a router that is installed."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from router.conform.routers import Candidate, installed

SHORT = f"#!{sys.executable}\n"
LONG = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
"""As pip writes it where the path is long or has blanks."""


@pytest.mark.slow
@pytest.mark.parametrize("first", [SHORT, LONG, "#!/bin/sh\n", "#!/bin/sh\n'''exec' \"\n"])
def test_its_version_is_asked_of_the_python_of_its_script(first: str, tmp_path: Path) -> None:
    if first == SHORT and " " in sys.executable:
        pytest.skip("no kernel finds this Python so")
    script = tmp_path / "a b" / "trio"
    script.parent.mkdir()
    script.write_text(first, encoding="utf-8")
    script.chmod(0o755)
    asked = installed(Candidate("trio", "{bin}trio"), f"{script.parent}/")

    assert asked.version == (version("trio") if first in (SHORT, LONG) else "")
