"""`agentspec economics`: the model of break-even, as tables. Called by cli; the formulas are drafting.economics."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from agentspec.drafting import economics
from agentspec.errors import InvalidRequestError

__all__ = ["add_arguments", "run", "tables"]


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise InvalidRequestError(f"{option}: needed {what} separated by commas, got {text!r:.80}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--acceptance", default="0.2,0.4,0.6,0.8,0.9", metavar="A,...", help="conditional acceptances a"
    )
    parser.add_argument("--drafted", default="1,2,3,4,6,8", metavar="K,...", help="drafted tokens a step, k")
    parser.add_argument(
        "--cost", type=float, default=0.10, metavar="C", help="draft cost c, in forwards (default 0.10)"
    )
    parser.add_argument(
        "--per",
        choices=("token", "step"),
        help="what costs c: each token, or the step (default: token; with --curve: step)",
    )
    parser.add_argument(
        "--curve",
        metavar="N:V,...",
        help="a verify-cost curve, e.g. 1:1,2:1.2,8:1.5,16:1.8; then S = E / (v(k+1) + c), c a step",
    )
    parser.add_argument(
        "--decode-share", type=float, metavar="F", help="decode's share of the chain's time: adds S_chain"
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")


def _curve(text: str) -> economics.CostCurve:
    try:
        points = {int(n): float(v) for n, v in (pair.split(":") for pair in text.split(","))}
    except ValueError as error:
        raise InvalidRequestError(f"--curve: needed N:V pairs such as 1:1,8:1.5, got {text!r}") from error
    return economics.CostCurve(points)


def tables(
    acceptances: list[float],
    ks: list[int],
    cost: float,
    per: str | None = None,
    curve: economics.CostCurve | None = None,
    decode_share: float | None = None,
) -> dict[str, Any]:
    """Expected tokens and speedup by (a, k), break-even a by k (None with a curve), best k by a; as plain lists for
    JSON. per: "token" or "step"; None: "step" with a curve, else "token"."""
    per = per or ("token" if curve is None else "step")

    def speedup(a: float, k: int) -> float:
        if curve is not None:
            s = economics.speedup_curve(a, k, k * cost if per == "token" else cost, curve)
        elif per == "step":
            s = economics.speedup_per_step(a, k, cost)
        else:
            s = economics.speedup_per_token(a, k, cost)
        return s if decode_share is None else economics.chain_speedup(s, decode_share)

    speedups = [[speedup(a, k) for k in ks] for a in acceptances]
    break_even = None
    if curve is None:
        found = [economics.break_even_acceptance(k, cost, per=per) for k in ks]
        break_even = [a if math.isfinite(a) else None for a in found]
    return {
        "a": acceptances,
        "k": ks,
        "c": cost,
        "per": per,
        "curve": None if curve is None else dict(curve.points),
        "expected_tokens": [[economics.expected_tokens(a, k) for k in ks] for a in acceptances],
        "speedup": speedups,
        "break_even_a": break_even,
        "best_k": [ks[max(range(len(ks)), key=lambda i: (row[i], -ks[i]))] for row in speedups],
    }


def run(args: argparse.Namespace) -> int:
    result = tables(
        _numbers("--acceptance", args.acceptance, float),
        _numbers("--drafted", args.drafted, int),
        args.cost,
        args.per,
        _curve(args.curve) if args.curve else None,
        args.decode_share,
    )
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    forward = "1" if result["curve"] is None else "v(k + 1)"
    formula = f"S = E(a, k) / ({forward} + {'k c' if result['per'] == 'token' else 'c'})"
    if args.decode_share is not None:
        formula += f", chain: 1 / (1 - f + f / S) with f = {args.decode_share:g}"
    print(f"Speedup {formula}, c = {args.cost:g}\n")
    width = max(7, len(str(max(result["k"]))) + 4)
    print("   a \\ k" + "".join(f"{k:>{width}}" for k in result["k"]) + "   best k")
    for a, row, best in zip(result["a"], result["speedup"], result["best_k"], strict=True):
        print(f"{a:>8.2f}" + "".join(f"{s:>{width}.2f}" for s in row) + f"{best:>{max(9, width)}}")
    print("\nExpected tokens a step, E(a, k) = 1 + a + ... + a^k\n")
    for a, row in zip(result["a"], result["expected_tokens"], strict=True):
        print(f"{a:>8.2f}" + "".join(f"{e:>{width}.2f}" for e in row))
    if result["break_even_a"] is not None:
        cells = "".join(f"{'never' if a is None else format(a, '.3f'):>{width}}" for a in result["break_even_a"])
        print(f"\nBreak-even acceptance\n\n{'a':>8}{cells}")
    return 0
