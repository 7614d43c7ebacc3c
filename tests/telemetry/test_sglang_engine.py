"""SGLangEngine's spans: the call is a client's span, and the server is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.engines.base import GenerationRequest
from agentspec.engines.sglang import SGLangEngine
from tests import tiny
from tests.engines.misbehaving import IDS, Misbehaving

pytestmark = pytest.mark.fast


def test_the_span_is_the_servers_parent(spans: Any) -> None:
    with Misbehaving() as server, SGLangEngine(server.url, tokenizer=tiny.tokenizer()) as engine:
        engine.generate(GenerationRequest(input_ids=[5, 6], max_tokens=len(IDS), ignore_eos=True)).result()
    span = spans.named("chat tiny")
    assert server.seen[0].headers["traceparent"].split("-")[1:3] == [
        f"{span.context.trace_id:032x}",
        f"{span.context.span_id:016x}",
    ]
    assert span.attributes["gen_ai.provider.name"] == "sglang"
    assert span.attributes["server.port"] == int(server.url.rsplit(":", 1)[1])
    assert span.attributes["gen_ai.usage.output_tokens"] == len(IDS)
