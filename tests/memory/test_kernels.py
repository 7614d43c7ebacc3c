"""Kernels: the same source as plain Python; compiled code finds a place to be kept in, and says so once."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.memory import kernels

ROOT = Path(__file__).parents[2]
USE = (
    "from agentspec.memory import TrajectoryMemory\n"
    "from agentspec.memory.kernels import kernel_report\n"
    "m = TrajectoryMemory(); c = m.extend([1, 2, 3, 1, 2])\n"
    "assert m.match(c).copy(0, 3)[0].tolist() == [3, 1, 2]\n"
    "r = kernel_report(); print(r['kernels'], r['from_cache'], r['uncached'], r['cache_directory'])\n"
)


def run(code: str, package: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "AGENTSPEC_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        cwd=package,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that has never been compiled."""
    shutil.copytree(ROOT / "agentspec", tmp_path / "agentspec", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.ci
def test_compiled_once_with_a_notice_and_then_loaded_without(package: Path) -> None:
    first = run(USE, package, NUMBA_CACHE_DIR=str(package / "cache"))
    assert first.returncode == 0, first.stderr
    assert "compiling its kernels" in first.stderr and first.stderr.count("\n") == 1
    kernels_, cached, uncached, directory = first.stdout.split()
    assert int(kernels_) >= 10 and cached == uncached == "0" and directory.startswith(str(package / "cache"))
    second = run(USE, package, NUMBA_CACHE_DIR=str(package / "cache"))
    assert second.stderr == "" and second.stdout.split()[:3] == [kernels_, kernels_, "0"]
    # Damaged cache files are no more than a reason to compile again.
    for file in (package / "cache").rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:20])
    third = run(USE, package, NUMBA_CACHE_DIR=str(package / "cache"), AGENTSPEC_QUIET="1")
    assert third.returncode == 0 and third.stderr == "" and third.stdout.split()[0] == kernels_


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_where_nothing_can_be_written_a_private_directory_serves(package: Path, tmp_path: Path) -> None:
    """A file stands where the caches' directories would be: numba finds no place, as on a read-only disk."""
    (package / "agentspec" / "memory" / "__pycache__").write_text("")
    home = package / "home"
    home.write_text("")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TMPDIR": str(scratch),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    first = run(USE, package, **environment)
    assert first.returncode == 0, first.stderr
    directory = scratch / f"agentspec-kernels-{os.getuid()}"
    assert first.stdout.split()[2] == "0" and first.stdout.split()[3].startswith(str(directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    second = run(USE, package, **environment)
    assert second.stderr == "" and second.stdout.split()[1] == second.stdout.split()[0]
    # Others can write to it: what lies there could be anybody's code, and isn't loaded.
    directory.chmod(0o777)
    third = run(USE, package, **environment)
    assert third.returncode == 0 and third.stdout.split()[1] == "0" and int(third.stdout.split()[2]) > 0


@pytest.mark.fast
def test_a_private_directory_that_is_not_ours_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.tempfile, "gettempdir", lambda: str(tmp_path))
    path = Path(kernels._private_directory())
    assert path.is_dir() and stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    assert kernels._private_directory() == ""
    path.rmdir()
    path.symlink_to(tmp_path)
    assert kernels._private_directory() == ""
    path.unlink()
    path.write_text("")
    assert kernels._private_directory() == ""
    monkeypatch.setattr(kernels.tempfile, "gettempdir", lambda: str(path))  # a file: nothing can be made in it
    assert kernels._private_directory() == ""


@pytest.mark.fast
def test_plain_python_runs_the_same_source() -> None:
    """The oracle's comparisons and the state machine with NUMBA_DISABLE_JIT=1, overflow being an error."""
    tests = ["test_index.py", "test_trajectory.py", "test_machine.py"]
    slow = "million or table_grows or 200_calls or every_process or equal or threads"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + [str(ROOT / "tests" / "memory" / name) for name in tests]
        + ["-k", f"not ({slow})"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "AGENTSPEC_EXAMPLES": "3"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    probe = run(USE, ROOT, NUMBA_DISABLE_JIT="1")
    assert probe.stdout.split()[:1] == ["0"], probe.stderr
