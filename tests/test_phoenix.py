"""Arize Phoenix, a backend that people use, takes an agent's spans and shows agent, model and tool.

    ./dev nightly tests/test_phoenix.py

Phoenix is installed into an environment of its own (its dependencies are many), kept in the user's cache;
AGENTSPEC_PHOENIX_VENV names another one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import platformdirs
import pytest

from tests.telemetry.test_otlp import run_agent

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory):
    """The URL of a running Phoenix."""
    kept = platformdirs.user_cache_path("agentspec") / "phoenix-venv"
    venv = Path(os.environ.get("AGENTSPEC_PHOENIX_VENV") or kept)
    binary = venv / "bin" / "phoenix"
    if not binary.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-q", "arize-phoenix"], check=True)
    folder, port = tmp_path_factory.mktemp("phoenix"), free_port()
    environment = os.environ | {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    log = (folder / "log").open("w")
    server = subprocess.Popen([binary, "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert server.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def test_phoenix_shows_agents_models_and_tools(phoenix):
    _, err, _ = run_agent("scripted", OTEL_EXPORTER_OTLP_ENDPOINT=phoenix)
    assert err == "", "it takes no metrics, and that is no failure"
    spans = []
    for _ in range(100):
        with urllib.request.urlopen(f"{phoenix}/v1/projects/default/spans?limit=100", timeout=10) as answer:
            spans = json.load(answer)["data"]
        if len(spans) >= 14:
            break
        time.sleep(0.2)
    kinds = Counter((span["name"].split()[0], span["span_kind"]) for span in spans)
    assert kinds == {
        ("invoke_agent", "AGENT"): 4,
        ("chat", "LLM"): 6,
        ("execute_tool", "TOOL"): 4,
    }
    by_id = {span["context"]["span_id"]: span for span in spans}
    readers = [span for span in spans if span["name"] == "invoke_agent reader"]
    for span in spans:
        if span["parent_id"]:
            assert by_id[span["parent_id"]]["span_kind"] == "AGENT"
    call = next(s for s in spans if s["parent_id"] == readers[0]["context"]["span_id"] and s["span_kind"] == "LLM")
    assert call["attributes"]["llm.model_name"] == "scripted-1"
    assert call["attributes"]["llm.token_count.completion"] == 8
    assert "agentspec.acceptance_rate" in call["attributes"]
    assert "llm.token_count.completion" not in readers[0]["attributes"], "or tokens would be counted twice"
    assert sorted(s["status_code"] for s in spans).count("ERROR") == 2
