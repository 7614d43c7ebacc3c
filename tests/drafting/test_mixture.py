"""MixtureProposer: tables against a dictionary, drafts, learning, budgets, isolation, determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.drafting import CostCurve, DraftLimits, WidthPolicy, mixing, tables
from agentspec.drafting.contexts import CONTEXTS, STATE
from agentspec.drafting.mixing import LANGUAGE
from agentspec.drafting.mixture import MixtureProposer, Prior
from agentspec.drafting.policy import LOCAL
from agentspec.drafting.vocabulary import _PIECE, Vocabulary, language_text, token_class
from agentspec.errors import InvalidRequestError
from agentspec.memory import Source, Span, TrajectoryMemory
from agentspec.replay import CURVES
from agentspec.testing import accept, scripted_calls

pytestmark = pytest.mark.fast

SMALL = {"trajectory_bytes": 512 * 1024, "namespace_bytes": 1024 * 1024}
TREE = DraftLimits(16, 16, True, np.zeros(17))


def successors(table: Any, h: int) -> dict[int, int]:
    """{token: count} that the table holds for a context."""
    at = tables.lookup(table, h)
    if at < 0:
        return {}
    words = [int(table[at + 1 + i]) for i in range(3)]
    if (int(table[at]) >> 12) & 1:
        line = tables.wide_line(table, h)
        if line >= 0:
            words += [int(table[line + 1 + i]) for i in range(15)]
    return {word & 0xFFFFF: (word >> 20) & 63 for word in words if word}


class TestTables:
    def test_counts_are_exact_while_there_is_room(self) -> None:
        random = np.random.default_rng(1)
        table = tables.new_table(1 << 20)
        expected: dict[int, dict[int, int]] = {}
        for _ in range(3000):
            h = tables.mix(5, int(random.integers(0, 60)))
            token = int(random.integers(0, 17)) * 1000
            counts = expected.setdefault(h, {})
            if sum(counts.values()) >= 40:
                continue
            counts[token] = counts.get(token, 0) + 1
            tables.insert(table, h, token, 1, 0, False)
        assert {h: successors(table, h) for h in expected} == expected

    def test_the_latest_successor_comes_first(self) -> None:
        table = tables.new_table(1 << 20)
        for token in (7, 8, 9, 10, 11, 7):
            tables.insert(table, 12345, token, 0, 0, False)
        assert int(table[tables.lookup(table, 12345) + 1]) & 0xFFFFF == 7
        assert list(successors(table, 12345)) == [7, 11, 10, 9, 8]

    def test_halving_keeps_the_order_of_counts(self) -> None:
        table = tables.new_table(1 << 20)
        for i in range(1000):
            tables.insert(table, 99, 5 if i % 4 else 6, 0, 0, False)
        found = successors(table, 99)
        assert found[5] > 2 * found[6] > 0
        assert max(found.values()) <= tables.COUNT_BOUND

    def test_a_full_table_keeps_what_is_used(self) -> None:
        random = np.random.default_rng(2)
        table = tables.new_table(256 * 1024)
        hot = [tables.mix(3, i) for i in range(200)]
        for round_ in range(40):
            for h in hot:
                tables.insert(table, h, 42, 0, 0, False)
            for _ in range(1000):
                tables.insert(table, int(random.integers(0, 2**32)), 1, 0, 0, False)
            table[2] = (round_ + 1) * 1200
        assert sum(42 in successors(table, h) for h in hot) > 190

    def test_tags_count_trajectories(self) -> None:
        table = tables.new_table(1 << 20)
        for tag in (1, 1, 1, 2, 2, 3):
            tables.insert(table, 77, 5, 0, tag, True)
        assert (int(table[tables.lookup(table, 77) + 1]) >> 26) & 3 == 2  # a third trajectory: two more than one

    def test_size_is_the_budget(self) -> None:
        for nbytes in (256 * 1024, 4 << 20):
            assert 0.98 * nbytes < tables.new_table(nbytes).nbytes <= nbytes
        with pytest.raises(InvalidRequestError):
            tables.new_table(1000)


def drive(proposer: MixtureProposer, calls: Any, memory: TrajectoryMemory, limits: DraftLimits = TREE) -> list[int]:
    """Accepted tokens of every step."""
    took = []
    for prompt, spans, output in calls:
        context = memory.extend(prompt, spans)
        proposer.begin(context)
        at = 0
        while at < len(output):
            draft = proposer.propose(context, limits)
            draft.check(limits, 1 << 20)
            accepted = accept(draft, output[at : len(output) - 1])
            emitted = output[at : at + accepted + 1]
            memory.append(context, emitted)
            proposer.observe(context, emitted)
            proposer.learn(context)
            took.append(accepted)
            at += len(emitted)
        proposer.end(context)
        memory.close(context)
    return took


def test_repetition_is_drafted() -> None:
    took = drive(MixtureProposer(**SMALL), scripted_calls(6), TrajectoryMemory("t"))
    assert np.mean(took[-12:]) > 4.0


def test_the_first_n_nodes_are_nearly_the_best_tree_of_n() -> None:
    """Nearly: a narrow draft doesn't look into nodes whose children would hardly be chosen."""
    memory = TrajectoryMemory("t")
    proposer = MixtureProposer(**SMALL)
    drive(proposer, scripted_calls(4), memory)
    prompt, spans, output = scripted_calls(5)[4]
    context = memory.extend(prompt, spans)
    proposer.begin(context)
    gained = np.zeros(2)
    for token in output:
        wide = proposer.propose(context, DraftLimits(24, 24, True, np.zeros(25)))
        narrow = proposer.propose(context, DraftLimits(7, 7, True, np.zeros(8)))
        assert np.all(np.diff(wide.probabilities) <= 1e-6)
        assert narrow.tokens[0] == wide.tokens[0]
        gained += narrow.probabilities.sum(), wide.probabilities[:7].sum()
        siblings: dict[int, float] = {}
        for parent, p in zip(wide.parents.tolist(), wide.probabilities.tolist(), strict=True):
            siblings[parent] = siblings.get(parent, 0.0) + p
        for parent, mass in siblings.items():
            assert mass <= (1.0 if parent < 0 else float(wide.probabilities[parent])) + 1e-5
        memory.append(context, np.array([token], np.int32))
        proposer.observe(context, np.array([token], np.int32))
    assert gained[0] > 0.95 * gained[1] > 0.0


