"""What SGLangEngine asks a server for, what it refuses to ask for, and what it says that the server doesn't give."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.chat import Grammar
from agentspec.engines.base import GenerationRequest
from agentspec.engines.sglang import SGLangEngine
from agentspec.errors import GrammarError, InvalidRequestError, ModelNotFoundError, ServerError
from agentspec.loop import Trajectory
from tests import tiny
from tests.engines.misbehaving import IDS, Answer, Behaviour, Misbehaving
from tests.engines.remote_client import PROMPT, client, request, works

__all__ = ["client"]  # a fixture

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]


def test_what_the_server_is_told(client: Any) -> None:
    engine, server = client(api_key="s3cret")
    trajectory = Trajectory("run-1", namespace="triage")
    trajectory.seed("a file", "tool")
    trajectory.seed([7, 8, 9])
    options = {"top_k": 4, "top_p": 0.5, "temperature": 0.7, "seed": 3, "stop": ["END"], "n": 2, "logit_bias": {4: 2.0}}
    engine.generate(request(trajectory=trajectory, **options)).results()
    first, second = (answer.body for answer in server.seen)
    assert first["input_ids"] == PROMPT and first["session_id"] == "run-1@triage"
    told = first["sampling_params"]
    assert told["custom_params"] == {
        "agentspec_namespace": "triage",
        "agentspec_seed_texts": ["a file"],
        "agentspec_seed_ids": [7, 8, 9],
    }
    assert (told["top_k"], told["top_p"], told["temperature"], told["stop"]) == (4, 0.5, 0.7, ["END"])
    assert told["max_new_tokens"] == len(IDS) and told["logit_bias"] == {"4": 2.0}
    assert {told["sampling_seed"], second["sampling_params"]["sampling_seed"]} > {3}
    assert first["rid"] != second["rid"]
    headers = server.seen[0].headers
    assert headers["authorization"] == "Bearer s3cret" and "s3cret" not in str(first)
    assert first["cache_salt"].startswith("key-") and headers["x-smg-routing-key"] == "run-1@triage"
    engine.generate(request(trajectory=trajectory)).result()
    assert "custom_params" in server.seen[2].body["sampling_params"]
    assert "agentspec_seed_texts" not in server.seen[2].body["sampling_params"]["custom_params"]


def test_seeds_of_a_call_that_failed_are_told_again(client: Any) -> None:
    engine, server = client(lambda a: a.whole(500, ""), retries=0)
    trajectory = Trajectory()
    trajectory.seed("a file")
    for _ in range(2):
        try:
            engine.generate(request(trajectory=trajectory)).result()
        except ServerError:
            continue
    texts = [a.body["sampling_params"]["custom_params"].get("agentspec_seed_texts") for a in server.seen]
    assert texts == [["a file"], ["a file"]]


def test_a_server_that_was_restarted_is_told_the_seeds_again(client: Any) -> None:
    def remembers(held: int) -> Behaviour:
        def behaviour(answer: Answer) -> None:
            answer.begin()
            answer.tokens(IDS, IDS, {"type": "length"}, agentspec=[{"drafts": True, "held_tokens": held}])
            answer.end()

        return behaviour

    engine, server = client(*[remembers(held) for held in (0, 4, 0, 0, 4)])
    trajectory = Trajectory()
    trajectory.seed("a file")
    for _ in range(5):
        engine.generate(request(trajectory=trajectory)).result()
    told = [a.body["sampling_params"].get("custom_params", {}).get("agentspec_seed_texts") for a in server.seen]
    assert told == [["a file"], None, None, ["a file"], None]


def test_what_a_server_without_the_plugin_does_not_give_is_said_once(client: Any, caplog: Any) -> None:
    engine, server = client(info={"speculative_algorithm": "NGRAM", "enable_deterministic_inference": False})
    trajectory = Trajectory("run-2")
    trajectory.seed("a file")
    for _ in range(3):
        engine.generate(request(trajectory=trajectory, temperature=0.5, seed=1)).result()
    assert all("custom_params" not in a.body["sampling_params"] for a in server.seen)
    assert [n.subject for n in engine.notices] == ["plugin", "seed"]
    said = [r.getMessage() for r in caplog.records if r.name == "agentspec.engines"]
    assert len(said) == 2 and "NGRAM" in said[0] and "--speculative-algorithm AGENTSPEC" in said[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"bad_words": [[4, 5]]}, "bad_words"),
        ({"seed": 2**64 - 1, "temperature": 1.0}, "seed"),
        ({"constraint": object}, "constraint"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"input_ids": []}, "at least one"),
        ({"max_tokens": 600}, "too long"),
    ],
)
def test_what_cannot_be_asked_for_is_told_before_it_is_asked(client: Any, options: Any, says: str) -> None:
    engine, server = client()
    with pytest.raises(InvalidRequestError, match=says):
        engine.generate(request(**options))
    assert server.seen == []


def test_a_server_without_grammars(client: Any) -> None:
    engine, server = client(info={"grammar_backend": "none"})
    with pytest.raises(GrammarError, match="--grammar-backend"):
        engine.generate(request(constraint=engine.compile(Grammar.regex("a+"))))
    assert server.seen == []


def test_what_the_backend_does_not_take_is_told(client: Any) -> None:
    schema = Grammar.json_schema({"type": "object"})
    engine, server = client(info={"grammar_backend": "llguidance"})
    with pytest.raises(GrammarError, match="several"):
        engine.generate(request(constraint=engine.compile(schema.after_thoughts("<t>", "</t>", True))))
    engine.generate(request(constraint=engine.compile(schema))).result()
    assert server.seen[0].body["sampling_params"]["ebnf"] == schema.lark
    engine, server = client(info={"grammar_backend": "outlines"})
    with pytest.raises(GrammarError, match="xgrammar"):
        engine.generate(request(constraint=engine.compile(Grammar.choice(["a"]))))
    engine.generate(request(constraint=engine.compile(schema))).result()
    assert server.seen[0].body["sampling_params"]["json_schema"] == '{"type": "object"}'


@pytest.mark.parametrize(
    "options",
    [{}, {"base_url": "ftp://x"}, {"base_url": "here"}, {"base_url": "http://a", "engine": object()}],
)
def test_bad_options(options: Any) -> None:
    with pytest.raises(InvalidRequestError):
        SGLangEngine(**options)


@pytest.mark.parametrize("options", [{"retries": -1}, {"read_timeout": 0}, {"api": "soap"}, {"first_timeout": "1"}])
def test_bad_settings(options: Any) -> None:
    with pytest.raises(InvalidRequestError):
        SGLangEngine("http://127.0.0.1:1", tokenizer=tiny.tokenizer(), **options)


def test_a_tokenizer_that_is_not_here_is_told(tmp_path: Any) -> None:
    elsewhere = {"model_path": str(tmp_path / "gone"), "served_model_name": "tiny"}
    with Misbehaving(model=elsewhere) as server, pytest.raises(ModelNotFoundError, match="tokenizer="):
        SGLangEngine(server.url)


def test_a_tokenizer_from_a_directory(tmp_path: Any) -> None:
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 600, "eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    served = {"model_path": str(tmp_path), "served_model_name": "tiny"}
    with Misbehaving(model=served) as server, SGLangEngine(server.url) as engine:
        assert engine.vocabulary == 600 and engine.eos_ids == {2, 7}
        works(engine)
        with pytest.raises(InvalidRequestError, match="input_ids"):
            engine.generate(request(input_ids=[600]))
        engine.generate(request(input_ids=[599])).result()


def test_an_end_that_only_the_server_knows(client: Any) -> None:
    """Its EOS ends the output, shows no text, and is an EOS from then on."""
    end = tiny.tokenizer().convert_tokens_to_ids("<|endoftext|>")

    def ends(answer: Answer) -> None:
        answer.begin()
        answer.tokens([*IDS[:2], end], [*IDS[:2], end], {"type": "stop", "matched": end})
        answer.end()

    engine, _ = client(ends)
    got = engine.generate(GenerationRequest(input_ids=PROMPT)).result()
    assert got.finish_reason == "stop" and list(got.token_ids) == [*IDS[:2], end]
    assert got.text == tiny.tokenizer().decode(IDS[:2]) and end in engine.eos_ids
