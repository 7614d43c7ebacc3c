"""What SGLangEngine adds to a server's own times: TTFT and ITL beside a bare socket, on the same server.

    python benchmarks/client_overhead.py --url http://127.0.0.1:30000
    python benchmarks/client_overhead.py                  # starts the suite's tiny server on the CPU (tests/sglang)

Each round asks for one prompt three ways, in an order that turns: a bare socket that only stamps what arrives, curl
where it is installed, and SGLangEngine, whose stamps are CallStats'. Every prompt is new to the server each time (its
first id differs), so nobody profits from the one before. Medians and the least over the rounds, and the median of each
round's ratio to the bare socket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from agentspec.engines.base import GenerationRequest
from agentspec.engines.sglang import SGLangEngine

_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
Times = tuple[float, float]  # TTFT ms, mean ITL ms


def body(ids: Sequence[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, "stream": True}


def times(began: float, arrivals: Sequence[tuple[float, bytes]]) -> Times:
    """From (stamp, bytes) as they came. An event begins with `data:`; its stamp is when its last piece was there."""
    buffer = b""
    counted: list[tuple[float, int]] = []
    for stamp, data in arrivals:
        buffer += data
        *events, buffer = buffer.split(b"\n\n")
        totals = [int(m.group(1)) for event in events if (m := _TOKENS.search(event))]
        if totals and (not counted or totals[-1] > counted[-1][1]):
            counted.append((stamp, totals[-1]))
    (first, _), (last, total) = counted[0], counted[-1]
    return (first - began) * 1e3, (last - first) * 1e3 / max(1, total - 1)


def bare(url: str, ids: Sequence[int], tokens: int) -> Times:
    """HTTP by hand over one socket."""
    parts = urlsplit(url)
    data = json.dumps(body(ids, tokens)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(data) + data
    arrivals: list[tuple[float, bytes]] = []
    began = time.perf_counter()
    with socket.create_connection((parts.hostname or "", parts.port or 80)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        while piece := connection.recv(1 << 16):
            arrivals.append((time.perf_counter(), piece))
    return times(began, arrivals)


def curl(url: str, ids: Sequence[int], tokens: int) -> Times:
    """curl -N, its start included in nothing: the clock starts when it connects, as it says itself."""
    command = ["curl", "-sN", "-w", "\n\n%{time_starttransfer} %{time_total}", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(body(ids, tokens)), url + "/generate"]
    arrivals: list[tuple[float, bytes]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as running:
        assert running.stdout is not None
        while piece := running.stdout.read(1 << 16):
            arrivals.append((time.perf_counter(), piece))
    ended = arrivals[-1][0]
    total = float(arrivals[-1][1].split()[-1])
    return times(ended - total, arrivals)


def client(engine: SGLangEngine, ids: Sequence[int], tokens: int) -> Times:
    stats = engine.generate(GenerationRequest(input_ids=ids, max_tokens=tokens, ignore_eos=True)).result().stats
    return stats.ttft_ms or 0.0, stats.itl_mean_ms or 0.0


def measure(url: str, rounds: int, prompt: int, tokens: int, tokenizer: Any) -> dict[str, Any]:
    with SGLangEngine(url, tokenizer=tokenizer) as engine:
        ways: dict[str, Callable[[Sequence[int]], Times]] = {
            "socket": lambda ids: bare(url, ids, tokens),
            "agentspec": lambda ids: client(engine, ids, tokens),
        }
        if shutil.which("curl"):
            ways["curl"] = lambda ids: curl(url, ids, tokens)
        names = list(ways)
        found: dict[str, list[Times]] = {name: [] for name in names}
        number = 0
        for turn in range(-2, rounds):  # two rounds to warm up
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                number += 1
                ids = [100 + number % 20_000, *(200 + (7 * i) % 5000 for i in range(prompt - 1))]
                took = ways[name](ids)
                if turn >= 0:
                    found[name].append(took)
    report: dict[str, Any] = {"rounds": rounds, "prompt_tokens": prompt, "output_tokens": tokens, "clients": {}}
    for name in names:
        row = {}
        for place, figure in enumerate(("ttft_ms", "itl_ms")):
            values = [took[place] for took in found[name]]
            base = [took[place] for took in found["socket"]]
            row[figure] = statistics.median(values)
            row[f"{figure}_least"] = min(values)
            row[f"{figure[:-3]}_ratio"] = statistics.median(v / b for v, b in zip(values, base, strict=True))
        report["clients"][name] = row
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running SGLang server; without it the suite's tiny one is started")
    parser.add_argument("--tokenizer", help="a directory or Hugging Face id, where the server's isn't here")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=200, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None:
            from tests.sglang.server import Server, missing

            lack = missing()
            if lack is not None:
                print(f"--url is needed, or the suite's SGLang: {lack}", file=sys.stderr)
                return 2
            url = stack.enter_context(Server("tiny")).url
        report = measure(url.rstrip("/"), options.rounds, options.prompt, options.tokens, options.tokenizer)
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    print(f"{report['rounds']} rounds, {report['prompt_tokens']} tokens in, {report['output_tokens']} out; ms")
    print(f"{'client':10} {'TTFT':>8} {'least':>8} {'ratio':>7} {'ITL':>8} {'least':>8} {'ratio':>7}")
    for name, row in report["clients"].items():
        ttft = f"{row['ttft_ms']:8.2f} {row['ttft_ms_least']:8.2f} {row['ttft_ratio']:7.3f}"
        print(f"{name:10} {ttft} {row['itl_ms']:8.3f} {row['itl_ms_least']:8.3f} {row['itl_ratio']:7.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
