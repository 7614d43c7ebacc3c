"""The script for a GPU: what LocalEngine's forward and SGLang's server do there, in under 8 minutes each.

    python -m benchmarks.gpu forward --out forward.json            # needs torch and transformers, no model
    python -m benchmarks.gpu server --model Qwen/Qwen3-8B --out server.json [--traces FILE...]   # needs SGLang 0.5.23

`forward` builds a model of a 7B shape with random weights on the device. Its parts: what the device is and how fast
its memory copies; v(n) of transformers' forward, of ours uncaptured, captured at each width, and captured at one width
for all; the share of the memory's peak rate; whether rows have the same bits whatever goes with them, and trees
against chains; LocalEngine with drafts that are all right, right for a while, or trees.

`server` starts SGLang plain, with NGRAM and with AGENTSPEC, and sends the same agents' calls to each at several
concurrencies: TTFT, ITL, tokens a step, both acceptances, and how many outputs equal plain's.

Every part that fails says so in the results and the rest goes on; results are written after each part, so what was
done before the time ran out is kept. Without a GPU both run in small (`--shape tiny --device cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

__all__ = ["Report", "table"]


class Report:
    """What was found so far, on disk after every part, under a time budget.

    grace_s: a part that neither ends nor fails is given this long after the time is up, then the process ends with 2

    results: {"parts": {name: {"seconds": s, "found": ... or "error": text}}, "complete": whether every part ended well}
    """

    def __init__(self, what: str, budget_s: float, out: str | None, grace_s: float = 20.0) -> None:
        self._began = time.monotonic()
        self._budget = budget_s
        self._out = Path(out) if out else None
        self._lock = threading.Lock()
        self.results: dict[str, Any] = {"benchmark": what, "budget_s": budget_s, "complete": False, "parts": {}}
        self.on_timeout: list[Callable[[], None]] = []  # e.g. to stop a server
        self._timer = threading.Timer(budget_s + grace_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    @property
    def left(self) -> float:
        """Seconds of the budget that are left; negative after it."""
        return self._budget - (time.monotonic() - self._began)

    def part(self, name: str, run: Callable[[dict[str, Any]], None], least_s: float = 0.0) -> bool:
        """Run one part, which fills the dict that it is given; its failure is noted. least_s: not started with less
        time left than that. Returns whether it ended well."""
        entry: dict[str, Any] = {"found": {}}
        self.results["parts"][name] = entry
        if self.left < least_s:
            entry["error"] = f"not started: needed {least_s:.0f} s, {max(self.left, 0):.0f} s were left"
            self.save()
            return False
        print(f"-- {name} ({self.left:.0f} s left)", file=sys.stderr, flush=True)
        before = time.monotonic()
        try:
            run(entry["found"])
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["traceback"] = traceback.format_exc(limit=-4)
            print(f"   failed: {entry['error']}", file=sys.stderr, flush=True)
        entry["seconds"] = round(time.monotonic() - before, 2)
        self.save()
        return "error" not in entry

    def save(self) -> None:
        with self._lock:
            if self._out is None:
                return
            self._out.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._out.with_name(self._out.name + ".part")
            temporary.write_text(json.dumps(self.results, indent=1, default=str), encoding="utf-8")
            os.replace(temporary, self._out)

    def close(self) -> int:
        """The end: 0 if every part ended well, else 1."""
        self._timer.cancel()
        parts = self.results["parts"].values()
        self.results["complete"] = bool(parts) and all("error" not in part for part in parts)
        self.results["seconds"] = round(time.monotonic() - self._began, 1)
        self.save()
        for name, part in self.results["parts"].items():
            if "error" in part:
                print(f"{name}: {part['error']}")
        return 0 if self.results["complete"] else 1

    def _give_up(self) -> None:
        for stop in self.on_timeout:
            try:
                stop()
            except Exception as error:
                print(f"   {error}", file=sys.stderr)
        running = list(self.results["parts"])[-1:]
        for name in running:
            self.results["parts"][name].setdefault("error", "still running when the time was up")
        self.save()
        print(f"time is up in {', '.join(running)}; what was found before is kept", file=sys.stderr, flush=True)
        os._exit(2)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Columns of plain text. Floats get three digits; None is a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [header, *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    from benchmarks import gpu_forward, gpu_server

    for name, module in (("forward", gpu_forward), ("server", gpu_server)):
        kind = kinds.add_parser(name)
        kind.add_argument("--budget", type=float, default=440.0, help="seconds, all in all")
        kind.add_argument("--out", help="write the results here, as JSON, after each part")
        module.add_arguments(kind)
        kind.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    report = Report(options.kind, options.budget, options.out)
    options.run(report, options)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
