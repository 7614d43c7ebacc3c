"""How good the mixture is, on families that its prior never saw: acceptance, probabilities, what each part is worth.

    python benchmarks/quality.py acceptance [--limit N] [--rows NAME,...]
    python benchmarks/quality.py loss       [--limit N]
    python benchmarks/quality.py ablation   [--limit 12] [--parts WORD,...]

Teacher-forced over ../shared/traces (benchmarks/traces.py), cold start, one namespace a family. acceptance and loss
leave one family out: each is drafted with a prior made from the other six, by what make_prior.py does.

acceptance: tokens a step over all tokens, and the mean over the families (macro); nodes drafted a step; predicted
speedup, and with the proposer's own --step-us microseconds a step (propose and learn: benchmarks/mixture_cost.py)
counted where a plain step takes 6 ms and 60 ms; expected calibration error. Rows in ROWS.

loss: cross-entropy, in nats, of every edge that hangs on a node where the text went through: did this child come?
Beside the mixture stand (a) one constant and (b) a table by match length: the share of edges that came true where the
longest context, ending in this edge, that had occurred before (in the trajectory, or in another's output) was of 1, 2,
3, 4, 6, 8, 12, 16 tokens. Both are taken from the other six families too.

ablation: from plain weights, 16 nodes, without one part after the other. A part's worth is what is lost without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from agentspec.drafting import mixing
from agentspec.drafting.contexts import CONTEXTS, NAMES
from agentspec.drafting.mixing import FEATURES, LANGUAGE, PAIRS
from agentspec.drafting.mixture import MixtureProposer, Prior, plain_weights
from agentspec.memory.kernels import kernel
from agentspec.replay import CURVES, Report, replay
from benchmarks import make_prior, traces

ROWS: dict[str, dict[str, Any]] = {
    "shared16": {"fixed": True},
    "shared16-deferred": {"fixed": True, "deferred": True},
    "own16": {"fixed": True, "shared": False},
    "own16-deferred": {"fixed": True, "shared": False, "deferred": True},
    "shared-four": {"price": 0.108},
    "shared-gpu": {"curve": CURVES["gpu"], "max_draft": 32},
    "shared-cpu": {"curve": CURVES["cpu"], "max_draft": 31},
}
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_BITS = 27  # of a set of contexts: 16 MB


class Data:
    """Recordings by family, their encoder, and a prior for each family from the others (made when asked for)."""

    def __init__(self, limit: int | None, tokenizer: str, families: Iterable[str] = traces.FAMILIES) -> None:
        self.recordings = traces.load(families, limit)
        self.encoder = traces.encoder(tokenizer)
        self._priors: dict[str, Prior] | None = None

    def priors(self) -> dict[str, Prior]:
        if self._priors is None:
            print("learning the priors ...", file=sys.stderr, flush=True)
            taught = make_prior.lessons(self.recordings, self.encoder)
            self._priors = {family: make_prior.make(taught, family) for family in self.recordings}
        return self._priors

    def replay(self, make: Callable[[str], MixtureProposer], **settings: Any) -> Report:
        """All families, each with its own proposer, as one report."""
        whole: Report | None = None
        for family, recordings in self.recordings.items():
            one = replay(recordings, self.encoder, lambda family=family: make(family), oracle=False, **settings)  # type: ignore[misc]
            if whole is None:
                whole = one
            else:
                whole.rows += one.rows
                whole.reliability += one.reliability
                whole.seconds += one.seconds
        assert whole is not None
        return whole

    def proposer(self, family: str) -> MixtureProposer:
        return MixtureProposer(tokenizer=self.encoder.tokenizer, prior=self.priors()[family])


def acceptance(data: Data, rows: list[str], step_us: float) -> None:
    head = f"{'':18}{'drafted':>8}{'all':>7}{'macro':>7}{'speedup':>9}{'macro':>7}{'at 6 ms':>9}{'macro':>7}"
    print(head + f"{'at 60 ms':>10}{'macro':>7}{'ECE':>8}   by family")
    for name in rows:
        report = data.replay(data.proposer, **ROWS[name])
        totals, families = report.totals(), report.by(lambda row: row.family)
        line = f"{name:18}{totals['proposed_per_step']:8.1f}{totals['tokens_per_step']:7.3f}{report.macro:7.3f}"
        for width, milliseconds in ((9, 0.0), (9, 6.0), (10, 60.0)):
            c = step_us / (1000.0 * milliseconds) if milliseconds else 0.0
            each = [_speedup(group, c) for group in families.values()]
            line += f"{_speedup(totals, c):{width}.3f}{np.mean(each):7.3f}"
        by_family = " ".join(f"{f} {families[f]['tokens_per_step']:.2f}" for f in data.recordings)
        print(f"{line}{report.calibration_error:8.4f}   {by_family}", flush=True)


def _speedup(totals: dict[str, Any], c: float) -> float:
    """Predicted, each step costing c more: c of a plain step."""
    return float(totals["output_tokens"] / (totals["verify_steps"] * (totals["break_even"] + c)))


# ---- probabilities --------------------------------------------------------------------------------


@kernel("int64(int32[::1], int64, int64, int64)")
def _hash(tokens: Any, size: Any, length: Any, following: Any) -> Any:
    h = 0x2545F491 + length
    for i in range(size - length, size):
        h = ((h ^ (int(tokens[i]) + 1)) * 0x9E3779B1) & 0xFFFFFFFF
        h ^= h >> 15
    h = ((h ^ (following + 1)) * 0x85EBCA6B) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    return (h ^ (h >> 16)) >> (32 - _BITS)


@kernel("void(uint8[::1], int32[::1], int64, int64)")
def _hold(held: Any, tokens: Any, start: Any, end: Any) -> None:
    """Each of tokens[start:end] occurred after what stands before it."""
    for i in range(start, end):
        for length in LENGTHS:
            if length <= i:
                place = _hash(tokens, i, length, int(tokens[i]))
                held[place >> 3] |= 1 << (place & 7)


@kernel("int64(uint8[::1], uint8[::1], int32[::1], int64, int64)")
def _length(own: Any, shared: Any, tokens: Any, size: Any, token: Any) -> Any:
    """0, or one more than the place in LENGTHS of the longest context after which token occurred."""
    found = 0
    for k in range(len(LENGTHS)):
        if LENGTHS[k] <= size:
            place = _hash(tokens, size, LENGTHS[k], token)
            if ((own[place >> 3] | shared[place >> 3]) >> (place & 7)) & 1:
                found = k + 1
    return found


class Edges:
    """Of a family's edges on the true path: probability, match length's place, whether it came. replay()'s `watch`."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, bool]] = []
        self._own = np.zeros(1 << (_BITS - 3), np.uint8)
        self._shared = np.zeros(1 << (_BITS - 3), np.uint8)
        self._memory: Any = None
        self._context: Any = None
        self._known = 0
        self._outputs: list[tuple[np.ndarray, int]] = []

    def __call__(self, context: Any, draft: Any, following: np.ndarray) -> None:
        tokens = context.tokens
        if context is not self._context:
            self._begin(context)
        _hold(self._own, tokens, self._known, len(tokens))
        self._known = len(tokens)
        whole = np.concatenate([tokens, following[: len(draft)]])
        nodes, parents, paths = draft.tokens.tolist(), draft.parents.tolist(), draft.probabilities.tolist()
        node, depth = -1, 0
        while node is not None and depth < len(following):
            wanted, after = int(following[depth]), None
            for k, parent in enumerate(parents):
                if parent == node:
                    came = nodes[k] == wanted
                    length = _length(self._own, self._shared, whole, len(tokens) + depth, nodes[k])
                    self.rows.append((paths[k] / (paths[node] if node >= 0 else 1.0), length, came))
                    after = k if came else after
            node, depth = after, depth + 1

    def _begin(self, context: Any) -> None:
        if self._context is not None:
            done = self._context
            self._outputs.append((done.tokens.copy(), done.prompt_length))
            _hold(self._own, done.tokens, self._known, len(done.tokens))
        if context.memory is not self._memory:
            for text, start in self._outputs:
                _hold(self._shared, text, start, len(text))
            self._outputs = []
            self._own[:] = 0
        self._memory, self._context, self._known = context.memory, context, 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        p, length, came = zip(*self.rows, strict=True)
        return np.array(p), np.array(length), np.array(came)


