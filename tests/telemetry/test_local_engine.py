"""LocalEngine's own spans: every attribute in the table, with its type, from a real model's real drafts."""

from __future__ import annotations

import numpy as np
import pytest

import agentspec
from agentspec.telemetry import names
from agentspec.telemetry.options import OPTIONS

pytestmark = pytest.mark.fast

KINDS = {"str": str, "int": int, "float": float, "bool": bool, "str[]": tuple}


@pytest.fixture
def engine(tiny_engine):
    return tiny_engine()


def test_a_call_is_described_in_the_tables_words(engine, spans):
    OPTIONS.step_events = True
    prompt = np.tile(np.arange(25, 45), 4)
    with agentspec.trajectory(name="local") as t:
        for _ in range(2):
            request = agentspec.GenerationRequest(input_ids=prompt.tolist(), max_tokens=48)
            stats = engine.generate(request).result().stats
    first, second = (s for s in spans.all() if s.name == f"chat {engine.model_name}")
    root = spans.named("invoke_agent local")
    for span in (first, second, root):
        assert span.parent is None or span.parent.span_id == root.context.span_id
        written = [*span.attributes.items(), *(a for e in span.events for a in e.attributes.items())]
        for key, value in written:
            entry = names.known(key)
            assert entry is not None, f"{key} is not in the table"
            assert type(value) is KINDS[entry.kind], f"{key}: {value!r} is no {entry.kind}"
    a = second.attributes
    assert a["gen_ai.conversation.id"] == t.id
    assert a["gen_ai.usage.input_tokens"] == len(prompt)
    assert a["gen_ai.usage.output_tokens"] == stats.output_tokens
    assert a["gen_ai.usage.cache_read.input_tokens"] == a["agentspec.reused_tokens"] == len(prompt) - 1
    assert a["gen_ai.response.time_to_first_chunk"] == pytest.approx(stats.ttft_ms / 1e3)
    assert stats.proposed > 0, "the second, equal call drafts from the first"
    assert a["agentspec.proposed"] == stats.proposed and a["agentspec.accepted"] == stats.accepted
    assert a["agentspec.tokens_per_step"] == pytest.approx(stats.output_tokens / stats.verify_steps)
    assert sum(v for k, v in a.items() if k.startswith("agentspec.accepted_from.")) == stats.accepted
    assert a["agentspec.v"].startswith("v(")
    assert len(second.events) == min(64, stats.verify_steps)
    assert sum(e.attributes["agentspec.step.accepted"] for e in second.events) <= stats.accepted
    assert root.attributes["agentspec.calls"] == 2


def test_the_memories_bytes_are_measured(engine, measured):
    with agentspec.trajectory():
        engine.generate(agentspec.GenerationRequest(input_ids=[1, 2, 3], max_tokens=4)).result()
    (point,) = measured()["agentspec.memory.bytes"].data.data_points
    assert point.value >= engine.store.nbytes > 0
