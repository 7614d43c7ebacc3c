"""kernel(): numba's njit as agentspec uses it: compiled at import, without the GIL, cached on disk, never
silently.

Used by memory, drafting and the embedded engine. May import numba. Compiled code is kept beside the source, else
in the user's cache directory, else (both read-only, as in many containers) in a private directory under the
system's temporary one, else nowhere; NUMBA_CACHE_DIR comes before all of these. A compilation that takes longer
than a moment says so on stderr, once; AGENTSPEC_QUIET=1 silences it. With NUMBA_DISABLE_JIT=1 the kernels run as
the plain Python they are written in.

The code of a module lies in a directory named after everything it is made of. numba's own names tell neither
numba's version nor what a kernel calls in other files: two environments on one checkout would load each other's
code if they compile at the same time, and a `git pull` would leave the old callee in the new caller.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import inspect
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite
import llvmlite.binding
import numba
import numpy as np
from numba import njit

__all__ = ["code_name", "kernel", "kernel_report"]

config: Any = numba.config

F = TypeVar("F", bound=Callable[..., Any])

# Loading all kernels from the cache takes half of this, compiling them ten times as much. Processor time, so
# that a busy machine isn't taken for a compilation.
_NOTICE_AFTER_SECONDS = 1.2
_LOOK_EVERY_SECONDS = 0.2


class _Progress:
    """What kernel() has done in this process, and the notice about it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seconds = 0.0
        self.processor_seconds = 0.0
        self.kernels = 0
        self.from_cache = 0
        self.uncached = 0
        self.cache_directory = ""
        self.announced = False

    def watch(self, done: threading.Event) -> None:
        """Announce the work under way, if it turns out to be more than loading."""
        started = time.process_time()
        while not done.wait(_LOOK_EVERY_SECONDS):
            if self.processor_seconds + time.process_time() - started > _NOTICE_AFTER_SECONDS:
                self.announce()
                return

    def announce(self) -> None:
        with self.lock:
            if self.announced or os.environ.get("AGENTSPEC_QUIET", "") not in ("", "0"):
                return
            self.announced = True
        print(
            "agentspec: compiling its kernels for this machine (once, up to half a minute; later starts load them)",
            file=sys.stderr,
            flush=True,
        )


_progress = _Progress()
_numbas_setting = threading.RLock()  # config.CACHE_DIR: two threads may import modules with kernels at once


def kernel(signature: Any, *, callback: bool = False, **flags: Any) -> Callable[[F], F]:
    """Decorator: compile a plain function over arrays for `signature`, now.

    signature: numba's notation, as a string or a list of them. The compiled function releases the GIL.
    callback:  a C function instead, for native code to call at its `.address`
    flags:     more of numba's options
    """

    def decorate(function: F) -> F:
        if config.DISABLE_JIT:
            return function
        started, processor_started = time.perf_counter(), time.process_time()
        done = threading.Event()
        threading.Thread(target=_progress.watch, args=(done,), daemon=True).start()
        try:
            compiled: F = _compile(signature, function, callback, flags)
        finally:
            done.set()
            _progress.seconds += time.perf_counter() - started
            _progress.processor_seconds += time.process_time() - processor_started
        _progress.kernels += 1
        return compiled

    return decorate


def kernel_report() -> dict[str, Any]:
    """For doctors: kernels ready, how many came from the disk cache, seconds spent, where the cache is."""
    return {
        "compiled": not config.DISABLE_JIT,
        "kernels": _progress.kernels,
        "from_cache": _progress.from_cache,
        "uncached": _progress.uncached,
        "seconds": round(_progress.seconds, 3),
        "cache_directory": _progress.cache_directory,
    }


