"""`agentspec demo` on its real model, recorded: every call a span with its figures.

./dev nightly tests/trace/test_demo.py -s
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agentspec.telemetry import names as n
from agentspec.trace.reading import read
from tests.trace.conftest import ROOT, agentspec

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def test_the_demo_recorded(tmp_path):
    path = tmp_path / "demo.json"
    command = [sys.executable, "-m", "agentspec"]
    done = subprocess.run(
        [*command, "trace", "record", path, "--", *command, "demo", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["calls"]
    traced = [call for trace in read(path) for call in trace.calls]
    plain = [c for c in traced if c.attributes[n.NO_DRAFT]]
    drafted = [c for c in traced if not c.attributes[n.NO_DRAFT]]
    assert len(plain) >= len(report) and len(drafted) >= 5
    accepted = sum(call["agentspec"]["accepted"] for call in report)
    assert sum(c.attributes[n.ACCEPTED] for c in drafted) >= accepted > 0
    for call in traced:
        assert call.attributes[n.TOKENS_PER_STEP] >= 1 and call.ms > 0
    shown = agentspec("trace", "show", path)
    assert shown.returncode == 0 and shown.stdout.count("chat smollm2") == len(traced)
    print(shown.stdout)
