"""CallStats as span attributes: the figures of one call, of a trajectory, and the time that drafting saved.

Duck-typed on CallStats, so that engines of any kind can be measured. May import names only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentspec.telemetry import names as n

__all__ = ["band", "call_attributes", "is_below_break_even", "time_saved_ms", "totals"]

Attributes = dict[str, Any]

SAVED_HOW = "(tokens - 1) plain steps at (decode time / (verify steps - 1)) / mean v, less the decode time"


def call_attributes(stats: Any) -> Attributes:
    """What one call did, as attributes. Figures that it does not have (nothing proposed, one token) are
    left out.
    """
    found: Attributes = {
        n.RESPONSE_MODEL: stats.model,
        n.CALL_INDEX: stats.call_index,
        n.INPUT_TOKENS: stats.prompt_tokens,
        n.OUTPUT_TOKENS: stats.output_tokens,
        n.CACHE_READ: stats.reused_tokens,
        n.REUSED: stats.reused_tokens,
        n.DIVERGENCE: stats.first_divergence,
        n.SPLICED: stats.spliced_tokens,
        n.QUEUE_MS: stats.queue_ms,
        n.STEPS: stats.verify_steps,
        n.TOKENS_PER_STEP: stats.tokens_per_step,
        n.PROPOSED: stats.proposed,
        n.ACCEPTED: stats.accepted,
        n.ACCEPTANCE: stats.acceptance_rate,
        n.ACCEPTANCE_BAND: band(stats.acceptance_rate),
        n.CONDITIONAL: stats.conditional_acceptance,
        n.MEAN_WIDTH: stats.mean_width,
        n.DEPTH: stats.proposed_depth,
        n.NO_DRAFT: not stats.proposed,
        n.PROPOSER_MS: stats.proposer_ms,
        n.FORWARD_MS: stats.forward_ms,
        n.BREAK_EVEN: stats.break_even,
        n.NEAR_TIES: stats.near_ties,
        n.SEED_USED: getattr(stats, "seed", None),
        n.ITL_MEAN: stats.itl_mean_ms,
    }
    if stats.finish_reason:
        found[n.FINISH_REASONS] = [stats.finish_reason]
    if stats.verify_steps:
        found[n.BELOW] = is_below_break_even(stats)
    if stats.ttft_ms is not None:
        found[n.FIRST_CHUNK] = stats.ttft_ms / 1e3
        found[n.PREFILL_MS] = stats.ttft_ms
    if stats.proposer_ms + stats.forward_ms > 0:
        found[n.PROPOSER_SHARE] = stats.proposer_ms / (stats.proposer_ms + stats.forward_ms)
    for prefix, gaps in (
        (n.ITL_TOKEN, _per_token(stats.arrivals)),
        (n.ITL_ARRIVAL, _per_arrival(stats.arrivals)),
    ):
        for name, value in _summary(gaps).items():
            found[f"{prefix}.{name}_ms"] = value
    for source, count in stats.accepted_by_source.items():
        found[f"{n.BY_SOURCE}.{_slug(source)}"] = count
    for reason, count in stats.not_drafted.items():
        found[f"{n.NOT_DRAFTED}.{_slug(reason)}"] = count
    costs: Mapping[int, float] = getattr(stats, "cost_by_width", None) or {}
    if costs:
        found[n.V] = " ".join(f"v({width + 1})={cost:.2f}" for width, cost in sorted(costs.items()))
    saved = time_saved_ms(stats)
    if saved is not None:
        found[n.SAVED_MS], found[n.SAVED_HOW] = saved, SAVED_HOW
    return _known(found)


def totals(calls: Sequence[Any]) -> Attributes:
    """What the calls of a trajectory did together."""
    steps, tokens = sum(c.verify_steps for c in calls), sum(c.output_tokens for c in calls)
    proposed, accepted = sum(c.proposed for c in calls), sum(c.accepted for c in calls)
    told = all(c.mismatches is not None for c in calls)
    tried = accepted + sum(c.mismatches or 0 for c in calls) if told else 0
    saved = [s for s in map(time_saved_ms, calls) if s is not None]
    found: Attributes = {
        n.CALLS: len(calls),
        n.TOTAL_INPUT: sum(c.prompt_tokens for c in calls),
        n.TOTAL_OUTPUT: tokens,
        n.REUSED: sum(c.reused_tokens for c in calls),
        n.STEPS: steps,
        n.PROPOSED: proposed,
        n.ACCEPTED: accepted,
        n.ACCEPTANCE: accepted / proposed if proposed else None,
        n.CONDITIONAL: accepted / tried if tried else None,
    }
    if steps:
        break_even = sum(c.break_even * c.verify_steps for c in calls) / steps
        found |= {
            n.TOKENS_PER_STEP: tokens / steps,
            n.BREAK_EVEN: break_even,
            n.BELOW: tokens / steps < break_even,
        }
    if saved:
        found[n.SAVED_MS], found[n.SAVED_HOW] = sum(saved), SAVED_HOW
    return _known(found)


def time_saved_ms(stats: Any) -> float | None:
    """Estimated ms that drafting saved against plain decoding; negative: it lost. None: fewer than two steps.

    A plain step takes what a verify step took, divided by its mean v; plain decoding takes one for each
    token. The first step is left out on both sides, since it holds the prefill.
    """
    steps = len(stats.arrivals)
    if steps < 2 or stats.output_tokens < 2 or stats.break_even <= 0:
        return None
    if _was_off(stats):
        return 0.0
    decode = stats.arrivals[-1][0] - stats.arrivals[0][0]
    plain_step = decode / (steps - 1) / stats.break_even
    return float((stats.output_tokens - 1) * plain_step - decode)


def is_below_break_even(stats: Any) -> bool:
    """Whether drafting lost time in this call. Where it was off it lost none."""
    per_step = stats.tokens_per_step
    return per_step is not None and not _was_off(stats) and bool(per_step < stats.break_even - 1e-9)


def _was_off(stats: Any) -> bool:
    return bool(stats.not_drafted.get("off", 0) >= stats.verify_steps)


def band(rate: float | None) -> str:
    """acceptance_rate in fifths: Jaeger finds spans by equal values only, so a range needs a name."""
    if rate is None:
        return "none"
    low = min(int(rate * 5), 4) * 20
    return f"{low}-{low + 20}%"


def _per_arrival(arrivals: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """(gap, 1) of each arrival after the first."""
    return [(b[0] - a[0], 1) for a, b in itertools.pairwise(arrivals)]


def _per_token(arrivals: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """(g / m, m) of each arrival after the first: m tokens share their gap."""
    return [((b[0] - a[0]) / b[1], b[1]) for a, b in itertools.pairwise(arrivals) if b[1]]


def _summary(weighted: Iterable[tuple[float, int]]) -> dict[str, float]:
    """mean, p50, p95 and max of values that count several times, without writing them out that often."""
    ordered = sorted(weighted)
    count = sum(weight for _, weight in ordered)
    if not count:
        return {}
    return {
        "mean": sum(value * weight for value, weight in ordered) / count,
        "p50": (_at(ordered, (count - 1) // 2) + _at(ordered, count // 2)) / 2,
        "p95": _at(ordered, min(count - 1, int(0.95 * count))),
        "max": ordered[-1][0],
    }


def _at(ordered: Sequence[tuple[float, int]], place: int) -> float:
    for value, weight in ordered:
        if place < weight:
            return value
        place -= weight
    return ordered[-1][0]


def _slug(words: str) -> str:
    return "_".join(words.lower().split())


def _known(attributes: Attributes) -> Attributes:
    return {key: value for key, value in attributes.items() if value is not None and value != ""}
