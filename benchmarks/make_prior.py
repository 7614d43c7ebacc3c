"""Make agentspec/drafting/prior.npz: the weights that the mixture starts from.

    python benchmarks/make_prior.py [--out PATH] [--leave-out FAMILY]

Data: the trajectories of ../shared/traces (its README names their sources and licences: tau-bench, SWE-agent,
InterCode, Reflexion, Aider, ToolBench). Each family is replayed from plain weights,
alone and with a namespace; of
the weights that it ends with the mean over the families is taken, each weighted by the square root of how much it
has learned there (AdaGrad's sum of squares). The sums are then capped, so that the weights still move. Lexical
weights, which know tokens, are not part of it: nothing of the traces' text is in the file.

With --leave-out the prior knows nothing of that family: what the benchmarks use to measure it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.drafting.mixing import FEATURES
from agentspec.drafting.mixture import MixtureProposer, Prior, plain_weights
from agentspec.memory import MemoryStore
from benchmarks import traces

# Of a weight's sum of squares: after it a step is at most 0.1 / sqrt(cap). A trajectory alone has less to learn from,
# and has to learn faster (0.5 against 5: 0.8 % more tokens a step there, 0.2 % fewer with a namespace).
CAP_ALONE, CAP_SHARED = 0.5, 5.0
PLAIN_WEIGHT = 1.0  # of the plain weight in the mean


def learned(recordings: list[Any], encoder: Any, shared: bool) -> np.ndarray:
    """float32[2 * FEATURES]: what one family teaches. No drafting: learning doesn't depend on it."""
    proposer = MixtureProposer(tokenizer=encoder.tokenizer, prior=Prior.plain())
    store = MemoryStore()
    for number, recording in enumerate(recordings):
        memory = store.open(f"{recording.id}#{number}", "family" if shared else None)
        for call in encoder.calls(recording):
            context = memory.extend(call.prompt, call.spans)
            proposer.begin(context)
            memory.append(context, call.output)
            proposer.observe(context, call.output)
            proposer.end(context)
            memory.close(context)
    weights: np.ndarray = proposer.weights_of_last_namespace() if shared else proposer.weights_alone
    return weights.copy()


def merged(families: Iterable[np.ndarray], cap: float) -> np.ndarray:
    """float32[2 * FEATURES]: the families' mean, sums of squares capped."""
    total = plain_weights()[:FEATURES].astype(np.float64) * PLAIN_WEIGHT
    weight = np.full(FEATURES, PLAIN_WEIGHT)
    squares = np.zeros(FEATURES)
    for one in families:
        confidence = np.sqrt(one[FEATURES:].astype(np.float64))
        total += confidence * one[:FEATURES]
        weight += confidence
        squares += one[FEATURES:]
    return np.concatenate([total / weight, np.minimum(squares, cap)]).astype(np.float32)


Lessons = dict[str, tuple[np.ndarray, np.ndarray]]  # what each family teaches, alone and with a namespace


def lessons(recordings: dict[str, list[Any]], encoder: Any) -> Lessons:
    return {f: (learned(known, encoder, False), learned(known, encoder, True)) for f, known in recordings.items()}


def make(taught: Lessons, leave_out: str | None = None) -> Prior:
    kept = [pair for family, pair in taught.items() if family != leave_out]
    return Prior(merged((alone for alone, _ in kept), CAP_ALONE), merged((shared for _, shared in kept), CAP_SHARED))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package = Path(__file__).resolve().parents[1] / "agentspec" / "drafting" / "prior.npz"
    parser.add_argument("--out", type=Path, default=package)
    parser.add_argument("--leave-out", choices=traces.FAMILIES)
    parser.add_argument("--tokenizer", default="smollm2")
    args = parser.parse_args()
    recordings = {family: known for family, known in traces.load().items() if family != args.leave_out}
    make(lessons(recordings, traces.encoder(args.tokenizer))).save(args.out)
    print(f"wrote {args.out}, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
