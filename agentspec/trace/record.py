"""`agentspec trace record`: run a command, gather the spans of all its processes, write one OTLP JSON
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentspec.errors import InvalidRequestError
from agentspec.telemetry import RECORDING_VARIABLE
from agentspec.telemetry.options import CONTENT_VARIABLE, STEPS_VARIABLE

__all__ = ["record"]


def record(path: Path, command: Sequence[str], *, content: bool = False, steps: bool = False) -> int:
    """Returns the command's own exit code; 1 where it ended well but made no spans, 127 where it wasn't
    found.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidRequestError(f"{path}: needed a file in a directory that exists")
    with tempfile.TemporaryDirectory(prefix="agentspec-trace-") as folder:
        environment = dict(os.environ, **{RECORDING_VARIABLE: folder}, OTEL_SDK_DISABLED="false")
        if content:
            environment[CONTENT_VARIABLE] = "true"
        if steps:
            environment[STEPS_VARIABLE] = "true"
        code = _run(command, environment)
        spans = _gathered(Path(folder))
    count = sum(len(s["spans"]) for r in spans["resourceSpans"] for s in r["scopeSpans"])
    if not count:
        print(
            f"agentspec trace record: {command[0]} made no spans, nothing was written. Spans come from "
            "@agentspec.agent_loop, agentspec.trajectory, @agentspec.tool and the engines' calls",
            file=sys.stderr,
        )
        return code or 1
    path.write_text(json.dumps(spans, ensure_ascii=False), encoding="utf-8")
    print(
        f"agentspec trace record: {count} spans in {path}. Look: agentspec trace show {path} "
        f"(--html page.html), or upload it in Jaeger's search page",
        file=sys.stderr,
    )
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)
    except (FileNotFoundError, PermissionError) as error:
        print(f"agentspec trace record: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    # Whoever ends this ends the command, and what it did until then is still written. Ctrl-C reaches both.
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _gathered(folder: Path) -> dict[str, list[dict[str, list[dict[str, list[object]]]]]]:
    resources = []
    for part in sorted(folder.glob("spans-*.jsonl")):
        for line in part.read_text(encoding="utf-8").splitlines():
            # The last line of a process that was killed while it wrote is none.
            with contextlib.suppress(ValueError):
                resources += json.loads(line)["resourceSpans"]
    return {"resourceSpans": resources}
