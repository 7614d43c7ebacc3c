"""`agentspec serve` starting the real SGLang on the CPU: ready only with the plugin, ended with all it started."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sglang.server import OPTIONS, ROOT, environment
from tests.sglang.setup_venv import models_path, python_path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.usefixtures("sglang_ready")]


def words(*more: str, **options: Any) -> list[str]:
    chosen = {**OPTIONS, "disable-overlap-schedule": True, **options}
    del chosen["device"]
    theirs = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in chosen.items())
    serve = [
        "-m",
        "agentspec",
        "serve",
        str(models_path() / "tiny"),
        "--engine",
        "sglang",
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    return [str(python_path()), *serve, "--sglang", theirs, *more]


def run(
    folder: Path, *more: str, variables: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(*more, **options),
        env=environment(folder, **(variables or {})),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )


def test_it_is_ready_with_the_plugin_and_ends_with_all_it_started(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        started = subprocess.Popen(
            words("--max-draft", "7", "--memory-mb", "64", "--served-model-name", "tiny"),
            # As all CPU tests here: torch_native has no verify step, the rig's has (and the setting is kept).
            env=environment(tmp_path, AGENTSPEC_SGLANG='{"trees": true}'),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert started.stdout is not None
            line = next((line for line in started.stdout if "is ready on" in line), "")
            log.seek(0)
            assert line, log.read()[-6000:]
            threading.Thread(target=started.stdout.read, daemon=True).start()  # SGLang writes there too
            base = line.split()[-1].removesuffix("/v1")
            with urllib.request.urlopen(f"{base}/server_info", timeout=60) as answer:
                told = json.loads(answer.read())
            assert told["speculative_algorithm"] == "AGENTSPEC" and told["speculative_num_draft_tokens"] == 8
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 8,
                "return_meta_info": True,
            }
            request = urllib.request.Request(
                f"{base}/v1/chat/completions",
                json.dumps(body | {"session_id": "run", "temperature": 0}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=240) as answer:
                assert json.loads(answer.read())["choices"][0]["message"]["role"] == "assistant"
            family = psutil.Process(started.pid).children(recursive=True)
            assert len(family) >= 3  # the server, its scheduler, its detokenizer
            started.send_signal(signal.SIGTERM)
            assert started.wait(120) == 0
            assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
            log.seek(0)
            assert "agentspec: stopped" in log.read()
        finally:
            started.kill()


def test_without_the_plugin_nothing_is_started(tmp_path: Path) -> None:
    done = run(tmp_path, variables={"SGLANG_PLUGINS": "another"})
    assert done.returncode == 2 and "SGLANG_PLUGINS" in done.stderr and "server_args" not in done.stderr
    done = run(tmp_path, variables={"AGENTSPEC_SGLANG": '{"widhts": [2]}'})
    assert done.returncode == 2 and "widhts" in done.stderr


def test_a_start_that_fails_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, **{"no-such-option": 1})
    assert done.returncode == 2 and "before it was ready" in done.stderr and "no-such-option" in done.stderr
