"""What every engine has to do, whoever runs the model: subclass EngineSuite and give it an `engine` fixture.

LocalEngine runs it in test_engine_suite.py, SGLangEngine in tests/sglang/test_engine.py. Prompts are ids below 400,
which every model here has.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agentspec.chat import Grammar, joined
from agentspec.engines.base import CallStats, Engine, GenerationRequest, GenerationResult
from agentspec.errors import ContextLengthError, InvalidRequestError, RequestAbortedError, UnknownOptionError
from agentspec.loop import Trajectory, trajectory

PROMPT = [5, 70, 130, 9, 200, 11, 5, 70, 130, 300, 45, 46]
USER = {"role": "user", "content": "Read notes.txt, please."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"enum": ["a.txt", "b.txt"]}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "list_files")
]


def request(prompt: Sequence[int] = PROMPT, **options: Any) -> GenerationRequest:
    return GenerationRequest(**{"input_ids": list(prompt), "max_tokens": 24, "ignore_eos": True, **options})


def run(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> GenerationResult:
    return engine.generate(request(prompt, **options)).result()


def consistent(stats: CallStats) -> None:
    """The counts that DESIGN.md's definitions tie together."""
    assert sum(tokens for _, tokens in stats.arrivals) == stats.output_tokens
    assert all(b[0] >= a[0] for a, b in zip(stats.arrivals, stats.arrivals[1:], strict=False))
    assert 1 <= stats.verify_steps <= stats.output_tokens
    assert stats.accepted <= stats.proposed
    assert stats.output_tokens <= stats.verify_steps + stats.accepted, "a step emits what was accepted, and one more"
    assert stats.ttft_ms is not None and 0 < stats.ttft_ms <= stats.duration_ms
    if stats.output_tokens > 1:
        assert stats.itl_mean_ms is not None
        assert sum(stats.itl_per_token()) == pytest.approx(stats.itl_mean_ms * (stats.output_tokens - 1), rel=0.3)


