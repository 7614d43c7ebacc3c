"""Part "server" of gpu.py: SGLang plain, with NGRAM and with AGENTSPEC, on agents' calls. Run it with the Python that
has SGLang 0.5.23, or name that with --python; nothing has to be installed for the plugin, the checkout will do.

Every algorithm gets the same prompts: the histories are the recorded ones, not what the server just wrote. Workers take
whole trajectories, each one's calls one after another as an agent's are.

    ITL      of a call: (last - first arrival) / (tokens - 1); listed are medians and 95th percentiles over calls
    tokens a step    emitted tokens after the first, by verify steps; plain decoding: 1
    acceptance_rate  accepted / proposed
    conditional      accepted / (accepted + first mismatches). SGLang's counters don't say which steps a draft outlived
                     in full, so it lies between the two values given
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.errors import EngineError
from agentspec.serve.launch import SGLangServer
from benchmarks.gpu import Report, table

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = ("plain", "NGRAM", "AGENTSPEC")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face id")
    parser.add_argument("--python", default=sys.executable, help="the Python that has SGLang")
    parser.add_argument("--server-args", default="", help="more options for sglang.launch_server, as one string")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--traces", nargs="+", default=[], help="recorded trajectories, as for agentspec replay")
    parser.add_argument("--prose", nargs="+", default=[], help="texts to make trajectories of; default: this project's")
    parser.add_argument("--tokens", type=int, default=160, help="most output tokens a call")
    parser.add_argument("--start-limit", type=float, default=240.0, help="seconds that a server may take to start")
    parser.add_argument("--longest", type=int, default=6000, help="tokens of prompt beyond which a trajectory ends")


# ---- prompts ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class Chain:
    """One trajectory: its calls in order."""

    name: str
    calls: list[Call]


def render(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The prompt's ids by the model's chat template, or plainly where it has none or it refuses the messages."""
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
        except Exception as error:
            print(f"   the chat template refused a prompt ({error}); written plainly", file=sys.stderr)
    text = "".join(f"{m['role']}: {m.get('content') or ''}\n\n" for m in messages) + "assistant:"
    return [int(i) for i in tokenizer.encode(text)]


def from_prose(tokenizer: Any, files: Sequence[Path], tokens: int, longest: int, most: int) -> list[Chain]:
    """A document agent's trajectories over real texts: it reads a part, quotes from it, edits it and sums it up."""
    parts: list[tuple[str, int, list[str]]] = []
    for file in files:
        paragraphs = [p.strip() for p in file.read_text(encoding="utf-8").split("\n\n") if len(p.strip()) > 80]
        parts += [(file.name, i, paragraphs[i : i + 8]) for i in range(len(paragraphs) - 3)]
    parts.sort(key=lambda part: part[1] % 5)  # those that overlap least come first
    chains = []
    for number, (name, _, paragraphs) in enumerate(parts[:most]):
        first, second = paragraphs[0], paragraphs[1]
        word = max(first.split(), key=len)
        turns = [
            (
                f"Read this part of {name}:\n\n" + "\n\n".join(paragraphs) + "\n\nQuote its first paragraph exactly.",
                first,
            ),
            ("Now quote the second paragraph exactly.", second),
            (f"Write the first paragraph again with {word!r} replaced by 'thing'.", first.replace(word, "thing")),
            ("Say in two sentences what you have read.", paragraphs[-1][:300]),
        ]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a careful assistant who works on documents."}
        ]
        calls: list[Call] = []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            ids = render(tokenizer, messages)
            if len(ids) > longest:
                break
            calls.append(Call(ids, tokens))
            messages.append({"role": "assistant", "content": answer})
        if calls:
            chains.append(Chain(f"{name} {number}", calls))
    return chains


def from_traces(tokenizer: Any, files: Sequence[str], tokens: int, longest: int, most: int) -> list[Chain]:
    """Recorded trajectories, files in turn."""
    from agentspec.recordings import read

    read_in = [read(file) for file in files]
    recordings = [group[i] for i in range(max(map(len, read_in))) for group in read_in if i < len(group)]
    chains: list[Chain] = []
    for recording in recordings[:most]:
        calls: list[Call] = []
        for call in recording.calls:
            ids = call.input_ids or render(tokenizer, [flat(m) for m in call.messages])
            if len(ids) > longest:
                break
            calls.append(Call([int(i) for i in ids], tokens))
        if calls:
            chains.append(Chain(f"{recording.family} {recording.id}", calls))
    return chains


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message as any chat template takes it: text only, tool results as the user's."""
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    if message.get("tool_calls"):
        text += "\n" + json.dumps(message["tool_calls"], ensure_ascii=False)
    role = message["role"] if message["role"] in ("system", "user", "assistant") else "user"
    return {"role": role, "content": text}


# ---- the server ---------------------------------------------------------------------------------------