def cross_entropy(p: np.ndarray, came: np.ndarray) -> float:
    p = np.clip(p, 1e-6, 1.0 - 1e-6)
    return float(-np.mean(np.where(came, np.log(p), np.log1p(-p))))


def loss(data: Data) -> None:
    edges = {}
    for family, recordings in data.recordings.items():
        watch = Edges()
        replay(
            recordings, data.encoder, lambda family=family: data.proposer(family), fixed=True, oracle=False,
            watch=watch,
        )  # type: ignore[misc]  # fmt: skip
        edges[family] = watch.arrays()
    print("cross-entropy of an edge, in nats:\n")
    print(f"{'':9}{'edges':>9}{'came true':>11}{'mixture':>9}{'constant':>10}{'by length':>11}{'ECE':>8}")
    lines = []
    bins = np.zeros((20, 3))
    for family, (p, length, came) in edges.items():
        others = [edges[other] for other in edges if other != family] or [edges[family]]
        rate = np.concatenate([c for _, _, c in others]).mean()
        seen = np.concatenate([b for _, b, _ in others])
        true = np.concatenate([c for _, _, c in others])
        table = np.array([(true[seen == b].sum() + 1.0) / ((seen == b).sum() + 2.0) for b in range(len(LENGTHS) + 1)])
        cells = np.zeros((20, 3))
        np.add.at(cells, np.minimum(19, (p * 20).astype(int)), np.stack([np.ones_like(p), p, came], axis=1))
        error = np.abs(cells[:, 1] - cells[:, 2]).sum() / len(p)
        bins += cells
        lines.append(
            (len(p), came.mean(), cross_entropy(p, came), cross_entropy(np.full(len(p), rate), came),
             cross_entropy(table[length], came), error)
        )  # fmt: skip
        print(f"{family:9}" + _line(lines[-1]))
    values = np.array(lines)
    weights = values[:, 0] / values[:, 0].sum()
    whole = [values[:, 0].sum(), *(weights @ values[:, 1:5]), np.abs(bins[:, 1] - bins[:, 2]).sum() / bins[:, 0].sum()]
    print(f"{'all':9}" + _line(whole))
    print(f"{'macro':9}" + _line([values[:, 0].mean(), *values[:, 1:].mean(axis=0)]))
    print("\nreliability, all families: said, came true, edges")
    for n, said, came_true in bins:
        if n:
            print(f"  {said / n:.3f}  {came_true / n:.3f}  {int(n):9}")


