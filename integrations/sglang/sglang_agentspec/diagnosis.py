"""Whether the plugin can work here, and if not, what mends it: for `agentspec doctor`.

Looks at what is installed and at the environment. SGLang only logs a plugin that fails, so the last check
loads all plugins the way its servers do, in a process of its own (some ten seconds), and looks what
AGENTSPEC has become.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from agentspec.errors import AgentSpecError

__all__ = ["ALGORITHM", "SUPPORTED_SGLANG", "Finding", "diagnose", "installed_sglang"]

ALGORITHM = "AGENTSPEC"
SUPPORTED_SGLANG = "0.5.23"
_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. remedy: the command or change that mends it, empty where all is well."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def installed_sglang() -> str | None:
    """The version of the installed SGLang, None if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def diagnose(load: bool = True) -> list[Finding]:
    """Everything that decides whether `--speculative-algorithm AGENTSPEC` works on this machine.

    load: try loading the plugin too, if nothing else is amiss.
    """
    found = installed_sglang()
    findings = [
        Finding(
            "sglang",
            found == SUPPORTED_SGLANG,
            found or "not installed",
            "" if found == SUPPORTED_SGLANG else f"pip install sglang=={SUPPORTED_SGLANG}",
        )
    ]
    ours = [p for p in entry_points(group=_GROUP) if p.value.split(":")[0] == "sglang_agentspec"]
    findings.append(
        Finding(
            "plugin entry point",
            bool(ours),
            ", ".join(f"{p.name} = {p.value}" for p in ours) or f"none in group {_GROUP}",
            "" if ours else "pip install the agentspec-decoding package into SGLang's environment",
        )
    )
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and ours:
        named = any(p.name in allowed for p in ours)
        findings.append(
            Finding(
                "SGLANG_PLUGINS",
                named,
                ",".join(sorted(allowed)),
                "" if named else f"add {ours[0].name} to SGLANG_PLUGINS, or unset it",
            )
        )
    try:
        from sglang_agentspec.settings import VARIABLE, PluginSettings

        PluginSettings.from_environment()
        findings.append(Finding(VARIABLE, True, os.environ.get(VARIABLE) or "not set: defaults"))
    except AgentSpecError as error:
        findings.append(Finding(VARIABLE, False, str(error), f"correct or unset {VARIABLE}"))
    if load and all(finding.ok for finding in findings):
        findings.append(_load())
    return findings


_LOAD = f"""
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_registry import get_spec
print("LOADED", type(get_spec("{ALGORITHM}")).__name__)
"""


def _load() -> Finding:
    name = "plugin loads"
    try:
        done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, "not within 300 s", "look at what SGLang's other plugins do at import")
    if "LOADED AgentSpecAlgorithm" in done.stdout:
        return Finding(name, True, f"{ALGORITHM} is registered")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = next((line for line in lines if f"{ALGORITHM} is not available" in line), lines[-1] if lines else "")
    return Finding(name, False, said, "python -c 'from sglang.srt.plugins import load_plugins; load_plugins()'")
