"""The environment variable, the widths, the backends, the diagnosis."""

from __future__ import annotations

import json

import pytest
from sglang_agentspec import diagnosis
from sglang_agentspec.backends import tree_width
from sglang_agentspec.drafter import padded_curve
from sglang_agentspec.settings import VARIABLE, PluginSettings

from agentspec.errors import InvalidRequestError, UnknownOptionError

pytestmark = pytest.mark.fast


def read(value: object) -> PluginSettings:
    return PluginSettings.from_environment({VARIABLE: value if isinstance(value, str) else json.dumps(value)})


def test_defaults_and_values() -> None:
    assert PluginSettings.from_environment({}) == PluginSettings()
    settings = read({"memory_mb": 5, "widths": [4, 8], "cost_curve": {"1": 1, "8": 1.2}})
    assert settings.verify_widths(16) == (4, 8, 16)
    assert settings.curve("cuda")(8) == pytest.approx(1.2)


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[]",
        "3",
        {"memory_mb": 0},
        {"memory_mb": "x"},
        {"widths": 3},
        {"widths": ["x"]},
        {"cost_curve": {"2": 1}},
        {"cost_curve": [1]},
    ],
)
def test_what_cannot_be_used_names_the_variable(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=VARIABLE):
        read(value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="colour"):
        read({"colour": 1})


def test_widths() -> None:
    assert PluginSettings().verify_widths(16) == (2, 4, 8, 16)
    assert PluginSettings().verify_widths(12) == (2, 4, 8, 12)
    assert PluginSettings().verify_widths(2) == (2,)
    with pytest.raises(InvalidRequestError):
        PluginSettings(widths=(32,)).verify_widths(16)


def test_a_step_costs_what_its_width_costs() -> None:
    raw = PluginSettings(cost_curve={1: 1.0, 16: 4.0}).curve("cpu")
    padded = padded_curve(raw, (4, 16))
    assert [padded(n) for n in (1, 2, 4)] == pytest.approx([1.0, raw(4), raw(4)])
    assert [padded(n) for n in (5, 9, 16)] == pytest.approx([raw(16)] * 3)
    batch = padded.at_batch(8)
    assert batch(1) == 1.0
    assert batch(3) == pytest.approx(raw(32) / raw(8))
    assert padded.at_batch(8) is batch


def choose(wanted: bool | None = None, **options: object) -> int:
    given = {
        "attention": "flashinfer",
        "prefill": None,
        "decode": None,
        "verify_on_prefill": True,
        "page_size": 1,
        **options,
    }
    return tree_width(wanted, **given)  # type: ignore[arg-type]


def test_trees_only_where_the_mask_is_honoured() -> None:
    assert choose() > 1
    assert choose(page_size=16) > 1
    assert choose(attention="triton") > 1
    assert choose(attention="triton", page_size=16) == 1
    assert choose(attention="fa3", page_size=64) == 1
    assert choose(attention="trtllm_mha") == 1
    assert choose(attention="some_new_one") == 1
    assert choose(False) == 1
    # of two backends the one that verifies decides
    assert choose(prefill="fa3", decode="trtllm_mha") > 1
    assert choose(prefill="fa3", decode="trtllm_mha", verify_on_prefill=False) == 1


def test_what_would_be_wrong_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="page"):
        choose(True, attention="triton", page_size=16)
    with pytest.raises(InvalidRequestError, match="torch_native"):
        choose(attention="torch_native")
    assert choose(True, attention="torch_native") > 1  # the operator vouches for it


def test_diagnosis_names_a_remedy_for_each_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "installed_sglang", lambda: "0.5.22")
    monkeypatch.setenv(VARIABLE, "{")
    findings = {f.name: f for f in diagnosis.diagnose()}
    assert not findings["sglang"].ok and "0.5.23" in findings["sglang"].remedy
    assert not findings[VARIABLE].ok
    assert "plugin loads" not in findings  # nothing is started while something else is amiss
    for finding in findings.values():
        assert finding.ok or finding.remedy


def test_diagnosis_of_a_plugin_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "AGENTSPEC is not available: could not be registered: ImportError('x')"
    monkeypatch.setattr(diagnosis, "_LOAD", f"print({said!r})")
    finding = diagnosis._load()
    assert not finding.ok and finding.found == said and finding.remedy
