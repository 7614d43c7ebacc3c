"""Jaeger: the compose file, the searches that the README names, and, where one runs, Jaeger's own answers.

AGENTSPEC_JAEGER_URL=http://localhost:16686 pytest tests/test_jaeger.py      # OTLP on 4318 of the same host
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.parse
import urllib.request
import uuid
from pathlib import Path

import pytest
import yaml

from agentspec.telemetry import names
from tests.telemetry.test_otlp import run_agent

FOLDER = Path(__file__).resolve().parents[1] / "integrations" / "jaeger"
JAEGER = os.environ.get("AGENTSPEC_JAEGER_URL", "").rstrip("/")


@pytest.mark.fast
def test_the_compose_file_has_jaeger_v2_and_its_ports():
    jaeger = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["jaeger"]
    image, _, version = jaeger["image"].partition(":")
    assert image == "jaegertracing/jaeger" and version.startswith("2.")
    assert {port.rsplit(":", 1)[1] for port in jaeger["ports"]} == {"16686", "4317", "4318"}
    assert all(port.startswith("127.0.0.1:") for port in jaeger["ports"]), "nobody else reads the traces"


@pytest.mark.fast
def test_every_name_in_the_readme_is_in_the_table():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = set(re.findall(r"`((?:agentspec|gen_ai|error)\.[a-z_.*]+)", text))
    assert len(found) > 15
    for name in found - {"error.type", "agentspec.telemetry.configure"}:
        key = name.removesuffix("=")
        assert key in names.METRICS or names.known(key) or key in names.ATTRIBUTES, f"{name} is written nowhere"


@pytest.mark.fast
def test_the_links_search_for_what_is_written():
    links = re.findall(r"\(<(http://localhost:16686/search\?[^>]+)>\)", (FOLDER / "README.md").read_text("utf-8"))
    assert len(links) == 4
    for link in links:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
        (tags,) = (json.loads(t) for t in query["tags"])
        assert all(key == "error" or names.known(key) for key in tags)


@pytest.mark.nightly
@pytest.mark.skipif(not JAEGER, reason="AGENTSPEC_JAEGER_URL names no Jaeger")
def test_jaeger_finds_the_spans_by_its_query_api():
    host = urllib.parse.urlsplit(JAEGER).hostname
    service = f"agentspec-test-{uuid.uuid4().hex[:8]}"
    run_agent("scripted", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{host}:4318", OTEL_SERVICE_NAME=service)

    def find(**tags):
        query = urllib.parse.urlencode({"service": service, "lookback": "1h", "limit": 20, "tags": json.dumps(tags)})
        for _ in range(50):
            with urllib.request.urlopen(f"{JAEGER}/api/traces?{query}", timeout=10) as answer:
                traces = json.load(answer)["data"]
            if traces:
                return traces
            time.sleep(0.2)
        raise AssertionError(f"Jaeger finds nothing with {tags}")

    (trace, *_) = find(**{"agentspec.acceptance_band": "60-80%"})
    spans = {span["operationName"]: span for span in trace["spans"]}
    agent, call = spans["invoke_agent reader"], spans["chat scripted-1"]
    assert call["references"][0]["spanID"] == agent["spanID"]
    assert {t["key"] for t in call["tags"]} >= {"agentspec.tokens_per_step", "gen_ai.usage.output_tokens"}
    assert find(**{"agentspec.abandoned": "true"}) and find(error="true")
