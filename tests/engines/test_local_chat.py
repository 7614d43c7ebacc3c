"""LocalEngine.chat: parsed deltas, streamed and not, sync and async; the next prompt finds all of it in the
cache.

TORTURE.md: "streamed text differs from unstreamed", "streamed tool-call id missing or changing", "a malformed
tool call ends the agent silently", "reasoning content lost", "bound tools don't reach the prompt". What the
random model says is prescribed by a grammar of one text, passed as a constraint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentspec.chat import Grammar, formats, joined
from agentspec.drafting import CostCurve
from agentspec.engines.local import LocalEngine
from agentspec.errors import UnknownOptionError
from agentspec.loop import Trajectory
from tests import tiny
from tests.chat import templates

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Read notes.txt, please."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read_file", "list_files")
]
CALLS = [("read_file", '{"path": "naïve \\"notes\\".txt"}'), ("list_files", "{}")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LocalEngine]]:
    """An engine for each format, on templates that know no tools; and "qwen3" with its template."""
    made: dict[str, LocalEngine] = {}
    for name in [*formats.names(), "qwen3"]:
        tokenizer = tiny.tokenizer()
        options: dict[str, Any] = {"tool_format": name}
        if name == "qwen3":
            tokenizer = tokenizer.__class__(
                tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>"
            )
            tokenizer.chat_template = templates.QWEN3
            options = {}
        made[name] = LocalEngine(
            tiny.model("llama", max_position_embeddings=8192),
            tokenizer=tokenizer,
            cost_curve=CostCurve.linear(0.01),
            **options,
        )
    yield made
    for engine in made.values():
        engine.close()


def saying(engine: LocalEngine, text: str, **options: Any) -> Any:
    """The call in which the model says this text, whatever it would say."""
    return engine.chat([USER], tools=TOOLS, constraint=engine.compile(Grammar.choice([text])), **options)


def anonymous(message: dict[str, Any]) -> Any:
    return json.loads(json.dumps(message), object_hook=lambda o: {k: v for k, v in o.items() if k != "id"})


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("draft", [True, False])
def test_streamed_and_whole_sync_and_async_say_the_same(
    engines: dict[str, LocalEngine], name: str, draft: bool
) -> None:
    engine, format = engines[name], formats.get(name)
    text = ("" if format.bare or name == "harmony" else "Let me look 😀.\n") + format.write_all(CALLS)
    whole = saying(engine, text, draft=draft).result()
    assert whole.text == text
    message = whole.message
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]] == [
        (n, json.loads(a)) for n, a in CALLS
    ]
    assert message["content"] == ("" if format.bare or name == "harmony" else "Let me look 😀.")

    chunks = list(saying(engine, text, draft=draft))
    assert "".join(chunk.text for chunk in chunks) == text
    assert anonymous(joined(chunk.delta for chunk in chunks)) == anonymous(message)
    ids: dict[int, set[str]] = {}
    for piece in (piece for chunk in chunks for piece in chunk.delta.tool_calls):
        ids.setdefault(piece.index, set()).add(piece.id)
    assert len(ids) == 2 and all(len(seen) == 1 and all(seen) for seen in ids.values())

    async def streamed() -> dict[str, Any]:
        return joined([chunk.delta async for chunk in saying(engine, text, draft=draft)])

    async def awaited() -> dict[str, Any]:
        return (await saying(engine, text, draft=draft).aresult()).message

    assert anonymous(asyncio.run(streamed())) == anonymous(asyncio.run(awaited())) == anonymous(message)


def test_thoughts_are_apart_in_the_deltas_and_the_message(engines: dict[str, LocalEngine]) -> None:
    text = "<think>\nThe file first.\n</think>\n\nOne moment.\n" + formats.get("hermes").write_all(CALLS)
    chunks = list(saying(engines["qwen3"], text, draft=False))
    message = joined(chunk.delta for chunk in chunks)
    assert message["reasoning_content"] == "The file first." and message["content"] == "One moment."
    assert len(message["tool_calls"]) == 2
    assert len([chunk for chunk in chunks if chunk.delta.reasoning]) > 3


def test_a_malformed_call_is_in_the_message_with_its_text(engines: dict[str, LocalEngine]) -> None:
    text = '<tool_call>\n{"name": "read_file", "arguments": {"path": notes}}\n</tool_call>'
    message = saying(engines["hermes"], text).result().message
    [invalid] = message["invalid_tool_calls"]
    assert invalid["name"] == "read_file" and '"path": notes' in invalid["args"] and invalid["error"]
    assert "tool_calls" not in message


@pytest.mark.parametrize("most", [1, 3, 12, 20, 30, 45])
def test_an_output_that_is_cut_anywhere_gives_the_same_message_streamed(
    engines: dict[str, LocalEngine], most: int
) -> None:
    text = "Hm.\n" + formats.get("hermes").write_all(CALLS)
    whole = saying(engines["hermes"], text, max_tokens=most).result()
    chunks = list(saying(engines["hermes"], text, max_tokens=most, draft=False))
    assert whole.finish_reason == chunks[-1].finish_reason == "length"
    assert anonymous(whole.message) == anonymous(joined(chunk.delta for chunk in chunks))


@pytest.mark.parametrize("name", ["qwen3", "hermes", "mistral"])
def test_the_next_prompt_finds_every_output_in_the_cache(engines: dict[str, LocalEngine], name: str) -> None:
    """Ten steps of calls and results; the arguments are written otherwise than the template writes them."""
    engine, trajectory = engines[name], Trajectory()
    messages: list[dict[str, Any]] = [USER]
    format = formats.get("hermes" if name == "qwen3" else name)
    length = 0
    for step in range(10):
        text = format.write_all([("read_file", f'{{"path": "notes{step % 2}.txt"}}')])
        constraint = engine.compile(Grammar.choice([text]))
        got = engine.chat(messages, tools=TOOLS, constraint=constraint, trajectory=trajectory).result()
        stats = got.stats
        assert stats.first_divergence is None
        if step:
            assert stats.reused_tokens == length - 1, "all but the last token, which was never run"
        length = stats.prompt_tokens + stats.output_tokens
        call = got.message["tool_calls"][0]
        messages = [
            *messages,
            got.message,
            {"role": "tool", "content": "Nothing.", "tool_call_id": call["id"]},
        ]
    assert stats.spliced_tokens > 0


# The mixture's tables know one kind of seed.
@pytest.mark.parametrize(("proposer", "source"), [("match", "schema"), ("mixture", "seed")])
def test_schema_seeds_are_drafts_of_free_calls(proposer: str, source: str) -> None:
    """The skeleton of a call that nobody has written yet is proposed from the tool's schema."""
    engine = LocalEngine(
        tiny.model("llama", max_position_embeddings=8192),
        tokenizer=tiny.tokenizer(),
        cost_curve=CostCurve.linear(0.01),
        tool_format="hermes",
        proposer=proposer,
    )
    text = formats.get("hermes").write("read_file", '{"path": "notes.txt"}')
    ids = [*tiny.tokenizer()(text, add_special_tokens=False).input_ids, tiny.tokenizer().eos_token_id]

    class Prescribed:
        """Leaves the model one choice, and says nothing of it to the drafter."""

        def __init__(self) -> None:
            self.place = 0

        def cut(self, draft: Any) -> Any:
            return draft

        def forced(self, most: int) -> list[int]:
            return []

        def mask(self, logits: Any) -> None:
            kept = logits[ids[self.place]]
            logits[:] = -float("inf")
            logits[ids[self.place]] = kept

        def advance(self, token: int) -> None:
            assert token == ids[self.place]
            self.place += 1

    got = engine.chat([USER], tools=TOOLS, constraint=Prescribed).result()
    assert got.message["tool_calls"][0]["function"]["name"] == "read_file"
    assert got.stats.accepted_by_source.get(source, 0) >= 8
    assert got.stats.verify_steps < len(ids) - 8
    engine.close()


def test_an_unknown_option_is_told_with_the_nearest(engines: dict[str, LocalEngine]) -> None:
    with pytest.raises(UnknownOptionError, match="max_tokens"):
        engines["hermes"].chat([USER], max_token=3)
