"""`import agentspec` is light: no torch, transformers, langchain or sglang, and under 0.3 s."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fast

_HEAVY = ("torch", "transformers", "langchain_core", "sglang", "numba", "numpy")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy():
    loaded = json.loads(_run("import json, sys, agentspec; print(json.dumps(sorted(sys.modules)))"))
    assert not [name for name in loaded if name.split(".")[0] in _HEAVY]


def test_import_is_fast():
    # The least of five: what else the machine does only adds.
    code = "import time; t = time.perf_counter(); import agentspec; print(time.perf_counter() - t)"
    assert min(float(_run(code)) for _ in range(5)) < 0.3


def test_loop_and_drafting_load_no_torch():
    code = (
        "import json, sys, agentspec.loop, agentspec.drafting, agentspec.memory, agentspec.engines.base, agentspec.chat;"
        "print(json.dumps([n for n in ('torch', 'transformers', 'langchain_core', 'sglang') if n in sys.modules]))"
    )
    assert json.loads(_run(code)) == []


def test_every_public_name_is_there():
    import agentspec

    for name in agentspec.__all__:
        assert getattr(agentspec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = agentspec.nonsense


def test_both_integrations_import():
    import langchain_agentspec
    import sglang_agentspec

    assert langchain_agentspec.__doc__ and sglang_agentspec.__doc__