def _compile(signature: Any, function: Any, callback: bool, flags: dict[str, Any]) -> Any:
    decorator: Any = numba.cfunc if callback else functools.partial(njit, nogil=True)
    with _numbas_setting:
        kept = config.CACHE_DIR
        for place in (_chosen, _beside_the_source, _users, _private):
            try:
                directory = os.path.join(place(function), code_name(function.__module__))
                os.makedirs(directory, exist_ok=True)
                # Where it can't write numba looks for a place by itself.
                tempfile.TemporaryFile(dir=directory).close()
                config.CACHE_DIR = directory
                compiled = decorator(signature, cache=True, **flags)(function)
            except Exception:  # no place to cache in, or a damaged cache: try the next place, at last none
                continue
            finally:
                config.CACHE_DIR = kept
            if callback:
                hits = bool(compiled.cache_hits)
            else:
                hits = bool(sum(compiled.stats.cache_hits.values()))
                _progress.cache_directory = str(compiled.stats.cache_path)
            _progress.from_cache += hits
            if not hits:
                _tidy(directory)
            return compiled
    _progress.uncached += 1
    return decorator(signature, **flags)(function)


# What numba compiles differently by.
_SETTINGS = ("BOUNDSCHECK", "CPU_FEATURES", "CPU_NAME", "DEBUGINFO_DEFAULT", "ENABLE_AVX", "LOOP_VECTORIZE", "OPT")
_KEPT = 8  # directories of one module: other versions of it, of numba and of Python


@functools.cache
def code_name(module: str) -> str:
    """The directory of a module's compiled code: its name and a digest of all that the code is made of: this module and
    those of ours that it has something from, numba, the machine."""
    digest = hashlib.blake2b(digest_size=12)
    machine = (llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
    digest.update(repr((machine, versions, [getattr(config, name, None) for name in _SETTINGS])).encode())
    _add_sources(digest, module, set())
    return f"kernels-{module}-{digest.hexdigest()}"


def _add_sources(digest: Any, module: str, seen: set[str]) -> None:
    """Add a module's source, the numbers among its globals (it may have them from elsewhere), and the same of the
    modules of ours whose functions it holds.
    """
    seen.add(module)
    names = vars(sys.modules[module])
    with open(names["__file__"], "rb") as file:
        digest.update(file.read())
    for name, value in sorted(names.items()):
        if isinstance(value, np.ndarray):
            digest.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
        elif _is_number(value) or (isinstance(value, tuple) and all(map(_is_number, value))):
            digest.update(f"{name} {value!r}".encode())
        elif not isinstance(value, type):
            # a module itself, or a kernel, an intrinsic, a function by the module that it is from
            other = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if (
                isinstance(other, str)
                and _package(other) in (_package(module), _package(__name__))
                and other not in seen
            ):
                _add_sources(digest, other, seen)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, np.number, np.bool_))


def _tidy(directory: str) -> None:
    """Drop what older versions of the module have left behind."""
    place, name = os.path.split(directory)
    versions = glob.glob(os.path.join(glob.escape(place), f"{name.rpartition('-')[0]}-*"))
    try:
        versions.sort(key=os.path.getmtime)
    except OSError:
        return  # another process is at it
    for version in versions[:-_KEPT]:
        shutil.rmtree(version, ignore_errors=True)


def _chosen(function: Any) -> str:
    if not config.CACHE_DIR:
        raise OSError("NUMBA_CACHE_DIR is not set")
    return str(config.CACHE_DIR)


def _beside_the_source(function: Any) -> str:
    return os.path.join(os.path.dirname(inspect.getfile(function)), "__pycache__")


def _users(function: Any) -> str:
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("agentspec"), "kernels")


def _private(function: Any) -> str:
    """A directory for compiled code that nobody else can write to. Raises OSError if there can be none.

    Cached code is executed: a directory that another user could have made or can write to is never used.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = os.path.join(tempfile.gettempdir(), f"agentspec-kernels-{user}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{path} is no directory")
    if hasattr(os, "getuid") and (status.st_uid != user or status.st_mode & 0o077):
        raise OSError(f"{path} is open to others")
    return path
