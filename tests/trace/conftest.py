"""A recording made once: an agent with gaining, losing, failing and abandoned calls, in a process of its
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AN_AGENT = (sys.executable, "-m", "tests.telemetry.agent")


def agentspec(*words, **options):
    """Runs the command line."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "agentspec", *map(str, words)],
        cwd=ROOT,
        env=environment | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        **options,
    )


@pytest.fixture(scope="session")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    done = agentspec("trace", "record", "--steps", path, "--", sys.executable, "-m", "tests.telemetry.agent", "trace")
    assert done.returncode == 0, done.stderr
    assert "leaving" in done.stdout, "the command's own output goes where it would have gone"
    assert f"spans in {path}" in done.stderr
    return path