class Running:
    """A server that this process started, in its own process group; `stop` ends all of it."""

    def __init__(self, options: argparse.Namespace, algorithm: str, limit_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="agentspec-gpu-")
        folder = Path(self._folder.name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [options.python, "-m", "sglang.launch_server", "--model-path", options.model]
        command += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], *shlex.split(options.server_args)]
        if algorithm != "plain":
            command += ["--speculative-algorithm", algorithm]
        self._log = folder / "log"
        began = time.monotonic()
        method = "agentspec" if algorithm == "AGENTSPEC" else "off"
        with self._log.open("wb") as out:
            self._running = SGLangServer(
                command, environment(folder), self.url, method, start_s=limit_s, shutdown_s=10.0, output=out
            )
            try:
                self._running.__enter__()
            except EngineError as error:
                told = f"{error}: {self.tail()}"
                self._folder.cleanup()
                raise RuntimeError(told) from error
        self.start_s = time.monotonic() - began

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-1500:] if self._log.exists() else ""

    def stop(self) -> None:
        self._running.stop()
        self._folder.cleanup()


def environment(folder: Path) -> dict[str, str]:
    """This process' environment with the checkout's plugin on PYTHONPATH, as if it were installed."""
    from tests.sglang.server import plugin_paths

    paths = [*plugin_paths(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# ---- measuring ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """arrivals: (s since the request, tokens so far)."""

    key: tuple[str, int]
    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def ask(url: str, call: Call, session: str, key: tuple[str, int], timeout_s: float) -> Answer:
    answer = Answer(key)
    sampling = {"temperature": 0.0, "max_new_tokens": call.max_tokens, "ignore_eos": True}
    body = {"input_ids": call.ids, "sampling_params": sampling, "session_id": session, "stream": True}
    began = time.perf_counter()
    try:
        request = urllib.request.Request(
            url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as stream:
            for line in stream:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                answer.meta = chunk["meta_info"]
                tokens = int(answer.meta["completion_tokens"])
                new = [int(i) for i in chunk.get("output_ids") or ()]
                # cumulative, unless the server was told to send what is new only
                answer.ids = new if len(new) == tokens else answer.ids + new
                if tokens > (answer.arrivals[-1][1] if answer.arrivals else 0):
                    answer.arrivals.append((time.perf_counter() - began, tokens))
    except Exception as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def run_chains(url: str, chains: Sequence[Chain], workers: int, limit_s: float, tag: str) -> tuple[list[Answer], float]:
    """All chains by so many workers, none begun after the time is up; the answers, and the seconds it took."""
    waiting = list(reversed(chains))
    answers: list[Answer] = []
    lock = threading.Lock()
    began = time.monotonic()

    def work() -> None:
        while True:
            with lock:
                if not waiting or time.monotonic() - began > limit_s:
                    return
                chain = waiting.pop()
            for number, call in enumerate(chain.calls):
                spare = limit_s - (time.monotonic() - began)
                if number and spare < 0:
                    break
                answer = ask(url, call, f"{tag}-{chain.name}", (chain.name, number), max(spare, 0) + 30)
                with lock:
                    answers.append(answer)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, time.monotonic() - began


def summed(answers: Sequence[Answer], seconds: float, plain: dict[tuple[str, int], list[int]]) -> dict[str, Any]:
    """Figures of one algorithm at one concurrency."""
    good = [a for a in answers if not a.error and a.arrivals]
    found: dict[str, Any] = {"calls": len(good), "failed": len(answers) - len(good), "seconds": round(seconds, 2)}
    if len(good) < len(answers):
        found["first_failure"] = next((a.error or "no token came" for a in answers if a.error or not a.arrivals), "")
    if not good:
        return found
    tokens = sum(a.arrivals[-1][1] for a in good)
    itl = [
        (a.arrivals[-1][0] - a.arrivals[0][0]) / (a.arrivals[-1][1] - a.arrivals[0][1]) * 1e3
        for a in good
        if len(a.arrivals) > 1
    ]
    steps = sum(int(a.meta.get("spec_verify_ct") or 0) for a in good)
    found.update(
        tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1),
        ttft_ms=spread([a.arrivals[0][0] * 1e3 for a in good]),
        itl_ms=spread(itl),
        cached_tokens=sum(int(a.meta.get("cached_tokens") or 0) for a in good),
    )
    if steps:
        accepted = sum(int(a.meta.get("spec_num_correct_drafts") or 0) for a in good)
        sent = correct = None
        widths, hits = [column(good, name) for name in ("spec_cap_lens_histogram", "spec_correct_drafts_histogram")]
        drafted = steps
        if any(widths):
            sent = sum(max(w - 1, 0) * n for w, n in enumerate(widths))
            drafted = sum(widths[2:])
            # At most so many steps accepted all of their draft.
            correct = sum(min(n, hits[w - 1] if w - 1 < len(hits) else 0) for w, n in enumerate(widths) if w > 1)
        else:
            sent = sum(int(a.meta.get("spec_num_proposed_drafts") or 0) for a in good)
        found.update(
            verify_steps=steps,
            steps_with_a_draft=drafted,
            tokens_per_step=round((tokens - len(good)) / steps, 3),
            proposed=sent,
            accepted=accepted,
            acceptance_rate=round(accepted / sent, 4) if sent else None,
            conditional_acceptance=[
                round(accepted / max(accepted + drafted - full, 1), 4) for full in (0, correct) if full is not None
            ],
        )
    else:
        found["tokens_per_step"] = 1.0
    same = [a.ids == plain[a.key] for a in good if a.key in plain]
    found["equal_to_plain"] = f"{sum(same)}/{len(same)}"
    return found


def column(answers: Sequence[Answer], name: str) -> list[int]:
    """The histograms of all answers, added up."""
    total: list[int] = []
    for answer in answers:
        for place, n in enumerate(answer.meta.get(name) or ()):
            if place == len(total):
                total.append(0)
            total[place] += int(n)
    return total


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 3), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3)}


