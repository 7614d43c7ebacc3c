"""A chain of eight calls in one process, `sglang.Engine` and the plugin: text, memory, steps."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from tests.sglang.server import environment, models_path
from tests.sglang.setup_venv import python_path

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900), pytest.mark.usefixtures("sglang_ready")]

_CHAIN = """
import json, sys
from sglang import Engine

def main(algorithm):
    options = dict(
        model_path=sys.argv[2], device="cpu", dtype="float32", attention_backend="torch_native",
        sampling_backend="pytorch", disable_cuda_graph=True, disable_overlap_schedule=True,
        max_running_requests=4, max_total_tokens=16000, context_length=4096, log_level="error",
    )
    if algorithm != "none":
        options["speculative_algorithm"] = algorithm
    engine = Engine(**options)
    history, calls = list(range(100, 220)), []
    for call in range(8):
        answer = engine.generate(
            input_ids=history, sampling_params={"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        )
        meta = answer["meta_info"]
        calls.append({
            "ids": answer["output_ids"], "steps": meta.get("spec_verify_ct"),
            "told": (meta.get("agentspec") or [None])[0],
        })
        history = history + answer["output_ids"] + list(range(300, 310)) + history[20:60]
    engine.shutdown()
    print("RESULT" + json.dumps(calls))

if __name__ == "__main__":
    main(sys.argv[1])
"""


def chain(folder: Path, algorithm: str) -> list[dict[str, object]]:
    script = folder / "chain.py"
    script.write_text(_CHAIN)
    done = subprocess.run(
        [str(python_path()), str(script), algorithm, str(models_path() / "tiny")],
        env=environment(folder, AGENTSPEC_SGLANG='{"trees": true}'),
        capture_output=True,
        text=True,
        timeout=600,
    )
    line = next((s for s in done.stdout.splitlines() if s.startswith("RESULT")), None)
    assert line is not None, (done.stdout + done.stderr)[-4000:]
    return list(json.loads(line[len("RESULT") :]))


def test_a_chain_of_eight_calls_in_process(tmp_path: Path) -> None:
    plain = chain(tmp_path, "none")
    ours = chain(tmp_path, "AGENTSPEC")
    assert [c["ids"] for c in ours] == [c["ids"] for c in plain]
    assert len({c["told"]["trajectory"] for c in ours}) == 1  # type: ignore[index]
    held = [c["told"]["held_tokens"] for c in ours]  # type: ignore[index]
    assert held[0] == 0 and all(b > a for a, b in itertools.pairwise(held))
    steps = [c["steps"] for c in ours]
    assert sum(steps) < 8 * 39  # type: ignore[arg-type]


_CLIENT = """
import asyncio, json, sys
from sglang import Engine
import agentspec
from agentspec.errors import InvalidRequestError, RequestAbortedError

def request(ids, **options):
    return agentspec.GenerationRequest(**{"input_ids": ids, "max_tokens": 40, "ignore_eos": True, **options})

def main():
    raw = Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", attention_backend="torch_native",
        sampling_backend="pytorch", disable_cuda_graph=True, disable_overlap_schedule=True,
        max_running_requests=4, max_total_tokens=16000, context_length=4096, log_level="error",
        speculative_algorithm="AGENTSPEC",
    )
    prompt, told = list(range(100, 220)), {}
    before = raw.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 40, "ignore_eos": True})
    told["raw"] = before["output_ids"]
    with agentspec.SGLangEngine(engine=raw) as engine:
        told["plugin"] = engine.info.plugin
        with agentspec.trajectory("inside"):
            got = [engine.generate(request(prompt)).result() for _ in range(2)]
        told["ids"] = [list(g.token_ids) for g in got]
        told["steps"] = [g.stats.verify_steps for g in got]
        told["streamed"] = [i for chunk in engine.generate(request(prompt)) for i in chunk.token_ids]
        async def awaited():
            return (await engine.generate(request(prompt, n=2)).aresults())[1].token_ids
        told["awaited"] = list(asyncio.run(awaited()))
        call = engine.generate(request(prompt, max_tokens=3000))
        next(call)
        call.abort()
        try:
            list(call)
        except RequestAbortedError as error:
            told["aborted"] = len(error.partial.token_ids)
        try:
            engine.generate(request(prompt, max_tokens=5000))
        except InvalidRequestError as error:
            told["refused"] = type(error).__name__
        told["chat"] = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=8, ignore_eos=True).result().text
    after = raw.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 40, "ignore_eos": True})
    told["after"] = after["output_ids"]
    raw.shutdown()
    print("RESULT" + json.dumps(told))

if __name__ == "__main__":
    main()
"""


def test_the_client_in_process(tmp_path: Path) -> None:
    """SGLangEngine(engine=sglang.Engine(...)) says and does what it does over HTTP, and gives the Engine back."""
    script = tmp_path / "client.py"
    script.write_text(_CLIENT)
    done = subprocess.run(
        [str(python_path()), str(script), str(models_path() / "tiny")],
        env=environment(tmp_path, AGENTSPEC_SGLANG='{"trees": true}'),
        capture_output=True,
        text=True,
        timeout=800,
    )
    line = next((s for s in done.stdout.splitlines() if s.startswith("RESULT")), None)
    assert line is not None, (done.stdout + done.stderr)[-4000:]
    told = json.loads(line[len("RESULT") :])
    assert told["plugin"] is True
    assert told["ids"] == [told["raw"]] * 2 and told["after"] == told["raw"]
    assert told["streamed"] == told["awaited"] == told["raw"]
    assert told["steps"][1] < 20
    assert told["aborted"] >= 1 and told["refused"] == "ContextLengthError" and told["chat"]
