"""What has to be refused at the start, by the real SGLang: the server ends, and says what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import OPTIONS, environment, models_path
from tests.sglang.setup_venv import python_path

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600), pytest.mark.usefixtures("sglang_ready")]

# SGLang resolves its arguments and runs every check of an algorithm before it loads anything: that much is
# enough.
_RESOLVE = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
if hasattr(args, "resolve"):
    args.resolve()
print("RESOLVED", type(args).__name__)
"""


def resolve(
    folder: Path, settings: str = '{"trees": true}', before: str = "", **options: Any
) -> tuple[int, str]:
    """(exit status, output) of SGLang's argument resolution with AGENTSPEC chosen."""
    chosen = {
        **OPTIONS,
        "speculative-algorithm": "AGENTSPEC",
        **{k.replace("_", "-"): v for k, v in options.items()},
    }
    command = [str(python_path()), "-c", before + _RESOLVE, "--model-path", str(models_path() / "tiny")]
    for name, value in chosen.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)] if value is not None else []
    done = subprocess.run(
        command,
        env=environment(folder, AGENTSPEC_SGLANG=settings),
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_plain_case_resolves(tmp_path: Path) -> None:
    status, output = resolve(tmp_path)
    assert status == 0 and "RESOLVED" in output, output[-3000:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single below 1"),
        ({"speculative_num_draft_tokens": 1}, "2 at least"),
        ({"settings": '{"trees": null}'}, "torch_native attention has no verify step"),
        ({"settings": '{"colour": 1}'}, "AGENTSPEC_SGLANG: unknown settings"),
        ({"settings": '{"widths": [64]}'}, "widths"),
    ],
)
def test_refused_with_the_remedy(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    status, output = resolve(tmp_path, **change)
    assert status != 0 and said in output, output[-3000:]


def test_another_sglang_is_refused_by_name(tmp_path: Path) -> None:
    before = "import sglang_agentspec as p\np.installed_sglang = lambda: '0.5.24'\n"
    status, output = resolve(tmp_path, before=before)
    assert status != 0
    assert "AGENTSPEC is not available: needed SGLang 0.5.23, found 0.5.24" in output, output[-3000:]


def test_a_plugin_that_breaks_is_refused_by_name(tmp_path: Path) -> None:
    """SGLang only logs a plugin that raises; ours then stands for itself with an algorithm that refuses."""
    before = "import sys\nsys.modules['sglang_agentspec.internals'] = None\n"
    status, output = resolve(tmp_path, before=before)
    assert status != 0 and "AGENTSPEC is not available: could not be registered" in output, output[-3000:]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "True plugin loads AGENTSPEC is registered"),
        ({"SGLANG_PLUGINS": "other"}, "False SGLANG_PLUGINS other"),
    ],
)
def test_diagnosis_in_sglangs_environment(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    code = (
        "from sglang_agentspec.diagnosis import diagnose\nfor f in diagnose(): print(f.ok, f.name, f.found)"
    )
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