def test_a_tree_is_grown_where_its_odds_are() -> None:
    """Every node hangs on one that was looked into, and no node looked into was less probable by half than all
    those that were taken in its children's place."""
    memory = TrajectoryMemory("t")
    proposer = MixtureProposer(**SMALL)
    drive(proposer, scripted_calls(5), memory)
    prompt, spans, output = scripted_calls(6)[5]
    context = memory.extend(prompt, spans)
    proposer.begin(context)
    left_out = 0
    for at in range(0, len(output), 4):
        draft = proposer.propose(context, TREE)
        nodes = proposer._calls[id(context)].nodes
        looked = [k for k in range(len(draft)) if nodes[3, k] >= 0]
        assert set(draft.parents[draft.parents >= 0].tolist()) <= set(looked)
        for k in set(range(len(draft) - 1)) - set(looked):
            left_out += 1
            assert draft.probabilities[k + 1 :].min() >= mixing.LAZY * draft.probabilities[k] - 1e-6
        memory.append(context, output[at : at + 4])
        proposer.observe(context, output[at : at + 4])
        proposer.learn(context)
    assert left_out > 0


def test_a_prior_comes_from_a_file_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "prior.npz"
    Prior.load().save(path)
    assert np.array_equal(Prior.load(path).shared, Prior.load().shared)
    (tmp_path / "else").write_bytes(b"PK nothing")
    for wrong in (tmp_path / "nowhere.npz", tmp_path / "else"):
        with pytest.raises(InvalidRequestError, match="prior"):
            Prior.load(wrong)


def test_a_price_that_nothing_pays_drafts_nothing() -> None:
    memory = TrajectoryMemory("t")
    proposer = MixtureProposer(**SMALL)
    drive(proposer, scripted_calls(3), memory)
    prompt, spans, _ = scripted_calls(4)[3]
    context = memory.extend(prompt, spans)
    proposer.begin(context)
    for price, widest in ((np.arange(17) * 1.01, 0), (np.arange(17) * 0.5, 8), (np.zeros(17), 16)):
        assert len(proposer.propose(context, DraftLimits(16, 16, True, price))) <= widest


def test_a_price_with_a_jump_is_looked_past() -> None:
    """On a CPU the first draft token may cost more than the fifteen after it together: long or nothing."""
    memory = TrajectoryMemory("t")
    proposer = MixtureProposer(**SMALL)
    calls = scripted_calls(6)
    drive(proposer, calls[:5], memory)
    prompt, spans, output = calls[5]
    context = memory.extend(prompt, spans)
    proposer.begin(context)
    memory.append(context, output[:8])
    proposer.observe(context, output[:8])
    proposer.learn(context)
    jump = np.concatenate([[0.0], np.full(16, 2.0)])
    assert len(proposer.propose(context, DraftLimits(16, 16, True, jump))) > 2


