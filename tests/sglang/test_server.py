"""The real SGLang server with AGENTSPEC, on two layers of random weights: what it says, and what it
remembers.

Four servers one after another: plain and AGENTSPEC, without and with overlap scheduling.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sglang.mixed import SCHEMA, VOCABULARY, mixed_requests, outcome, prompt
from tests.sglang.server import Server, body, steps

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900), pytest.mark.usefixtures("sglang_ready")]

OPTIONS: dict[str, Any] = {"chunked_prefill_size": 512, "enable_custom_logit_processor": True}


@pytest.fixture(scope="module", params=["sync", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "overlap")


@pytest.fixture(scope="module")
def plain(sglang_ready: None, overlap: bool) -> list[dict[str, Any]]:
    """The 30 answers of a server started without speculation, one after another. The server is gone then."""
    with Server("tiny", None, plugin=False, overlap=overlap, **OPTIONS) as server:
        return [server.post("/generate", request) for request in mixed_requests()]


@pytest.fixture(scope="module")
def server(plain: list[Any], overlap: bool) -> Iterator[Server]:
    with Server("tiny", overlap=overlap, **OPTIONS) as running:
        yield running


def penalised(request: dict[str, Any]) -> bool:
    """SGLang counts a token for penalties one step late under overlap scheduling, with and without
    speculation (managers/schedule_batch.py::cumulate_penalty_output_tokens); how many it misses depends on
    what else runs."""
    return any(k.endswith("_penalty") or k == "min_new_tokens" for k in request["sampling_params"])


def told(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]["agentspec"][0]


def test_mode_is_as_asked(server: Server, overlap: bool) -> None:
    assert ("AGENTSPEC ready" in server.log) and (f"{'overlap' if overlap else 'synchronous'} scheduling" in server.log)
    assert server.get("/server_info")["speculative_algorithm"] == "AGENTSPEC"


def test_greedy_output_equals_plain_one_by_one(server: Server, plain: list[Any]) -> None:
    drafted = accepted = 0
    for number, (request, expected) in enumerate(zip(mixed_requests(), plain, strict=True)):
        answer = server.post("/generate", request)
        assert outcome(answer) == outcome(expected), f"request {number}"
        _, sent, correct = steps(answer)
        drafted, accepted = drafted + sent, accepted + correct
    assert drafted > 50 and accepted > 20, "the drafts were hardly tried"


def test_greedy_output_equals_plain_all_at_once(server: Server, plain: list[Any], overlap: bool) -> None:
    requests = mixed_requests()
    answers = server.together(requests)
    for number, (request, answer, expected) in enumerate(zip(requests, answers, plain, strict=True)):
        if overlap and penalised(request):
            continue
        assert outcome(answer) == outcome(expected), f"request {number}"


def test_log_probabilities_equal_plain_ones(server: Server, plain: list[Any]) -> None:
    compared = 0
    for request, expected in zip(mixed_requests(), plain, strict=True):
        if not request.get("return_logprob"):
            continue
        meta = server.post("/generate", request)["meta_info"]
        for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            ours, theirs = meta.get(key), expected["meta_info"].get(key)
            if not theirs:
                continue
            flat_ours = [v for v, *_ in _flat(ours)]
            flat_theirs = [v for v, *_ in _flat(theirs)]
            assert flat_ours == pytest.approx(flat_theirs, abs=2e-4)
            compared += len(flat_ours)
    assert compared > 100


def _flat(entries: Any) -> list[Any]:
    if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], list):
        return [e for group in entries for e in group]
    return list(entries)


def test_a_repeated_call_takes_fewer_steps(server: Server) -> None:
    first = server.generate(prompt(50, 120), 64, session_id="repeats")
    again = server.generate(prompt(50, 120), 64, session_id="repeats")
    assert again["output_ids"] == first["output_ids"]
    count, sent, accepted = steps(again)
    assert count < 32, f"{count} steps for 64 tokens that are known"
    assert accepted <= sent
    # cap_lens are the widths that were sent, so the histogram tells drafts from padding.
    widths = again["meta_info"]["spec_cap_lens_histogram"]
    assert sum(widths) == count and len(widths) - 1 <= 16


def test_chain_of_eight_calls_keeps_its_memory(server: Server) -> None:
    history, name, length = prompt(60, 150), "", 0
    for call in range(8):
        answer = server.generate(history, 24)
        if call:
            assert told(answer)["held_tokens"] == length, "the call didn't join its trajectory"
            assert told(answer)["trajectory"] == name
        assert told(answer)["joined_by"] == "prompt"
        name = told(answer)["trajectory"]
        length = len(history) + 24
        history = history + answer["output_ids"] + prompt(61 + call, 30)


def test_users_with_the_same_first_prompt_are_not_merged(server: Server) -> None:
    shared = prompt(70, 100)
    a = server.generate(shared, 16)
    b = server.generate(shared, 16)
    assert told(a)["trajectory"] != told(b)["trajectory"]
    next_a = server.generate(shared + a["output_ids"] + [77] * 5, 16)
    next_b = server.generate(shared + b["output_ids"] + [99] * 5, 16)
    assert told(next_a)["trajectory"] != told(next_b)["trajectory"]
    assert {told(next_a)["trajectory"], told(next_b)["trajectory"]} == {
        told(a)["trajectory"],
        told(b)["trajectory"],
    }


def test_a_shared_system_prompt_joins_nobody(server: Server) -> None:
    system = prompt(71, 80)
    a = server.generate(system + [300] * 4, 8)
    b = server.generate(system + [400] * 4, 8)
    assert told(a)["trajectory"] != told(b)["trajectory"] and told(b)["held_tokens"] == 0


def test_a_canary_of_one_tenant_is_never_drafted_for_another(server: Server) -> None:
    """Both tenants use one session id and one prompt. What A's memory could draft after it, B's must not."""
    canary = prompt(80, 60)
    opening = prompt(81, 40)
    # A's output follows its own canary exactly, so A drafts; the same ids for B are scoped apart.
    a1 = server.generate(opening + canary, 48, session_id="same", cache_salt="tenant-a")
    a2 = server.generate(opening + canary, 48, session_id="same", cache_salt="tenant-a")
    b1 = server.generate(opening + canary, 48, session_id="same", cache_salt="tenant-b")
    none = server.generate(opening + canary, 48, session_id="fresh", cache_salt="tenant-c")
    assert a1["output_ids"] == a2["output_ids"] == b1["output_ids"]
    assert steps(a2)[0] < steps(a1)[0], "A's own memory drafts"
    assert told(b1)["held_tokens"] == 0
    assert steps(b1) == steps(none), "B got what somebody without a history gets"
    both = [
        body(opening + canary, 48, session_id="same", cache_salt=f"tenant-{t}") for t in ("a", "d", "a", "d", "e", "e")
    ]
    for answer in server.together(both):
        assert answer["output_ids"] == a1["output_ids"]
    alone = server.generate(opening + canary, 48, session_id="other", cache_salt="tenant-d")
    assert told(alone)["held_tokens"] == 0


def test_seeds_travel_with_the_call_they_serve(server: Server) -> None:
    start = prompt(90, 80)
    known = server.generate(start, 48, session_id="unseeded")["output_ids"]
    seeds = {"agentspec_seed_ids": [*start[-6:], *known, -1, *prompt(91, 20)]}
    seeded = server.generate(start, 48, session_id="seeded", custom_params=seeds)
    assert seeded["output_ids"] == known
    assert steps(seeded)[0] <= 16
    wrong = server.generate(start, 8, custom_params={"agentspec_seed_ids": [VOCABULARY], "agentspec_colour": 1})
    assert wrong["output_ids"] == known[:8]
    problems = told(wrong)["problems"]
    assert any("agentspec_seed_ids" in p for p in problems) and any("agentspec_colour" in p for p in problems)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"repetition_penalty": 1.2}, "penalties"),
        ({"min_new_tokens": 4}, "min_new_tokens"),
        ({"temperature": 0.8}, "sampling_on_this_device"),
        ({"temperature": 0.8, "min_p": 0.1}, "sampling_on_this_device"),
        ({"custom_params": {"agentspec_draft": False}}, "switched_off"),
        ({}, None),
    ],
)
def test_a_response_says_whether_it_was_drafted(server: Server, sampling: dict[str, Any], reason: str | None) -> None:
    ids = prompt(100, 60)
    server.generate(ids, 24, session_id="reasons")
    answer = server.generate(ids, 24, session_id="reasons", **sampling)
    assert told(answer)["drafts"] is (reason is None) and told(answer).get("reason") == reason
    if reason is not None:
        assert steps(answer)[1] == 0


def test_sampling_on_a_cpu_samples(server: Server) -> None:
    """SGLang's verification is greedy on a CPU; a sampled request must get the sampler's tokens all the
    same, also beside requests that are drafted."""
    ids = prompt(101, 60)
    server.generate(ids, 48, session_id="beside")
    sampled = [body(ids, 24, temperature=1.5) for _ in range(5)]
    drafted = [body(ids, 48, session_id="beside") for _ in range(3)]
    answers = server.together(drafted + sampled)
    assert len({tuple(a["output_ids"]) for a in answers[3:]}) == 5
    assert len({tuple(a["output_ids"]) for a in answers[:3]}) == 1


def test_custom_logit_processor_is_applied(server: Server) -> None:
    from tests.sglang.processor import dumped

    ids = prompt(102, 60)
    request = body(ids, 12, custom_params={"token": 4321})
    answer = server.post("/generate", {**request, "custom_logit_processor": dumped()})
    assert answer["output_ids"] == [4321] * 12
    assert told(answer)["reason"] == "custom_logit_processor"


def test_grammar_output_validates_while_drafted(server: Server) -> None:
    ids = prompt(103, 40)
    answers = [server.generate(ids, 60, session_id="json", json_schema=SCHEMA, ignore_eos=False) for _ in range(3)]
    assert len({a["text"] for a in answers}) == 1
    if answers[0]["meta_info"]["finish_reason"]["type"] == "stop":
        json.loads(answers[0]["text"])
    assert steps(answers[2])[2] > 0


def test_output_ends_exactly_where_it_has_to(server: Server) -> None:
    ids = prompt(104, 60)
    full = server.generate(ids, 64, session_id="ends")["output_ids"]
    for limit in (1, 2, 5, 17, 33):
        answer = server.generate(ids, limit, session_id="ends")
        assert answer["output_ids"] == full[:limit]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": limit}
        assert answer["meta_info"]["completion_tokens"] == limit
    stop = full[40]
    first = full.index(stop)
    answer = server.generate(ids, 64, session_id="ends", stop_token_ids=[stop], ignore_eos=False)
    assert answer["output_ids"] == full[: first + 1]


def test_streamed_ids_equal_unstreamed_ones(server: Server) -> None:
    ids = prompt(105, 60)
    whole = server.generate(ids, 48, session_id="stream")
    chunks = list(server.stream(ids, 48, session_id="stream"))
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["agentspec"] == [told(chunks[0])]


def test_abort_midstream_leaves_the_server_and_the_memory_right(server: Server) -> None:
    ids = prompt(106, 60)
    whole = server.generate(ids, 200, session_id="whole")["output_ids"]
    stream = server.stream(ids, 200, session_id="aborted")
    got = [next(stream) for _ in range(4)]
    stream.close()
    assert got[-1]["output_ids"] == whole[: len(got[-1]["output_ids"])]
    deadline = time.monotonic() + 60
    while server.get("/server_info")["internal_states"][0].get("num_running_reqs", 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    answer = server.generate(ids, 200, session_id="aborted")
    assert answer["output_ids"] == whole
    assert told(answer)["held_tokens"] == len(ids)


def test_flush_forgets(server: Server) -> None:
    ids = prompt(107, 60)
    server.generate(ids, 48, session_id="flushed")
    assert told(server.generate(ids, 1, session_id="flushed"))["held_tokens"] == len(ids)
    server.post("/flush_cache")
    assert told(server.generate(ids, 1, session_id="flushed"))["held_tokens"] == 0


def test_nothing_went_wrong_in_the_log(server: Server) -> None:
    """Last of the module: the scheduler met no exception of ours, and no draft was refused."""
    ours = [line for line in server.log.splitlines() if "sglang_agentspec" in line or "IntegrityError" in line]
    assert not ours, ours[:20]
