"""The plugin's settings, from the environment variable AGENTSPEC_SGLANG (a JSON object).

SGLang's command line is closed to plugins and its scheduler processes inherit the environment, so that is
where settings travel. May import nothing from sglang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agentspec.drafting import CostCurve
from agentspec.errors import InvalidRequestError, UnknownOptionError

__all__ = ["VARIABLE", "PluginSettings"]

VARIABLE = "AGENTSPEC_SGLANG"

# v(n) where none was measured: DRAFTING's curves, a GPU bound by memory bandwidth and two AVX2 cores.
_CURVES = {
    "cpu": CostCurve({1: 1.0, 2: 2.1, 4: 2.3, 8: 2.5, 16: 2.7, 32: 3.1}, name="default, CPU"),
    "gpu": CostCurve.linear(0.005, name="default, GPU"),
}

# A proposal's cost where it isn't set: about 30 and 90 us (benchmarks/sglang_overhead.py) against a forward
# of 6 ms, what an 8-billion-parameter model takes in bfloat16 on a large GPU. No clock may decide it: ranks
# would differ.
_PROPOSER_COSTS = {"match": 0.005, "mixture": 0.015}


@dataclass(frozen=True)
class PluginSettings:
    """What may be set, with its default.

    proposer:   "mixture" or "match"
    proposer_settings: that proposer's own keyword arguments
    memory_mb:  megabytes (10^6 bytes) that all trajectory memories of one scheduler process may take together
    widths:     verify widths (draft tokens + 1) to build; empty: powers of two up to
    --speculative-num-draft-tokens
    trees:      None: where the attention backend honours the mask; False: chains only. True is refused
                where chains are all that is right
    follow:     join a request that names no trajectory to the one whose prompt and output it extends
    cost_curve: {n: v(n)}; None: a default by device. Under tensor parallelism every rank needs the same
    proposer_cost: what a proposal for one request takes, relative to a forward over one token; None: a
    default
    cpu_overlap: allow overlap scheduling on a CPU, which SGLang switches off for speculation (tests use it)
    """

    proposer: str = "mixture"
    proposer_settings: Mapping[str, Any] = field(default_factory=dict)
    memory_mb: float = 1024.0
    widths: tuple[int, ...] = ()
    trees: bool | None = None
    follow: bool = True
    cost_curve: Mapping[int, float] | None = None
    proposer_cost: float | None = None
    cpu_overlap: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> PluginSettings:
        """Raises InvalidRequestError or UnknownOptionError, naming the variable, for what can't be used."""
        text = environment.get(VARIABLE, "").strip()
        if not text:
            return cls()
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidRequestError(f"{VARIABLE}: needed a JSON object, got {text!r} ({error})") from error
        if not isinstance(given, dict):
            raise InvalidRequestError(f"{VARIABLE}: needed a JSON object, got {type(given).__name__}")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise UnknownOptionError(f"{VARIABLE}: unknown settings {unknown}; there are {sorted(known)}")
        try:
            if "widths" in given:
                given["widths"] = tuple(int(w) for w in given["widths"])
            if given.get("cost_curve") is not None:
                given["cost_curve"] = {int(n): float(v) for n, v in given["cost_curve"].items()}
                CostCurve(given["cost_curve"])
            settings = cls(**given)
            if not float(settings.cost()) >= 0:
                raise InvalidRequestError(f"proposer_cost: needed >= 0, got {settings.proposer_cost!r}")
            if not float(settings.memory_mb) * 1e6 >= 2**20:
                raise InvalidRequestError(f"memory_mb: needed at least 1.05 (1 MiB), got {settings.memory_mb!r}")
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{VARIABLE}: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"{VARIABLE}: {error}") from error
        return settings

    def verify_widths(self, widest: int) -> tuple[int, ...]:
        """Ascending verify widths >= 2, the last one `widest` (SGLang's --speculative-num-draft-tokens)."""
        if self.widths:
            wrong = [w for w in self.widths if not 2 <= w <= widest]
            if wrong:
                raise InvalidRequestError(f"widths: needed 2..{widest} (--speculative-num-draft-tokens), got {wrong}")
            return tuple(sorted({*self.widths, widest}))
        powers = {1 << k for k in range(1, widest.bit_length()) if 1 << k < widest}
        return tuple(sorted({*powers, widest}))

    def cost(self) -> float:
        """One request's proposal, relative to a forward over one token."""
        return _PROPOSER_COSTS.get(self.proposer, 0.0) if self.proposer_cost is None else self.proposer_cost

    def curve(self, device: str) -> CostCurve:
        """v(n) for a device type ("cpu", "cuda", ...)."""
        if self.cost_curve is not None:
            return CostCurve(self.cost_curve, name="set by the user")
        return _CURVES["cpu" if device == "cpu" else "gpu"]
