"""CostMeter: v(n) of one engine, measured at load, kept on disk, and corrected by the forwards that run.

A machine that does other things at the same time slows some forwards and not others, so a single pass over the widths
can be wrong by a factor (seen: v(2) = 6.8). So at load widths take turns and the fastest of each counts; later every
verify step counts a little. Widths depend on v(n), texts never. Called by LocalEngine.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentspec.drafting import CostCurve

__all__ = ["CostMeter", "measure"]

WIDTHS = (1, 2, 4, 8, 16, 32)
# A step moves its width's v by this share of what it says: some 30 changes of width outweigh what was measured at load.
_WEIGHT = 1 / 32
_CLIP = math.log(2.0)  # one step never says more than that
# The machine's present speed (ms a unit of cost) follows faster: it changes with what else runs.
_LEVEL_WEIGHT = 1 / 8
_REBUILD = 32  # steps between two curves
_storing = threading.Lock()


def measure(
    run: Callable[[int], None], budget_s: float = 6.0, widths: tuple[int, ...] = WIDTHS
) -> tuple[dict[int, float], bool]:
    """(ms of a forward by width, whether that is worth keeping), robust against other load.

    run(n): one forward over n tokens, waited for. Widths take turns, as often as the budget allows (at least once), and
    each one's fastest counts, never more than n times n = 1: other load only ever adds time. Widths that contradict
    each other (a narrower one that took longer) get their mean. Worth keeping: three rounds at least, in which the
    middle n = 1 took less than 1.5 times the fastest.
    """

    def timed(n: int) -> float:
        before = time.perf_counter()
        run(n)
        return (time.perf_counter() - before) * 1e3

    for n in widths:  # first runs allocate and pack
        run(n)
    end = time.perf_counter() + budget_s
    taken: dict[int, list[float]] = {n: [] for n in widths}
    for n in itertools.islice(itertools.cycle(widths), 48 * len(widths)):
        if time.perf_counter() > end and all(taken.values()):
            break
        taken[n].append(timed(n))
    base = min(taken[1])
    curve = _rising({n: (min(seen) / base, 1.0) for n, seen in taken.items() if n > 1})
    rounds = min(len(seen) for seen in taken.values())
    return {n: v * base for n, v in curve.items()}, rounds >= 3 and statistics.median(taken[1]) < 1.5 * base


def measure_forward(forward: Any, context_length: int, context: int = 256) -> tuple[dict[int, float], bool]:
    """As `measure`, of a Forward's steps after `context` tokens."""
    context = min(context, context_length // 2)
    cache = forward.new_cache()
    ids = (np.arange(context + max(WIDTHS)) * 7919 % forward.vocabulary).astype(np.int32)
    forward.step(cache, ids[:context], 0)

    def run(n: int) -> None:
        logits = forward.step(cache, ids[:n], n)
        if logits.is_cuda:  # waits for it; the logits stay there, as they do when choices are greedy
            torch.cuda.synchronize(logits.device)
        cache.crop(context)

    return measure(run, widths=tuple(n for n in WIDTHS if context + n <= context_length))


class CostMeter:
    """v(n) as known now.

    curve: the CostCurve in force, replaced now and then (`version` counts)
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.version = 0
        self.steps = 0
        self._v = dict(curve.points)
        self._widths = sorted(self._v)
        self._level: float | None = curve.base_ms
        self._before: tuple[int, float] | None = None
        self._seen = dict.fromkeys(self._v, 0.0)
        self._seen[1] = 1e9  # v(1) = 1 by definition

    @property
    def base_ms(self) -> float | None:
        """ms of a forward over one token at the machine's present speed; None: not known."""
        return self._level

    def record(self, n: int, milliseconds: float) -> None:
        """A forward over n tokens took so long.

        It is compared with the one before: both met the same load, so what their ratio says is about v.
        """
        here = milliseconds / self.curve(n)
        if self._level is None or not 1 / 16 < here / self._level < 16:
            self._level = here  # the first, or another machine state altogether
        self._level += _LEVEL_WEIGHT * (here - self._level)
        before, self._before = self._before, (n, milliseconds)
        self.steps += 1
        if before is not None and before[0] != n and min(milliseconds, before[1]) > 0:
            m, earlier = before
            error = math.log(milliseconds / earlier) - math.log(self._now(n) / self._now(m))
            error = _WEIGHT * max(-_CLIP, min(_CLIP, error))
            share = 0.5 if min(n, m) > 1 else 1.0
            self._shift(n, share * error * self._now(n))
            self._shift(m, -share * error * self._now(m))
        if self.steps % _REBUILD == 0:
            self._rebuild()

    def _around(self, n: int) -> tuple[int, int, float]:
        """The points on both sides of n, and how far n lies from the lower to the upper."""
        widths = self._widths
        place = bisect.bisect_left(widths, n)
        if place == len(widths) or widths[place] == n:
            point = widths[min(place, len(widths) - 1)]
            return point, point, 0.0
        below, above = widths[place - 1], widths[place]
        return below, above, (n - below) / (above - below)

    def _now(self, n: int) -> float:
        """v(n) from the points as they are, between two curves."""
        below, above, share = self._around(n)
        return self._v[below] + share * (self._v[above] - self._v[below])

    def _shift(self, n: int, error: float) -> None:
        """Move the points on both sides of n, each by its share; v(1) is 1."""
        below, above, share = self._around(n)
        for point, part in ((below, 1.0 - share), (above, share)):
            if point > 1 and part:
                self._v[point] = max(1.0, self._v[point] + part * error)
                self._seen[point] += part

    def _rebuild(self) -> None:
        """Where two points contradict each other, the one that was seen more often counts more."""
        curve = _rising({n: (v, 1.0 + self._seen[n]) for n, v in self._v.items() if n > 1})
        self.curve = CostCurve(curve, base_ms=self._level, name=self.curve.name)
        self.version += 1


def _rising(points: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """The nearest v(n) that doesn't fall, from 1 at n = 1 and never above n, of n -> (v, weight): pool adjacent
    violators."""
    pools: list[tuple[float, float, list[int]]] = []  # v, weight, widths
    for n, (v, weight) in sorted(points.items()):
        v, widths = min(v, float(n)), [n]
        while pools and pools[-1][0] > v:
            other, heavier, earlier = pools.pop()
            v = (v * weight + other * heavier) / (weight + heavier)
            weight, widths = weight + heavier, earlier + widths
        pools.append((v, weight, widths))
    return {1: 1.0} | {n: max(1.0, min(v, float(n))) for v, _, widths in pools for n in widths}


def stored(path: Path, identity: Mapping[str, Any]) -> dict[int, float] | None:
    """The times (ms by width) measured before for this model, machine and forward; None: none."""
    return _kept(path).get(_key(identity))


def store(path: Path, identity: Mapping[str, Any], times: Mapping[int, float]) -> None:
    """Keep the times. A home that can't be written is no error: measured again next time."""
    with _storing:  # another process that writes at the same time may win: its entry is measured again
        known = {**_kept(path), _key(identity): {n: float(ms) for n, ms in times.items()}}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(known), encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            pass


def _key(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _kept(path: Path) -> dict[str, dict[int, float]]:
    """The file's entries that `measure` can have made. What somebody broke is left out, and so measured again."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {key: times for key, entry in entries if (times := _times(entry)) is not None}


def _times(entry: Any) -> dict[int, float] | None:
    """ms by width, or None where `measure` can't have said so: widths of WIDTHS, times from n = 1's to n times that."""
    widths = {str(n): n for n in WIDTHS}
    if not isinstance(entry, dict) or not entry.keys() <= widths.keys():
        return None
    # JSON's integers and booleans are no times: they were written as floats, and a float holds no 400 digits.
    times = {widths[name]: ms for name, ms in entry.items() if isinstance(ms, float) and math.isfinite(ms)}
    base = times.get(1, 0.0)
    good = len(times) == len(entry) and base > 0 and all(base <= ms <= n * base for n, ms in times.items())
    return times if good else None
