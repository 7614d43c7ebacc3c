#!/usr/bin/env python3
"""Set up the virtual environment with the real SGLang 0.5.23 on a CPU, and the models for its tests.

    python tests/sglang/setup_venv.py            about 2 to 7 minutes and 2.8 GB the first time, nothing
    after that

It lies outside the tree, at $AGENTSPEC_SGLANG_VENV, by default ~/.cache/agentspec/sglang-venv. It is made
anew when requirements.txt or this file has changed. Needs Python 3.11. Prints the path of its interpreter at
the end.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SGLANG = "0.5.23"
TORCH = "2.13.0"
TORCHVISION = "0.28.0"  # imported only; rig/sitecustomize.py lets it import beside a CPU torch


def venv_path() -> Path:
    given = os.environ.get("AGENTSPEC_SGLANG_VENV")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "agentspec" / "sglang-venv"


def python_path() -> Path:
    return venv_path() / "bin" / "python"


def models_path() -> Path:
    return venv_path() / "agentspec-models"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def models_ready() -> bool:
    stamp = models_path() / "stamp"
    return stamp.exists() and stamp.read_text() == _digest(HERE / "make_models.py")


def _stamp() -> str:
    parts = [(HERE / "requirements.txt").read_bytes(), SGLANG.encode(), TORCHVISION.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def ready() -> bool:
    stamp = venv_path() / "agentspec-stamp"
    return python_path().exists() and stamp.exists() and stamp.read_text() == _stamp()


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(HERE / "rig"), "OMP_NUM_THREADS": "1"}
    subprocess.run([str(c) for c in command], check=True, env=environment)


def _python311() -> str:
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        sys.exit(f"needed Python 3.11 for SGLang {SGLANG}: run this script with it, or put python3.11 on the PATH")
    return found


def _install_torch(pip: list[str | Path]) -> None:
    """The CPU build where one is to be had from the configured sources; else PyPI's, which may be large."""
    try:
        _run(*pip, "--retries", "1", f"torch=={TORCH}+cpu")
    except subprocess.CalledProcessError:
        print("No CPU build of torch at hand: PyPI's may bring several GB of CUDA libraries.", flush=True)
        _run(*pip, f"torch=={TORCH}")


def main() -> None:
    where = venv_path()
    if not ready():
        began = time.monotonic()
        print(f"Setting up SGLang {SGLANG} for CPU tests at {where}: a few minutes, about 2.8 GB.", flush=True)
        _run(_python311(), "-m", "venv", "--clear", where)
        pip: list[str | Path] = [python_path(), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _install_torch(pip)
        _run(*pip, "-r", HERE / "requirements.txt")
        _run(*pip, "--no-deps", f"torchvision=={TORCHVISION}", f"sglang=={SGLANG}")
        (where / "agentspec-stamp").write_text(_stamp())
        print(f"done in {time.monotonic() - began:.0f} s", flush=True)
    if not models_ready():
        _run(python_path(), HERE / "make_models.py", models_path())
        (models_path() / "stamp").write_text(_digest(HERE / "make_models.py"))
    print(python_path())


if __name__ == "__main__":
    main()
