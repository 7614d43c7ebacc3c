"""What has to be refused at the start, by the real SGLang: the server ends, and says what to do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import OPTIONS, environment, models_path
from tests.sglang.setup_venv import python_path

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600), pytest.mark.usefixtures("sglang_ready")]

# SGLang resolves its arguments and runs every check of an algorithm before it loads anything: that much is
# enough. One process for all cases, since importing SGLang takes longest.
_RESOLVE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
results = []
for settings, arguments in json.loads(sys.stdin.read()):
    os.environ["AGENTSPEC_SGLANG"] = settings
    try:
        prepare_server_args(arguments).resolve_once()
        results.append("resolved")
    except BaseException as error:
        results.append(f"{type(error).__name__}: {error}")
print("RESULTS" + json.dumps(results))
"""
_SETTINGS = '{"trees": true}'


def resolve(folder: Path, cases: list[tuple[str, dict[str, Any]]], before: str = "") -> list[str]:
    """What SGLang's argument resolution makes of AGENTSPEC with each (settings, options): "resolved", or the
    error."""
    given = []
    for settings, options in cases:
        chosen = {**OPTIONS, "speculative-algorithm": "AGENTSPEC", "model-path": str(models_path() / "tiny")}
        chosen.update({k.replace("_", "-"): v for k, v in options.items()})
        arguments: list[str] = []
        for name, value in chosen.items():
            arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        given.append((settings, arguments))
    done = subprocess.run(
        [str(python_path()), "-c", before + _RESOLVE],
        input=json.dumps(given),
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=500,
    )
    line = next((s for s in done.stdout.splitlines() if s.startswith("RESULTS")), None)
    assert line is not None, (done.stdout + done.stderr)[-3000:]
    return list(json.loads(line[len("RESULTS") :]))


def test_what_is_refused_names_the_remedy(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (_SETTINGS, {}, "resolved"),
        (_SETTINGS, {"speculative_accept_threshold_single": 0.5}, "threshold-single below 1"),
        (_SETTINGS, {"speculative_accept_threshold_acc": 0.5}, "threshold-acc below 1"),
        (_SETTINGS, {"speculative_num_draft_tokens": 1}, "2 at least"),
        (_SETTINGS, {"speculative_ngram_external_corpus_path": "x"}, "send seeds with a request"),
        (_SETTINGS, {"page_size": 16}, "only flashinfer takes them"),
        (_SETTINGS, {"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ('{"trees": null}', {}, "torch_native attention has no verify step"),
        ('{"colour": 1}', {}, "AGENTSPEC_SGLANG: unknown settings"),
        ('{"widths": [64]}', {}, "widths: needed"),
        ('{"memory_mb": 0}', {}, "memory_mb: needed"),
        (_SETTINGS, {}, "resolved"),
    ]
    results = resolve(tmp_path, [(settings, options) for settings, options, _ in cases])
    for (settings, options, said), result in zip(cases, results, strict=True):
        assert said in result, (settings, options, result)


def test_another_sglang_is_refused_by_name(tmp_path: Path) -> None:
    before = "import sglang_agentspec as p\np.installed_sglang = lambda: '0.5.24'\n"
    [result] = resolve(tmp_path, [(_SETTINGS, {})], before)
    assert "AGENTSPEC is not available: needed SGLang 0.5.23, found 0.5.24" in result


def test_a_plugin_that_breaks_is_refused_by_name(tmp_path: Path) -> None:
    """SGLang only logs a plugin that raises; ours then stands for itself with an algorithm that refuses."""
    before = "import sys\nsys.modules['sglang_agentspec.internals'] = None\n"
    [result] = resolve(tmp_path, [(_SETTINGS, {})], before)
    assert "AGENTSPEC is not available: could not be registered" in result


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "True plugin loads AGENTSPEC is registered"),
        ({"SGLANG_PLUGINS": "other"}, "False SGLANG_PLUGINS other"),
    ],
)
def test_diagnosis_in_sglangs_environment(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    code = "from sglang_agentspec.diagnosis import diagnose\nfor f in diagnose(): print(f.ok, f.name, f.found)"
    done = subprocess.run(
        [str(python_path()), "-c", code],
        env={**environment(tmp_path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "True sglang 0.5.23" in done.stdout
    assert "True plugin entry point agentspec = sglang_agentspec:register" in done.stdout
    assert said in done.stdout, done.stdout
