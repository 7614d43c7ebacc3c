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
from tests.sglang.setup_venv import python_path

ROOT = Path(__file__).parents[2]
USE = (
    "from agentspec.memory import TrajectoryMemory\n"
    "from agentspec.memory.kernels import kernel_report\n"
    "m = TrajectoryMemory(); c = m.extend([1, 2, 3, 1, 2])\n"
    "assert m.match(c).copy(0, 3)[0].tolist() == [3, 1, 2]\n"
    "r = kernel_report(); print(r['kernels'], r['from_cache'], r['uncached'], r['cache_directory'])\n"
)


def run(code: str, package: Path, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "AGENTSPEC_", "PYTHON"))}
    return subprocess.run(
        [python, "-W", "error::RuntimeWarning", "-c", code],
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
    path = Path(kernels._private(None))
    assert path.is_dir() and stat.S_IMODE(path.stat().st_mode) == 0o700

    def refused() -> bool:
        with pytest.raises(OSError):
            kernels._private(None)
        return True

    path.chmod(0o755)
    assert refused()
    path.rmdir()
    path.symlink_to(tmp_path)
    assert refused()
    path.unlink()
    path.write_text("")
    assert refused()
    monkeypatch.setattr(kernels.tempfile, "gettempdir", lambda: str(path))  # a file: nothing can be made in it
    assert refused()


CALLEE = """
from probe.kernels import kernel
ADDED = 1
@kernel("int64(int64[::1], int64)")
def take(values, place):
    return values[place] + ADDED
"""
CALLER = """
from probe.callee import take
from probe.kernels import kernel
@kernel("int64(int64[::1], int64)")
def twice(values, place):
    return 2 * take(values, place)
@kernel(["int64(int64[::1])", "int64(float64[::1])"])
def size(values):
    return len(values)
"""
PROBE = (
    "import numpy as np\n"
    "from probe.caller import size, twice\n"
    "from probe.kernels import kernel_report\n"
    "assert size(np.zeros(3)) == 3 and size(np.zeros(4, np.int64)) == 4\n"
    "print(kernel_report()['from_cache'], end=' ')\n"
    "try: print(twice(np.array([5, 6]), {place}))\n"
    "except IndexError: print('outside')\n"
)


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A package of two modules with kernels, one calling the other's."""
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "__init__.py").write_text("")
    (tmp_path / "probe" / "callee.py").write_text(CALLEE)
    (tmp_path / "probe" / "caller.py").write_text(CALLER)
    shutil.copy(kernels.__file__, tmp_path / "probe" / "kernels.py")
    return tmp_path


@pytest.mark.fast
def test_what_is_loaded_is_made_of_what_is_there(probe: Path) -> None:
    """numba notices a change in the kernel's own file alone: a caller kept the callee that it was compiled with."""

    def printed(place: int = 0, **environment: str) -> str:
        done = run(PROBE.format(place=place), probe, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert printed() == "0 12\n"
    assert printed() == "3 12\n"
    (probe / "probe" / "callee.py").write_text(CALLEE.replace("ADDED = 1", "ADDED = 2"))
    assert printed() == "0 14\n"
    assert printed(7, NUMBA_BOUNDSCHECK="1") == "0 outside\n"
    assert printed(1) == "3 16\n"
    assert printed(1, NUMBA_CACHE_DIR=str(probe / "cache")) == "0 16\n"
    # Versions that nobody needs any more don't pile up.
    for number in range(2 * kernels._KEPT):
        (probe / "probe" / "__pycache__" / f"kernels-probe.callee-{number}").mkdir()
    (probe / "probe" / "callee.py").write_text(CALLEE.replace("ADDED = 1", "ADDED = 3"))
    assert printed() == "0 16\n"
    assert len(list((probe / "probe" / "__pycache__").glob("kernels-probe.callee-*"))) == kernels._KEPT


@pytest.mark.fast
def test_another_numba_has_another_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One checkout, two environments: loading what another numba compiled was seen to abort the process."""

    def name() -> str:
        kernels.code_name.cache_clear()
        return kernels.code_name("agentspec.memory.index")

    ours = name()
    assert name() == ours
    for change in (
        lambda: monkeypatch.setattr(kernels.numba, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(kernels.llvmlite.binding, "get_host_cpu_name", lambda: "another"),
        lambda: monkeypatch.setattr("agentspec.memory.index.LEAD", 17),
    ):
        change()
        assert name() != ours
        monkeypatch.undo()
    kernels.code_name.cache_clear()


@pytest.mark.ci
def test_two_environments_on_one_checkout_keep_their_own(probe: Path) -> None:
    """SGLang's environment has a numba of its own, of the same Python: each finds what it compiled itself."""
    other = python_path()
    if not other.exists():
        pytest.skip("no environment with SGLang: python tests/sglang/setup_venv.py")

    def loaded(python: str) -> list[str]:
        code = "import numba, sys; print(numba.__version__, sys.version_info[:2], end=' ')\n" + PROBE.format(place=0)
        done = run(code, probe, python=python)
        assert done.returncode == 0, done.stderr
        return done.stdout.rsplit(maxsplit=2)

    (ours, first, result), (theirs, second, _) = loaded(sys.executable), loaded(str(other))
    if ours == theirs:
        pytest.skip(f"both have numba and Python {ours}")
    assert result == "12" and first == second == "0"
    assert loaded(sys.executable) == [ours, "3", "12"]
    assert loaded(str(other)) == [theirs, "3", "12"]


@pytest.mark.fast
def test_processes_that_compile_at_the_same_time(probe: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "AGENTSPEC_", "PYTHON"))}
    command = [sys.executable, "-c", PROBE.format(place=0)]
    started = [
        subprocess.Popen(command, cwd=probe, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0 and output.endswith(" 12\n"), errors
    assert run(PROBE.format(place=0), probe).stdout == "3 12\n"


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
