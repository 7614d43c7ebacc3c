"""Whether the plugin can work here, and if not, what mends it: for `agentspec doctor`.

Looks at what is installed and at the environment; starts no server and imports no sglang.
"""

from __future__ import annotations

import os
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


def diagnose() -> list[Finding]:
    """Everything that decides whether `--speculative-algorithm AGENTSPEC` works on this machine."""
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
    return findings