def rule(paths: np.ndarray, price: np.ndarray, cost: np.ndarray, seen: int) -> int:
    """The width rule as policy.py says it, over the nodes that were looked at."""
    gains = np.concatenate([[0.0], np.cumsum(paths[:seen], dtype=np.float64)])
    price, cost = price[: len(gains)], cost[: len(gains)]
    due = (1.0 - LOCAL) * price + LOCAL * ((1.0 + gains) / cost).max() * (cost - cost[0])
    return int(np.argmax(gains - due))


@pytest.mark.parametrize("curve", [CURVES["gpu"], CURVES["cpu"], CostCurve.linear(0.2)], ids=["gpu", "cpu", "steep"])
def test_widths_follow_the_rule(curve: CostCurve) -> None:
    """At every step the width is the best, by the run's rate and by what this draft may gain itself."""
    memory = TrajectoryMemory("t")
    proposer, policy = MixtureProposer(**SMALL), WidthPolicy(curve, 16, proposer_cost=0.02)
    widths = set()
    for prompt, spans, output in scripted_calls(7):
        context = memory.extend(prompt, spans)
        proposer.begin(context)
        at = 0
        while at < len(output):
            limits = policy.limits(1000, tree=True)
            assert limits.cost is not None
            whole = proposer.propose(context, TREE)
            draft = proposer.propose(context, limits)
            rules = [rule(whole.probabilities, limits.price, limits.cost, k) for k in range(len(draft), 17)]
            assert len(draft) in rules  # the tree is grown until nothing can pay any more
            assert draft.tokens.tolist() == whole.tokens[: len(draft)].tolist()
            widths.add(len(draft))
            emitted = output[at : at + accept(draft, output[at:]) + 1]
            policy.record(len(emitted), len(draft))
            memory.append(context, emitted)
            proposer.observe(context, emitted)
            at += len(emitted)
        proposer.end(context)
        memory.close(context)
    assert len(widths) > 2


def test_namespaces_do_not_leak() -> None:
    """What one namespace's trajectories wrote is drafted there and nowhere else."""
    proposer = MixtureProposer(**SMALL)
    secret = np.arange(300, 340, dtype=np.int32)
    prompt = np.arange(100, 130, dtype=np.int32)
    shared = {name: TrajectoryMemory(name) for name in ("a", "b")}

    def run(namespace: str | None, name: str) -> list[int]:
        memory = TrajectoryMemory(name, namespace, shared=shared[namespace]) if namespace else TrajectoryMemory(name)
        return drive(proposer, [(prompt, [Span(0, 30, Source.PROMPT, "user")], secret)], memory)

    run("a", "1")
    assert sum(run("b", "2")) == 0
    assert sum(run(None, "3")) == 0
    assert sum(run(None, "4")) == 0
    assert sum(run("a", "5")) > 20


def test_attachments_stay_within_their_budget() -> None:
    shared = TrajectoryMemory("shared")
    memory = TrajectoryMemory("t", "n", shared=shared)
    proposer = MixtureProposer(**SMALL)
    drive(proposer, scripted_calls(6), memory)
    assert memory.attachments["mixture"].nbytes <= SMALL["trajectory_bytes"]
    assert shared.attachments["mixture"].nbytes <= SMALL["namespace_bytes"] + 8 * mixing.FEATURES + (1 << 18)


def test_an_output_that_is_cut_is_not_read_past_its_end() -> None:
    """An aborted call keeps what was delivered; what was learned late must not look beyond."""
    shared = TrajectoryMemory("s")
    memory = TrajectoryMemory("t", "n", shared=shared)
    proposer = MixtureProposer(**SMALL)
    for cut, (prompt, spans, output) in enumerate(scripted_calls(4)):
        context = memory.extend(prompt, spans)
        proposer.begin(context)
        for at in range(0, 12, 3):
            proposer.propose(context, TREE)
            memory.append(context, output[at : at + 3])
            proposer.observe(context, output[at : at + 3])
            if cut % 2:
                proposer.learn(context)
        memory.truncate(context, cut)
        proposer.end(context)
        memory.close(context)
    namespace = shared.attachments["mixture"]
    assert [len(tokens) for waiting in namespace.pending.values() for (tokens, _) in waiting] == [0, 1, 2, 3]