class EngineSuite:
    """Tests against self.engine's fixture `engine`; `grammars`: whether it enforces them."""

    def test_it_is_an_engine(self, engine: Any) -> None:
        assert isinstance(engine, Engine)
        assert engine.model_name and engine.context_length > 100 and engine.tokenizer is not None

    # ---- streams --------------------------------------------------------------------------------

    def test_streamed_whole_sync_and_async_say_the_same(self, engine: Any) -> None:
        whole = run(engine)
        chunks = list(engine.generate(request()))
        assert tuple(i for c in chunks for i in c.token_ids) == whole.token_ids
        assert "".join(c.text for c in chunks) == whole.text
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == whole.finish_reason == "length"

        async def streamed() -> tuple[int, ...]:
            return tuple([i async for c in engine.generate(request()) for i in c.token_ids])

        async def awaited() -> GenerationResult:
            return await engine.generate(request()).aresult()

        assert asyncio.run(streamed()) == asyncio.run(awaited()).token_ids == whole.token_ids
        assert whole.text == engine.tokenizer.decode(whole.token_ids, skip_special_tokens=True)

    @pytest.mark.parametrize("most", [1, 2, 7, 23])
    def test_the_length_is_exact_and_the_figures_fit(self, engine: Any, most: int) -> None:
        full = run(engine)
        got = run(engine, max_tokens=most)
        assert got.token_ids == full.token_ids[:most] and got.finish_reason == "length"
        assert got.stats.output_tokens == most and got.stats.prompt_tokens == len(PROMPT)
        consistent(got.stats)

    def test_without_drafts_it_is_the_same(self, engine: Any) -> None:
        with trajectory():
            first = run(engine)
            again = run(engine)
            plain = run(engine, draft=False)
        assert first.token_ids == again.token_ids == plain.token_ids
        consistent(again.stats)
        assert plain.stats.proposed == 0 and plain.stats.verify_steps == plain.stats.output_tokens

    def test_threads_get_their_own(self, engine: Any) -> None:
        prompts = [[i, *PROMPT] for i in range(20, 24)]
        wanted = [run(engine, p).token_ids for p in prompts]
        found: dict[int, Any] = {}

        def work(number: int) -> None:
            found[number] = [run(engine, prompts[number]).token_ids for _ in range(2)]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: [wanted[i]] * 2 for i in range(4)}

    # ---- ends -----------------------------------------------------------------------------------

    def test_a_stop_text_cuts_the_text_and_ends_the_ids(self, engine: Any) -> None:
        full = run(engine)
        text = full.text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        at = text.index(stop)
        got = run(engine, stop=stop)
        assert got.finish_reason == "stop" and got.stop_reason == stop and got.text == text[:at]
        assert got.token_ids == full.token_ids[: len(got.token_ids)]
        assert stop in engine.tokenizer.decode(got.token_ids)
        assert stop not in engine.tokenizer.decode(got.token_ids[:-1])
        assert got.stats.output_tokens == len(got.token_ids)
        chunks = list(engine.generate(request(stop=[stop, "never said"])))
        assert "".join(c.text for c in chunks) == got.text

    def test_stop_ids_and_sequences(self, engine: Any) -> None:
        full = run(engine).token_ids
        for stop in (full[6], list(full[6:8])):
            sequence = [stop] if isinstance(stop, int) else stop
            end = next(i + len(sequence) for i in range(len(full)) if list(full[i : i + len(sequence)]) == sequence)
            got = run(engine, stop_token_ids=[stop])
            assert got.token_ids == full[:end]
            assert got.finish_reason == "stop" and got.stop_reason == tuple(sequence)

    def test_min_tokens_holds_for_stop_texts(self, engine: Any) -> None:
        full = run(engine, max_tokens=20)
        got = run(engine, max_tokens=20, stop=full.text[:1] or " ", min_tokens=12)
        assert len(got.token_ids) >= 12

    # ---- options --------------------------------------------------------------------------------

    def test_log_probabilities(self, engine: Any) -> None:
        got = run(engine, max_tokens=8, top_logprobs=3)
        assert [p.token_id for p in got.logprobs] == list(got.token_ids)
        for entry in got.logprobs:
            assert entry.logprob <= 0 and len(entry.top) == 3
            assert entry.top[0][0] == entry.token_id and entry.top[0][1] == pytest.approx(entry.logprob, abs=1e-3)
            assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)
        plain = run(engine, max_tokens=8, logprobs=True)
        assert [p.logprob for p in plain.logprobs] == pytest.approx([p.logprob for p in got.logprobs], abs=1e-3)

    def test_several_choices(self, engine: Any) -> None:
        one = run(engine)
        many = engine.generate(request(n=3)).results()
        assert [r.token_ids for r in many] == [one.token_ids] * 3
        assert [r.index for r in many] == [0, 1, 2]
        assert many[0].stats.output_tokens == 3 * len(one.token_ids) and many[0].stats.choices == 3
        sampled = engine.generate(request(n=3, temperature=1.5)).results()
        assert len({r.token_ids for r in sampled}) > 1

    def test_biases_and_bad_words(self, engine: Any) -> None:
        free = run(engine, max_tokens=6)
        assert run(engine, max_tokens=4, logit_bias={77: 1000.0}).token_ids == (77,) * 4
        first = free.token_ids[0]
        assert run(engine, max_tokens=6, logit_bias={first: -float("inf")}).token_ids[0] != first
        assert run(engine, max_tokens=6, bad_words=[[first]]).token_ids[0] != first

    # ---- aborts ---------------------------------------------------------------------------------

    def test_an_abort_keeps_what_was_read_and_nothing_else(self, engine: Any) -> None:
        mine = Trajectory()
        full = run(engine, max_tokens=64)
        call = engine.generate(request(max_tokens=64, trajectory=mine))
        first = next(call)
        call.abort()
        with pytest.raises(RequestAbortedError) as told:
            list(call)
        assert told.value.partial.token_ids[: len(first.token_ids)] == first.token_ids
        assert told.value.partial.finish_reason == "abort" and call.stats is not None
        assert run(engine, max_tokens=64, trajectory=mine).token_ids == full.token_ids

    def test_dropped_and_cancelled_calls_hold_nothing_up(self, engine: Any) -> None:
        call = engine.generate(request(max_tokens=64))
        next(call)
        del call
        gc.collect()

        # Longer than any drafts can make it within the wait.
        most = min(engine.context_length - len(PROMPT), 4000)

        async def cancelled() -> None:
            task = asyncio.ensure_future(engine.generate(request(max_tokens=most)).aresult())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        assert run(engine).finish_reason == "length"

    # ---- chat -----------------------------------------------------------------------------------

    def test_history_is_exact(self, engine: Any) -> None:
        """What was generated is in the next prompt, id for id, however it would be tokenised again."""
        mine = Trajectory()
        messages: list[dict[str, Any]] = [USER]
        context: tuple[int, ...] = ()
        for turn in range(3):
            call = engine.chat(messages, trajectory=mine, max_tokens=12, ignore_eos=True)
            got = call.result()
            assert tuple(call.request.input_ids[: len(context)]) == context, f"turn {turn}"
            assert got.stats.first_divergence is None and got.stats.call_index == turn
            context = (*call.request.input_ids, *got.token_ids)
            messages = [*messages, got.message, {"role": "user", "content": "Go on."}]
        assert got.stats.spliced_tokens > 0
        assert mine.calls[-1] is got.stats and len(mine.calls) == 3

    @pytest.mark.parametrize(
        ("grammar", "pattern"),
        [
            (Grammar.regex("[ab]{3,5}"), "[ab]{3,5}"),
            (Grammar.choice(["yes, sir", "no"]), "yes, sir|no"),
            (
                Grammar.json_schema(
                    {
                        "type": "object",
                        "properties": {"a": {"enum": [1, 22]}},
                        "required": ["a"],
                        "additionalProperties": False,
                    }
                ),
                r'\{\s?"a"\s?:\s?(1|22)\s?\}',
            ),
            (Grammar.ebnf('root ::= "x" [0-9] "y"'), "x[0-9]y"),
        ],
        ids=["regex", "choice", "schema", "ebnf"],
    )
    def test_grammars_hold(self, engine: Any, grammar: Grammar, pattern: str) -> None:
        got = engine.chat([USER], grammar=grammar, max_tokens=60).result()
        assert got.finish_reason == "stop" and re.fullmatch(pattern, got.text), got.text

    @pytest.mark.parametrize("choice", ["required", "list_files", ["list_files", "read_file"]])
    def test_a_required_call_is_made(self, engine: Any, choice: Any) -> None:
        call = engine.chat([USER], tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=120)
        chunks = list(call)
        message = joined(c.delta for c in chunks)
        names = [c["function"]["name"] for c in message["tool_calls"]]
        assert names == choice if isinstance(choice, list) else names[0] in ("read_file", "list_files")
        for made in message["tool_calls"]:
            assert json.loads(made["function"]["arguments"])["path"] in ("a.txt", "b.txt")
        assert chunks[-1].finish_reason == "stop" and "invalid_tool_calls" not in message

    # ---- refusals -------------------------------------------------------------------------------

    def test_bad_requests_are_told_before_they_run(self, engine: Any) -> None:
        with pytest.raises(InvalidRequestError):
            run(engine, [])
        with pytest.raises(InvalidRequestError):
            run(engine, [10**7])
        with pytest.raises(ContextLengthError):
            run(engine, [5] * (engine.context_length + 1))
        with pytest.raises(ContextLengthError):
            run(engine, max_tokens=engine.context_length)
        with pytest.raises(UnknownOptionError, match="max_tokens"):
            engine.chat([USER], max_token=3)
        with pytest.raises(InvalidRequestError):
            engine.chat("no messages")
        assert run(engine).finish_reason == "length"
