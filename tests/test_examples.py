"""The examples: each runs on a tiny model (fast) and, as a user would run it, on SmolLM2 (ci)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_local_smollm2 import needs_the_wheel
from tests.serve.conftest import Running

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*command: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A program as a user runs it; it has to end well."""
    paths = [str(ROOT), str(ROOT / "integrations" / "langchain")]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture
def engine(tiny_engine: Callable[..., Any]) -> Any:
    return tiny_engine(model={"max_position_embeddings": 8192})


@pytest.fixture
def saved_model(tmp_path: Path) -> str:
    """A tiny model in a directory, to be named as any model is."""
    from tests import tiny

    tiny.model("llama", max_position_embeddings=8192).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.fast
def test_langchain_agent(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("langchain_agent").main(["--compare"], engine=engine)
    out = capsys.readouterr().out
    assert "the same text: True" in out and out.count("7 calls") == 2
    drafted, plain = out.split("without drafts:")
    calls = re.findall(r"^ +(\d)  .*?  (\w+)\(", drafted, re.M)
    assert [name for _, name in calls] == [
        "list_files",
        "read_file",
        "search",
        "read_file",
        "word_count",
        "write_note",
    ]
    assert drafted.count("1 trajectory") == 1
    assert [int(n) for n in re.findall(r"^ +\d +\d+ +\d+ +\d+ +\d+ +(\d+)", plain, re.M)] == [0] * 7


@pytest.mark.fast
def test_langgraph_threads(saved_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = load("langgraph_threads").main(["--model", saved_model], engine_options={"max_draft": 0})
    stats = [answer.response_metadata["call_stats"] for answer in answers]
    assert [s["trajectory_id"] for s in stats] == ["ada", "grace"] * 3
    assert [s["call_index"] for s in stats] == [0, 0, 1, 1, 0, 0]  # the restarted engine counts anew
    assert all(s["reused_tokens"] > 0 for s in stats[2:4]) and all(s["reused_tokens"] == 0 for s in stats[4:])
    prompts = [s["prompt_tokens"] for s in stats]
    assert prompts[4] > prompts[2] > prompts[0]  # the checkpointer brought the messages back
    assert "-- restarted --" in capsys.readouterr().out


@pytest.mark.fast
def test_plain_loop(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    messages = load("plain_loop").main([], engine=engine)
    quotes = [message["content"] for message in messages if message["role"] == "assistant"]
    assert len(quotes) == 2 and all(re.match(r"[A-Za-z0-9 ,.:/_-]+$", quote) for quote in quotes)
    assert [line[:7] for line in capsys.readouterr().out.splitlines()] == ["call 0:", "call 1:"]


@pytest.mark.fast
def test_existing_agent(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = load("existing_agent").main([], engine=engine)
    assert text and text in capsys.readouterr().out
    source = (EXAMPLES / "existing_agent.py").read_text()
    assert source.count("# changed: ") == 2


@pytest.mark.fast
def test_openai_client(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = Running(engine)
    messages = load("openai_client").main(["--base-url", f"{server.url}/v1"])
    server.stop()
    assert [m["role"] for m in messages] == ["system", *["user", "assistant", "tool", "assistant"] * 2]
    reused = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens reused", capsys.readouterr().out)]
    assert len(reused) == 4 and reused[0] == 0 and all(n > 0 for n in reused[1:])


@pytest.mark.fast
def test_every_example_is_run_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names <= {name.removeprefix("test_") for name in globals() if name.startswith("test_")}


@pytest.mark.ci
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "command",
    [["langchain_agent.py", "--compare"], ["langgraph_threads.py"], ["plain_loop.py"], ["existing_agent.py"]],
    ids=lambda command: command[0],
)
def test_on_smollm2(command: list[str]) -> None:
    needs_the_wheel()
    done = run_python(str(EXAMPLES / command[0]), *command[1:])
    if "--compare" in command:
        assert "the same text: True" in done.stdout and done.stdout.count("7 calls") == 2


_README_PROGRAM_ENDS = """
quote("words.txt")
answer = agent.invoke({"messages": [{"role": "user", "content": "Say hello."}]}, {"recursion_limit": 4})
print("answered:", answer["messages"][1].type)
"""


@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_the_readmes_plain_loop_and_langchain_agent_are_one_program(tmp_path: Path) -> None:
    """Its Python blocks, run one after the other as a reader does, then called."""
    needs_the_wheel()
    readme = (ROOT / "README.md").read_text()
    blocks = [
        block
        for heading in ("In a plain loop", "In LangChain")
        for block in re.findall(r"```python\n(.*?)```", readme.split(f"## {heading}\n")[1].split("\n## ")[0], re.S)
    ]
    assert len(blocks) == 2
    (tmp_path / "program.py").write_text("\n".join(blocks) + _README_PROGRAM_ENDS)
    (tmp_path / "words.txt").write_text("The river runs past the mill. In spring the water is high.")
    done = run_python("program.py", directory=tmp_path)
    assert re.search(r"^[1-9]\d* tokens in [1-9]\d* steps$", done.stdout, re.M)
    assert "answered: ai" in done.stdout
