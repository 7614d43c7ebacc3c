"""SGLang's router (the wheel sglang-router) before real workers: a trajectory sticks to its worker by routing key, which
is seen by what it reuses there; a worker killed in the middle of a chain, drained, added; pools by traffic class.

The workers are `agentspec serve` with the embedded engine: to the router a worker like any other, and two of them fit
two cores. What the router does with SGLang's own servers is the same HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.test_process import Process

pytest.importorskip("sglang_router", reason="pip install sglang-router (Linux)")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


class Router:
    """A running router. url: its own."""

    def __init__(self, log: Path, *options: str) -> None:
        ports = []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(str(probe.getsockname()[1]))
        self.url = f"http://127.0.0.1:{ports[0]}"
        places = ["--host", "127.0.0.1", "--port", ports[0], "--prometheus-port", ports[1]]
        health = [
            "--health-check-interval-secs",
            "1",
            "--health-failure-threshold",
            "2",
            "--health-success-threshold",
            "1",
        ]
        self._out = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", *places, *health, *options],
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        told = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, told, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def workers(self) -> dict[str, dict[str, Any]]:
        """The healthy ones, by URL."""
        try:
            _, told = self.call("GET", "/workers")
        except OSError:
            return {}
        return {worker["url"]: worker for worker in told["workers"] if worker["is_healthy"]}

    def until(self, done: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        end = time.monotonic() + 240
        while not done(found := self.workers()):
            assert time.monotonic() < end and self.process.poll() is None, found
            time.sleep(0.5)
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._out.close()


class Chain:
    """A conversation that is routed by its key."""

    def __init__(self, router: Router, key: str) -> None:
        self.router, self.key = router, key
        self.messages: list[Any] = [{"role": "user", "content": f"I am {key}. The quick brown fox jumps."}]

    def call(self, tries: int = 1) -> dict[str, Any]:
        """The next call's figures. tries: as a client would try again after 5xx."""
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 8, "temperature": 0}
        for attempt in range(tries):
            status, told = self.router.call("POST", "/v1/chat/completions", body, X_SMG_Routing_Key=self.key)
            if status == 200:
                break
            assert status >= 500 and attempt < tries - 1, told
            time.sleep(0.5)
        self.messages += [told["choices"][0]["message"], {"role": "user", "content": "And on."}]
        figures: dict[str, Any] = told["agentspec"]
        return figures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests import tiny

    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama", max_position_embeddings=8192).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(model: str) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(*words: str) -> Process:
        started.append(Process(model, "--served-model-name", "tiny", *words))
        return started[-1]

    yield make
    for process in started:
        process.end()


def test_trajectories_stick_and_survive(start: Callable[..., Process], tmp_path: Path) -> None:
    workers = [start(), start()]
    router = Router(
        tmp_path / "log", "--policy", "manual", "--assignment-mode", "min_group",
        "--worker-urls", *(w.url for w in workers),
    )  # fmt: skip
    try:
        router.until(lambda found: len(found) == 2)
        chains = [Chain(router, f"run-{number}") for number in range(6)]
        assert all(chain.call()["joined_by"] == "new" for chain in chains)
        for turn in (1, 2):  # interleaved: each finds its own worker, and there all that it said before
            for chain in chains:
                told = chain.call()
                assert told["call_index"] == turn and told["reused_tokens"] > 0.8 * (told["prompt_tokens"] - 30)
        # killed in the middle of a chain: those that were there begin anew elsewhere, the others notice nothing
        workers[0].process.kill()
        after = [chain.call(tries=40) for chain in chains]
        moved = [told["joined_by"] == "new" for told in after]
        assert 0 < sum(moved) < len(chains), moved
        for chain, told, was_moved in zip(chains, after, moved, strict=True):
            assert told["call_index"] == (0 if was_moved else 3)
            assert chain.call(tries=40)["reused_tokens"] > 0  # and stick there
        router.until(lambda found: list(found) == [workers[1].url])
        # added: chains stay where they are, new ones come to it
        added = start()
        assert router.call("POST", "/workers", {"url": added.url})[0] == 202
        held = router.until(lambda found: set(found) == {workers[1].url, added.url})
        assert all(chain.call()["joined_by"] == "prompt" for chain in chains)
        new = [Chain(router, f"new-{number}") for number in range(12)]  # min_group prefers it, not always
        for chain in new:
            chain.call()
        # drained: taken out of the router, its calls under way end there; what comes goes to the other
        worker = held[workers[1].url]["id"]
        assert router.call("DELETE", f"/workers/{worker}")[0] == 202
        router.until(lambda found: list(found) == [added.url])
        assert all(chain.call(tries=10)["joined_by"] == "new" for chain in chains)
        stayed = [chain.call()["joined_by"] == "prompt" for chain in new]
        assert any(stayed), stayed  # those that were with it already
        assert workers[1].end(signal.SIGTERM)[0] == 0
        assert all(chain.call()["joined_by"] == "prompt" for chain in chains)
    finally:
        router.stop()


def answered(worker: Process) -> int:
    """Calls that a worker has answered."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return round(
        sum(float(x.split()[-1]) for x in lines if x.startswith("gen_ai_client_operation_duration_seconds_count"))
    )


def test_two_pools_by_class_of_traffic(start: Callable[..., Process], tmp_path: Path) -> None:
    """A class of traffic is a router: "throughput" has the pool without drafts, "latency" has the one with drafts, and
    the other to overflow to."""
    drafting, plain = start(), start("--method", "off")
    by_load = ("--policy", "manual", "--assignment-mode", "min_load", "--worker-urls")
    throughput = Router(tmp_path / "throughput", *by_load, plain.url)
    latency = Router(tmp_path / "latency", *by_load, drafting.url, plain.url)
    try:
        throughput.until(lambda found: len(found) == 1)
        latency.until(lambda found: len(found) == 2)
        for number in range(4):
            Chain(throughput, f"bulk-{number}").call()
        assert (answered(plain), answered(drafting)) == (4, 0)
        # a trajectory of the latency class that is with the drafting pool, and long at it
        for number in range(30):
            Chain(latency, f"run-{number}").call()
            if answered(drafting):
                break
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Go on and on."}],
            "stream": True,
            "max_tokens": 7000,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{latency.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-SMG-Routing-Key": f"run-{number}"},
        )
        with urllib.request.urlopen(request, timeout=120) as stream:
            assert stream.readline().startswith(b"data: ")
            before = answered(plain), answered(drafting)
            for more in range(4):  # overflow: new ones go where there is room
                Chain(latency, f"more-{more}").call()
            assert (answered(plain), answered(drafting)) == (before[0] + 4, before[1])
    finally:
        latency.stop()
        throughput.stop()


def test_what_the_router_passes_on(start: Callable[..., Process], tmp_path: Path) -> None:
    """Release 0.3.2 writes chats anew and leaves session_id out; behind it a chat is followed by what it says."""
    worker = start()
    router = Router(tmp_path / "log", "--policy", "manual", "--worker-urls", worker.url)
    try:
        router.until(lambda found: len(found) == 1)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "session_id": "run"}
        status, told = router.call("POST", "/v1/chat/completions", body, X_SMG_Routing_Key="run")
        assert status == 200 and told["agentspec"]["joined_by"] == "new"
        prompt = {"model": "tiny", "prompt": "The quick", "max_tokens": 4, "session_id": "run"}
        status, told = router.call("POST", "/v1/completions", prompt, X_SMG_Routing_Key="run")
        assert status == 200 and told["agentspec"]["joined_by"] == "session_id"
    finally:
        router.stop()
        os.kill(worker.process.pid, 0)  # the router ends nobody else's processes