def test_learning_lowers_the_loss() -> None:
    """Weights learned on some trajectories serve the next, whose tokens are others."""

    def loss(proposer: MixtureProposer) -> float:
        before = proposer.score.copy()
        drive(proposer, scripted_calls(6, seed=99), TrajectoryMemory("t"))
        spent = proposer.score - before
        return float(spent[0] / spent[2])

    taught = MixtureProposer(prior=Prior.plain(), **SMALL)
    for seed in range(4):
        drive(taught, scripted_calls(6, seed=seed), TrajectoryMemory(str(seed)))
    assert loss(taught) < 0.9 * loss(MixtureProposer(prior=Prior.plain(), **SMALL))


def test_without_compilation_the_drafts_are_the_same() -> None:
    """NUMBA_DISABLE_JIT=1 runs the same source as plain Python."""
    script = (
        "import numpy as np\n"
        "from agentspec.drafting import DraftLimits\n"
        "from agentspec.drafting.mixture import MixtureProposer\n"
        "from agentspec.memory import TrajectoryMemory\n"
        "from agentspec.testing import scripted_calls\n"
        "p = MixtureProposer(trajectory_bytes=512 * 1024, namespace_bytes=1 << 20)\n"
        "m = TrajectoryMemory('t', 'n', shared=TrajectoryMemory('s'))\n"
        "out = []\n"
        "for prompt, spans, output in scripted_calls(2):\n"
        "    c = m.extend(prompt, spans); p.begin(c)\n"
        "    for at in range(0, len(output), 8):\n"
        "        d = p.propose(c, DraftLimits(6, 6, True, np.zeros(7)))\n"
        "        out += [*d.tokens.tolist(), *d.parents.tolist(), *np.round(d.probabilities, 4).tolist()]\n"
        "        m.append(c, output[at:at + 8]); p.observe(c, output[at:at + 8]); p.learn(c)\n"
        "    p.end(c); m.close(c)\n"
        "print(out)\n"
    )
    outputs = []
    for disabled in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled, "AGENTSPEC_QUIET": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


class _Tokenizer:
    """Words of a tiny vocabulary."""

    texts = ("<|im_end|>", "a", " a", "1", " 12", ".", " ", "\n", "}\n")
    all_special_ids = (0,)

    def get_vocab(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return ["".join(self.texts[i] for i in one) for one in ids]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.texts.index(c) for c in text if c in self.texts]


def test_vocabulary() -> None:
    assert [token_class(text) for text in _Tokenizer.texts[1:]] == [1, 0, 2, 2, 3, 4, 12, 11]
    vocabulary = Vocabulary.of(_Tokenizer())
    assert vocabulary.classes.tolist() == [5, 1, 0, 2, 2, 3, 4, 12, 11]
    assert vocabulary.language[2] > 10_000
    assert len(Vocabulary.of(None).classes) == 0


def test_general_text_is_held_by_frequency() -> None:
    """The successors of each single token, the most frequent first; counts say their share."""
    tokenizer = _Tokenizer()
    vocabulary = Vocabulary.of(tokenizer)
    pieces = [language_text()[a : a + _PIECE] for a in range(0, len(language_text()), _PIECE)]
    ids = np.array([i for piece in pieces for i in tokenizer.encode(piece)])
    hashed = np.zeros((3, LANGUAGE), np.int64)
    for token in (1, 3, 5, 7):
        ends = np.array([0, token, 0], np.int32)
        mixing.contexts(ends, vocabulary.language, vocabulary.classes, hashed)
        held = successors(vocabulary.language, int(hashed[2, 0]))
        followed = np.bincount(ids[1:][ids[:-1] == token], minlength=len(tokenizer.texts))
        assert next(iter(held)) == int(followed.argmax())
        counts = [held[t] for t in sorted(held, key=lambda t: -followed[t])]
        assert counts == sorted(counts, reverse=True)
        assert held.keys() == set(np.flatnonzero(followed).tolist())
        assert max(held.values()) <= tables.COUNT_BOUND


def test_states_follow_tokens() -> None:
    state = np.zeros(STATE, np.int64)
    classes = np.array([5, 1, 0, 2, 2, 3, 4, 12, 11], np.uint8)
    tokens = np.array([5, 7, 1, 3, 5], np.int32)
    mixing.settle(state, tokens, 0, len(tokens), classes)
    assert state[:5].tolist() == [1, 5, 7, 5, 0]
    assert CONTEXTS <= 16
