"""Starts, feeds and stops a real SGLang 0.5.23 server on the CPU. The servers' environment is
setup_venv.py's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import EngineError
from agentspec.serve.launch import SGLangServer
from tests.sglang.setup_venv import HERE, models_path, models_ready, python_path, ready

ROOT = HERE.parents[1]
# One server, small: the suite shares two cores with whatever else runs.
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "grammar-backend": "xgrammar",
    "max-running-requests": 16,
    "max-total-tokens": 40000,
    "context-length": 8192,
    "skip-server-warmup": True,
    "log-level": "info",
    "random-seed": 1,
}


def missing() -> str | None:
    """What is lacking to run these tests, or None."""
    if not ready():
        return f"SGLang's environment isn't set up: python3.11 {HERE / 'setup_venv.py'}"
    if not models_ready():
        return f"the test models aren't there: python3.11 {HERE / 'setup_venv.py'}"
    return None


def plugin_paths(folder: Path) -> list[str]:
    """What PYTHONPATH needs for this checkout's plugin, its entry point written to `folder`."""
    import tomllib  # Python 3.11, like the environment that this makes

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"agentspec_decoding-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"]
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return [str(folder), str(ROOT), str(ROOT / "integrations" / "sglang")]


def environment(folder: Path, plugin: bool = True, **extra: str) -> dict[str, str]:
    """The server's environment: the rig and, with plugin, this checkout with its entry point, on
    PYTHONPATH."""
    paths = [str(HERE / "rig"), *(plugin_paths(folder) if plugin else ())]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "AGENTSPEC_", "PYTHON"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "agentspec_cpu_rig.models",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **extra,
    }


class Server:
    """A running server; a context manager. log: its output so far."""

    def __init__(
        self,
        model: str = "tiny",
        algorithm: str | None = "AGENTSPEC",
        *,
        settings: dict[str, Any] | None = None,
        overlap: bool = False,
        plugin: bool = True,
        wait: float = 600.0,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="agentspec-sglang-")
        folder = Path(self._folder.name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        chosen: dict[str, Any] = {**OPTIONS, **{k.replace("_", "-"): v for k, v in options.items()}}
        if not overlap:
            chosen["disable-overlap-schedule"] = True
        if algorithm is not None:
            chosen["speculative-algorithm"] = algorithm
        path = model if "/" in model else str(models_path() / model)
        command = [
            str(python_path()),
            "-m",
            "sglang.launch_server",
            "--model-path",
            path,
            "--port",
            str(self.port),
        ]
        for name, value in chosen.items():
            if value is True:
                command.append(f"--{name}")
            elif value is not None and value is not False:
                command += [f"--{name}", str(value)]
        given = {"trees": True, "cpu_overlap": overlap, **(settings or {})}
        extra = {"AGENTSPEC_SGLANG": json.dumps(given)} if algorithm == "AGENTSPEC" else {}
        self._log = folder / "log"
        with self._log.open("wb") as out:
            # "off": no answer is asked for to see whether the plugin is there; the tests count answers
            self._running = SGLangServer(
                command,
                environment(folder, plugin, **extra, **(variables or {})),
                self.url,
                "off",
                start_s=wait,
                shutdown_s=10.0,
                output=out,
            )
            try:
                self._running.__enter__()
            except EngineError as error:
                told = f"{error}:\n{self.log[-6000:]}"
                self._folder.cleanup()
                raise RuntimeError(told) from error

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._running.process

    def stop(self) -> None:
        """End the server and all that it started, and wait for that."""
        self._running.stop()
        self._folder.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- requests ---------------------------------------------------------------------------------

    def post(self, route: str, body: Any = None, timeout: float = 240.0) -> Any:
        data = json.dumps(body if body is not None else {}).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def get(self, route: str) -> Any:
        with urllib.request.urlopen(self.url + route, timeout=30) as answer:
            return json.loads(answer.read())

    def generate(self, ids: Sequence[int], max_new_tokens: int = 64, *, timeout: float = 240.0, **rest: Any) -> Any:
        """One /generate call; keyword arguments that SGLang knows as top-level fields stay there, others are
        sampling parameters. Greedy and to full length unless told."""
        return self.post("/generate", body(ids, max_new_tokens, **rest), timeout)

    def stream(self, ids: Sequence[int], max_new_tokens: int = 64, **rest: Any) -> Iterator[Any]:
        """/generate with stream: yields the chunks; closing the iterator hangs up."""
        data = json.dumps({**body(ids, max_new_tokens, **rest), "stream": True}).encode()
        request = urllib.request.Request(self.url + "/generate", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])

    def together(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """All requests at the same time; their answers in order."""
        answers: list[Any] = [None] * len(bodies)

        def one(place: int) -> None:
            try:
                answers[place] = self.post("/generate", bodies[place])
            except Exception as error:
                answers[place] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


_TOP_LEVEL = {
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "session_id",
    "cache_salt",
    "extra_key",
    "rid",
    "custom_logit_processor",
}


def body(ids: Sequence[int], max_new_tokens: int = 64, **rest: Any) -> dict[str, Any]:
    top = {k: v for k, v in rest.items() if k in _TOP_LEVEL}
    sampling = {k: v for k, v in rest.items() if k not in _TOP_LEVEL}
    sampling = {"temperature": 0.0, "ignore_eos": True, **sampling, "max_new_tokens": max_new_tokens}
    return {"input_ids": list(ids), "sampling_params": sampling, **top}


def steps(answer: Any) -> tuple[int, int, int]:
    """(verify steps, draft tokens sent, draft tokens accepted) of a finished request, from its meta_info."""
    meta = answer["meta_info"]
    count = meta.get("spec_verify_ct", 0)
    widths = meta.get("spec_cap_lens_histogram", [])
    sent = sum(width * n for width, n in enumerate(widths)) - count
    return count, sent, meta.get("spec_num_correct_drafts", 0)
