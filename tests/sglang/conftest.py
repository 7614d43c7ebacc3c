"""Servers for the groups of tests. A test that needs SGLang is skipped where its environment isn't set up,
except in CI, where that is an error."""

from __future__ import annotations

import os

import pytest

from tests.sglang.server import missing


@pytest.fixture(scope="session")
def sglang_ready() -> None:
    lack = missing()
    if lack is None:
        return
    if os.environ.get("CI"):
        pytest.fail(lack)
    pytest.skip(lack)