def _line(values: Any) -> str:
    n, rate, *losses, error = values
    return f"{int(n):9}{rate:11.3f}{losses[0]:9.4f}{losses[1]:10.4f}{losses[2]:11.4f}{error:8.4f}"


# ---- what each part is worth ----------------------------------------------------------------------

_COMMON = {
    "features: longest own order": (mixing.F_OWN, mixing.F_SHARED),
    "features: longest shared order": (mixing.F_SHARED, mixing.F_DISTANCE),
    "features: distance": (mixing.F_DISTANCE, mixing.F_HITS),
    "features: hits": (mixing.F_HITS, mixing.F_SEEN),
    "features: when last seen": (mixing.F_SEEN, mixing.F_STATES),
    "features: pair of states": (mixing.F_STATES, mixing.F_VOTES),
    "features: votes": (mixing.F_VOTES, mixing.F_LANGUAGE),
    "features: order in general text": (mixing.F_LANGUAGE, mixing.F_ESCAPE),
}


class _Ablated(MixtureProposer):
    """Without the weights that know tokens: they stay at zero."""

    def _namespace(self, context: Any) -> Any:
        found = super()._namespace(context)
        if found is not None:
            found.lexical[len(found.lexical) // 2 :] = 1e30
        return found


def frozen(start: int, end: int) -> Prior:
    """Plain weights but for features start..end-1, which are and stay zero."""
    weights = plain_weights()
    weights[start:end] = 0.0
    weights[FEATURES + start : FEATURES + end] = 1e30
    return Prior(weights, weights)


def parts() -> dict[str, Callable[[Any], MixtureProposer]]:
    """Name -> a proposer without that part."""
    every = (1 << PAIRS) - 1

    def without(*pairs: int) -> Callable[[Any], MixtureProposer]:
        mask = every
        for pair in pairs:
            mask &= ~(1 << pair)
        return lambda tokenizer: MixtureProposer(tokenizer=tokenizer, prior=Prior.plain(), pairs=mask)

    made = {"(nothing)": without()}
    for k, name in enumerate(NAMES):
        made[f"context {name}"] = without(k, CONTEXTS + k)
    for k in range(LANGUAGE):
        made[f"general text {NAMES[k]}"] = without(2 * CONTEXTS + k)
    made["general text"] = without(*range(2 * CONTEXTS, PAIRS))
    for name, (start, end) in _COMMON.items():
        made[name] = lambda tokenizer, start=start, end=end: MixtureProposer(  # type: ignore[misc]
            tokenizer=tokenizer, prior=frozen(start, end)
        )
    made["features: tokens"] = lambda tokenizer: _Ablated(tokenizer=tokenizer, prior=Prior.plain())
    return made


def ablation(data: Data, words: list[str]) -> None:
    head = "".join(f"{'all':>9}{'macro':>7}{'lost, all':>11}{'macro':>8}" for _ in (True, False))
    print(f"{'without':34}{head}\n{'':34}{'(with earlier trajectories)':35}{'(alone)':35}")
    base: dict[bool, tuple[float, float]] = {}
    for name, make in parts().items():
        if base and words and not any(word in name for word in words):
            continue
        print(f"{name:34}", end="", flush=True)
        for shared in (True, False):
            report = data.replay(
                lambda _, make=make: make(data.encoder.tokenizer), fixed=True, shared=shared
            )  # type: ignore[misc]  # fmt: skip
            now = report.totals()["tokens_per_step"], report.macro
            lost = [100 * (1 - new / old) for new, old in zip(now, base.setdefault(shared, now), strict=True)]
            print(f"{now[0]:9.3f}{now[1]:7.3f}{lost[0]:10.2f}%{lost[1]:7.2f}%", end="", flush=True)
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("acceptance", "loss", "ablation"))
    parser.add_argument("--limit", type=int, help="trajectories a family (ablation: 12; else all)")
    parser.add_argument("--rows", default=",".join(ROWS), help="acceptance: which (default: all)")
    parser.add_argument("--step-us", type=float, default=80.0, help="acceptance: the proposer's own cost of a step")
    parser.add_argument("--parts", default="", help="ablation: those whose names contain one of these")
    parser.add_argument("--families", default=",".join(traces.FAMILIES))
    parser.add_argument("--tokenizer", default="smollm2")
    args = parser.parse_args()
    limit = args.limit or (12 if args.what == "ablation" else None)
    data = Data(limit, args.tokenizer, args.families.split(","))
    if args.what == "acceptance":
        rows = args.rows.split(",")
        unknown = [name for name in rows if name not in ROWS]
        if unknown:
            parser.error(f"--rows: needed some of {', '.join(ROWS)}, got {unknown}")
        acceptance(data, rows, args.step_us)
    elif args.what == "loss":
        loss(data)
    else:
        ablation(data, [word for word in args.parts.split(",") if word])


if __name__ == "__main__":
    main()
