"""kernel(): numba's njit as agentspec uses it: compiled at import, without the GIL, cached on disk, never
silently.

Used by memory, drafting and the embedded engine. May import numba. Compiled code is kept where numba keeps it: beside the source,
else in the user's cache directory, else (both read-only, as in many containers) in a private directory under
the system's temporary one, else nowhere. A compilation that takes longer than a moment says so on stderr,
once; AGENTSPEC_QUIET=1 silences it. With NUMBA_DISABLE_JIT=1 the kernels run as the plain Python they are
written in.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import njit

__all__ = ["kernel", "kernel_report"]

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
            "agentspec: compiling its kernels for this machine (once, some ten seconds; later starts load them)",
            file=sys.stderr,
            flush=True,
        )


_progress = _Progress()


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
    for directory in (None, _private_directory):
        kept = config.CACHE_DIR
        try:
            if directory is not None:
                path = directory()
                if not path:
                    continue
                config.CACHE_DIR = path
            compiled = decorator(signature, cache=True, **flags)(function)
        except Exception:  # no place to cache in, or a damaged cache: try the next place, at last none
            continue
        finally:
            config.CACHE_DIR = kept
        if callback:
            _progress.from_cache += bool(compiled.cache_hits)
        else:
            _progress.from_cache += bool(sum(compiled.stats.cache_hits.values()))
            _progress.cache_directory = str(compiled.stats.cache_path)
        return compiled
    _progress.uncached += 1
    return decorator(signature, **flags)(function)


def _private_directory() -> str:
    """A directory for compiled code that nobody else can write to, or "".

    Cached code is executed: a directory that another user could have made or can write to is never used.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = os.path.join(tempfile.gettempdir(), f"agentspec-kernels-{user}")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            return ""
        if hasattr(os, "getuid") and (status.st_uid != user or status.st_mode & 0o077):
            return ""
    except OSError:
        return ""
    return path
