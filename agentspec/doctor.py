"""`agentspec doctor`: what is here, what is missing, and for each lack the command that mends it.

Called by cli. Imports everything it reports on, each where it is looked at.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import agentspec

__all__ = ["Finding", "add_arguments", "examine", "run"]


@dataclass(slots=True, frozen=True)
class Finding:
    """One line of the report. state: "ok", "note" (works without it) or "missing"; remedy: a command, or ""."""

    subject: str
    state: str
    text: str
    remedy: str = ""


_NEEDED = (
    "torch",
    "transformers",
    "numba",
    "numpy",
    "langchain-core",
    "llguidance",
    "httpx",
    "gguf",
    "accelerate",
    "opentelemetry-sdk",
)

# Works without it: subject, its packages, what they are for, and the command that adds them.
_OPTIONAL = (
    ("serve", ("fastapi", "uvicorn"), "only needed by agentspec serve", "pip install -e '.[serve]'"),
    ("langchain", ("langchain", "langgraph"), "only needed by agents of LangChain", "pip install langchain langgraph"),
    (
        "otlp",
        ("opentelemetry-exporter-otlp-proto-http",),
        "without it spans can't be sent to Jaeger",
        "pip install -e '.[otlp]'",
    ),
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[Finding]:
    findings = [Finding("agentspec", "ok", f"{agentspec.__version__} on Python {platform.python_version()}")]
    for package in _NEEDED:
        version = _version(package)
        if version is None:
            findings.append(Finding(package, "missing", "not installed", f"pip install {package}"))
        else:
            findings.append(Finding(package, "ok", version))
    return findings


def _device() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    threads = f"{torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        from agentspec.engines.forward_cuda import GraphForward

        kinds = ", ".join(GraphForward.KINDS)
        text = (
            f"CUDA: {torch.cuda.get_device_name()}, bfloat16; captured graphs for {kinds}, else transformers' forward"
        )
        return [Finding("device", "ok", f"{text}; {threads}")]
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build, but no GPU is visible"
    return [Finding("device", "ok", f"CPU, float32; {threads}; torch is a {build}")]


def _numba() -> list[Finding]:
    from agentspec.memory import index  # noqa: F401  (its import makes the kernels ready)
    from agentspec.memory.kernels import kernel_report

    report = kernel_report()
    if not report["compiled"]:
        text = "NUMBA_DISABLE_JIT is set: the kernels run as plain Python, slowly"
        return [Finding("kernels", "note", text, "unset NUMBA_DISABLE_JIT")]
    text = f"{report['kernels']} ready in {report['seconds']:.1f} s, {report['from_cache']} from the disk cache"
    if report["uncached"]:
        remedy = "export NUMBA_CACHE_DIR=/a/writable/directory"
        return [Finding("kernels", "note", f"{text}; the cache can't be written, so each start compiles", remedy)]
    return [Finding("kernels", "ok", text)]


def _model() -> list[Finding]:
    from agentspec.engines import conversion, models
    from agentspec.errors import ModelError

    try:
        source = models.find("smollm2")
    except ModelError as error:
        return [Finding("smollm2", "missing", str(error))]
    if source.kind == "hub":
        return [
            Finding(
                "smollm2",
                "missing",
                "the demo's model isn't here; it would be fetched from the Hugging Face hub",
                models.SMOLLM2_COMMAND,
            )
        ]
    converted = models.converted_path(Path(source.location))
    if conversion.damage(converted):
        return [
            Finding(
                "smollm2", "note", "found; the first load converts it, which takes a minute or two", "agentspec demo"
            )
        ]
    return [Finding("smollm2", "ok", f"found and converted, in {_home(converted)}")]


def _home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


def _caches() -> list[Finding]:
    from agentspec.engines import models

    root = models.cache_dir()
    probe = root
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    if not os.access(probe, os.W_OK):
        return [
            Finding(
                "cache",
                "note",
                f"{_home(root)} can't be written: models are converted at each start",
                "export AGENTSPEC_CACHE_DIR=/a/writable/directory",
            )
        ]
    size = sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) if root.exists() else 0
    curves = "v(n) measured" if (root / "cost_curves.json").is_file() else "v(n) is measured at the first load"
    return [Finding("cache", "ok", f"{_home(root)}, {size / 1e6:.0f} MB; {curves}")]


def _sglang() -> list[Finding]:
    if _version("sglang") is None:
        remedy = "pip install -e '.[sglang]'"
        return [Finding("sglang", "note", "not installed: only needed on a GPU server", remedy)]
    from sglang_agentspec.diagnosis import diagnose

    return [Finding(found.name, "ok" if found.ok else "missing", found.found, found.remedy) for found in diagnose()]


def _optional() -> list[Finding]:
    findings = _sglang()
    for subject, packages, use, remedy in _OPTIONAL:
        versions = {package: _version(package) for package in packages}
        absent = [package for package, version in versions.items() if version is None]
        if absent:
            findings.append(Finding(subject, "note", f"{', '.join(absent)} not installed: {use}", remedy))
        else:
            text = ", ".join(f"{package} {version}" for package, version in versions.items())
            findings.append(Finding(subject, "ok", text))
    return findings


def _server(url: str) -> list[Finding]:
    """What a server gives, and doesn't, as SGLangEngine finds it."""
    from agentspec.engines.sglang import SGLangEngine
    from agentspec.errors import AgentSpecError

    try:
        with SGLangEngine(url, api_key=os.environ.get("AGENTSPEC_API_KEY"), connect_timeout=5.0) as engine:
            does = "drafts with AGENTSPEC" if engine.info.plugin else "answers"
            found = [Finding("server", "ok", f"{engine.info.model} by {engine.info.kind} at {url} {does}")]
            return found + [Finding(n.subject, "note", n.text, n.remedy) for n in engine.notices]
    except AgentSpecError as error:
        return [Finding("server", "missing", str(error))]


def examine(url: str | None = None) -> list[Finding]:
    """All findings, in the order of the report. url: of a server to be looked at instead."""
    if url is not None:
        return _server(url)
    return [f for part in (_packages, _device, _numba, _model, _caches, _optional) for f in part()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--url", help="look at this server instead (its key, if it wants one, in AGENTSPEC_API_KEY)")


def run(args: argparse.Namespace) -> int:
    """0 if nothing is missing, else 1."""
    findings = examine(args.url)
    if args.json:
        report: list[dict[str, Any]] = [asdict(f) for f in findings]
        print(json.dumps(report, indent=2))
    else:
        for finding in findings:
            mark = {"ok": "ok", "note": "--", "missing": "!!"}[finding.state]
            print(f"[{mark}] {finding.subject:18} {finding.text}")
            if finding.remedy:
                print(f"     {'':18} {finding.remedy}")
    missing = [f for f in findings if f.state == "missing"]
    if missing:
        print(f"{len(missing)} missing: {', '.join(f.subject for f in missing)}", file=sys.stderr)
    return 1 if missing else 0