def run(report: Report, options: argparse.Namespace) -> None:
    chains: list[Chain] = []

    def prompts(found: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model)
        most = 2 * max(options.concurrency)
        if options.traces:
            chains.extend(from_traces(tokenizer, options.traces, options.tokens, options.longest, most))
        else:
            files = [Path(p) for p in options.prose] or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
            chains.extend(from_prose(tokenizer, files, options.tokens, options.longest, most))
        if not chains:
            raise RuntimeError("no trajectory fits: give longer texts, or a larger --longest")
        lengths = [len(call.ids) for chain in chains for call in chain.calls]
        found.update(
            source=options.traces or "prose", trajectories=len(chains), calls=len(lengths),
            prompt_tokens={"median": statistics.median(lengths), "longest": max(lengths)},
        )  # fmt: skip

    if not report.part("prompts", prompts):
        return
    plain: dict[int, dict[tuple[str, int], list[int]]] = {}
    servers: list[Running] = []
    report.on_timeout.append(lambda: [server.stop() for server in servers] and None)  # type: ignore[func-returns-value]

    def one(algorithm: str, found: dict[str, Any]) -> None:
        share = report.left / (len(options.algorithms) - options.algorithms.index(algorithm))
        end = report.left - share
        server = Running(options, algorithm, min(options.start_limit, share))
        servers.append(server)
        try:
            found["start_s"] = round(server.start_s, 1)
            run_chains(server.url, [Chain("warm-up", [Call(chains[0].calls[0].ids[:64], 16)])], 1, 30, "warm-up")
            for place, workers in enumerate(options.concurrency):
                limit = (report.left - end) / (len(options.concurrency) - place)
                some = chains[: 2 * workers]  # two turns for each worker
                tag = f"{algorithm}-{workers}"
                if limit < 1:
                    found[f"concurrency {workers}"] = {"error": "no time left"}
                    continue
                answers, seconds = run_chains(server.url, some, workers, limit, tag)
                reference = plain.setdefault(workers, {}) if algorithm == "plain" else plain.get(workers, {})
                if algorithm == "plain":
                    reference.update({a.key: a.ids for a in answers if not a.error})
                found[f"concurrency {workers}"] = summed(answers, seconds, reference)
                report.save()
            if not any("calls" in entry and entry["calls"] for entry in found.values() if isinstance(entry, dict)):
                raise RuntimeError(f"no call was answered: {server.tail()}")
        finally:
            servers.remove(server)
            server.stop()

    for algorithm in options.algorithms:
        report.part(algorithm, lambda found, a=algorithm: one(a, found), least_s=20)  # type: ignore[misc]
    tell(report.results, options)


def tell(results: dict[str, Any], options: argparse.Namespace) -> None:
    rows: list[list[Any]] = []
    for workers in options.concurrency:
        for algorithm in options.algorithms:
            entry = results["parts"].get(algorithm, {}).get("found", {}).get(f"concurrency {workers}")
            if not entry or "tokens" not in entry:
                continue
            itl, ttft = entry["itl_ms"] or {}, entry["ttft_ms"]
            between = "-".join(map(str, entry.get("conditional_acceptance") or ())) or None
            rows.append([
                workers, algorithm, entry["calls"], entry["failed"], entry["tokens"], entry["tokens_per_s"],
                ttft["median"], itl.get("median"), itl.get("p95"), entry["tokens_per_step"],
                entry.get("acceptance_rate"), between, entry["equal_to_plain"],
            ])  # fmt: skip
    if rows:
        header = ["at once", "", "calls", "failed", "tokens", "tok/s", "TTFT ms", "ITL ms", "p95", "tok/step",
                  "accepted", "conditional", "as plain"]  # fmt: skip
        print(table(header, rows))
