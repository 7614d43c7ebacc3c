"""The command line and the environment that SGLang is started with; tests/sglang/test_serve.py starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentspec.cli import main
from agentspec.errors import EngineError, InvalidRequestError, ServerError
from agentspec.serve.launch import METHODS, SGLangServer, _alive, command, variables

pytestmark = pytest.mark.fast


def words(**options: Any) -> str:
    return " ".join(command("m", host="127.0.0.1", port=1, **options))


def test_each_method_has_its_options() -> None:
    assert "--speculative-algorithm AGENTSPEC --speculative-num-draft-tokens 8" in words(
        method="agentspec", max_draft=7
    )
    assert "--speculative-num-steps" not in words(method="ngram", max_draft=7)
    eagle = words(method="eagle3", draft_model="d", max_draft=3)
    assert "EAGLE3 --speculative-draft-model-path d --speculative-num-steps 3 --speculative-eagle-topk 1" in eagle
    assert "--speculative-num-draft-tokens 4" in eagle
    assert "NEXTN" in words(method="mtp") and "--speculative-num" not in words(method="mtp")
    assert "--speculative" not in words(method="off")
    assert "--enable-trace --otlp-traces-endpoint localhost:4317" in words(otlp_endpoint="http://localhost:4317")
    assert words(more=["--tp-size", "2"]).endswith("--tp-size 2")
    wrong: list[dict[str, Any]] = [
        {"method": "magic"},
        {"method": "eagle"},
        {"method": "standalone"},
        {"method": "agentspec", "draft_model": "d"},
        {"method": "off", "max_draft": 3},
        {"max_draft": 0},
    ]
    for options in wrong:
        with pytest.raises(InvalidRequestError):
            words(**options)
    assert set(METHODS) == {"agentspec", "ngram", "standalone", "eagle", "eagle3", "mtp", "off"}


def test_settings_are_joined() -> None:
    told = variables(
        "agentspec", memory_mb=64, proposer=None, environment={"AGENTSPEC_SGLANG": '{"follow": false}', "A": "b"}
    )
    assert json.loads(told["AGENTSPEC_SGLANG"]) == {"follow": False, "memory_mb": 64} and told["A"] == "b"
    assert variables("ngram", memory_mb=None, proposer=None, environment={"A": "b"}) == {"A": "b"}
    with pytest.raises(InvalidRequestError):
        variables("ngram", memory_mb=64, proposer=None, environment={})
    with pytest.raises(InvalidRequestError, match="JSON"):
        variables("agentspec", memory_mb=64, proposer=None, environment={"AGENTSPEC_SGLANG": "{"})


@pytest.mark.parametrize(
    "line",
    [
        "--method ngram --engine local",
        "--method off --max-draft 4 --engine local",
        "--draft-model d --engine local",
        "--memory-mb 5 --engine local",
        "--max-body-mb 5 --engine sglang",
        "--method eagle --engine sglang",
        "--port 70000",
        "--max-requests 0 --engine local",
        "--api-keys /nowhere --engine local",
    ],
)
def test_options_that_do_nothing_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", *line.split()]) == 2
    assert "agentspec serve: " in capsys.readouterr().err


# A process that starts another one and stays; the real SGLang is tests/sglang/test_serve.py's.
_FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_all_that_was_started_is_stopped() -> None:
    server = SGLangServer(
        [sys.executable, "-c", _FAMILY], {}, "http://127.0.0.1:9", "off", start_s=1.0, shutdown_s=30.0
    )
    began = time.monotonic()
    with pytest.raises(ServerError, match="--start-timeout"), server:
        pass
    assert time.monotonic() - began < 60
    assert server.process.returncode == -signal.SIGTERM and not _alive(server.process.pid)


def test_a_server_that_ends_is_said(tmp_path: Path) -> None:
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); raise SystemExit(3)"
    with (tmp_path / "log").open("wb") as log:
        server = SGLangServer([sys.executable, "-c", code], {}, "http://127.0.0.1:9", "off", output=log)
        with pytest.raises(EngineError, match="ended with 3"), server:
            pass
    assert (tmp_path / "log").read_text().split() == ["out", "err"]


def test_without_sglang_the_extra_is_named() -> None:
    code = "import sys; sys.modules['sglang'] = None; from agentspec.cli import main; sys.exit(main(['serve', 'm', '--engine', 'sglang']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "[sglang]" in done.stderr, done.stderr
