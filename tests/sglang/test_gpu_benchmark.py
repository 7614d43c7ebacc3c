"""benchmarks/gpu.py's server half against the real SGLang, in small."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.sglang.server import OPTIONS, ROOT, environment
from tests.sglang.setup_venv import models_path, python_path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400), pytest.mark.usefixtures("sglang_ready")]


def test_the_server_half_in_small(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    server_args = " ".join(f"--{k}" if v is True else f"--{k} {v}" for k, v in OPTIONS.items())
    (prose := tmp_path / "prose.md").write_text(
        "\n\n".join(
            f"Paragraph {i} of this text says that the {word} was seen near the harbour, and that nobody who saw it "
            f"there on that day wrote down more than the hour and the colour of the {word}."
            for i, word in enumerate(["ship", "whale", "lantern", "ferry", "gull", "captain", "crane"])
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(Path(folder), plugin=False, AGENTSPEC_SGLANG='{"trees": true}')
        command = [
            sys.executable, "-m", "benchmarks.gpu", "server", "--model", str(models_path() / "tiny"),
            "--python", str(python_path()), "--server-args", f"{server_args} --disable-overlap-schedule",
            "--algorithms", "plain", "AGENTSPEC", "--concurrency", "1", "3", "--tokens", "24",
            "--prose", str(prose), "--budget", "1800", "--start-limit", "600", "--out", str(out),
        ]  # fmt: skip
        # The rig is for the servers; this process needs the checkout only.
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=2200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    parts = {name: part["found"] for name, part in results["parts"].items()}
    assert results["complete"]
    for workers in (1, 3):
        plain, ours = (parts[algorithm][f"concurrency {workers}"] for algorithm in ("plain", "AGENTSPEC"))
        assert plain["failed"] == ours["failed"] == 0 and plain["calls"] == ours["calls"] >= 8
        assert plain["tokens"] == ours["tokens"] == 24 * ours["calls"]
        assert plain["tokens_per_step"] == 1.0 and "verify_steps" not in plain
        assert ours["equal_to_plain"] == f"{ours['calls']}/{ours['calls']}"
        assert ours["verify_steps"] * ours["tokens_per_step"] == pytest.approx(23 * ours["calls"], rel=1e-3)
        assert 0 < ours["accepted"] <= ours["proposed"]
        low, high = ours["conditional_acceptance"]
        assert 0 < low <= high <= 1
        for figures in (plain, ours):
            assert figures["ttft_ms"]["median"] > 0 and figures["itl_ms"]["p95"] >= figures["itl_ms"]["median"] > 0
    assert "tok/step" in done.stdout
