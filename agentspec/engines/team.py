"""Team: threads for native code of ours, torch's own OpenMP threads where they can be had. Called by forward_cpu.py,
linear.py and kernels.py.

Between two linears torch's threads spin for a while, waiting for the next one. Threads of our own would fight them
for the cores and lose (a step has 30 layers of a millisecond each); so what is ours runs on the same threads, by the
entry point that the compiler itself uses for a parallel region. Without it (other systems' OpenMP) a pool of threads
stands in.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["Team", "ThreadTeam", "torch_team"]


class Team:
    """`threads` threads, the calling one included."""

    def __init__(self, parallel: Any, threads: int) -> None:
        self._parallel = parallel
        self.threads = threads

    def run(self, function: int, argument: int) -> None:
        """Call the native void function(void *) at an address once on each thread; returns when all have."""
        self._parallel(function, argument, self.threads, 0)


class ThreadTeam(Team):
    """Threads of our own. A call costs some tens of microseconds: more than OpenMP's, little beside the work."""

    def __init__(self, threads: int) -> None:
        super().__init__(self._share, threads)
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="agentspec-team")

    def _share(self, function: int, argument: int, threads: int, _: int) -> None:
        native = _NATIVE(function)
        others = []
        with contextlib.suppress(RuntimeError):  # the main thread has ended, pools take no more: this one does it all
            for _ in range(threads - 1):
                others.append(self._pool.submit(native, argument))
        native(argument)
        for other in others:
            if not other.cancel():  # it has begun; one that hasn't would find nothing left to do
                other.result()


_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def torch_team() -> Team | None:
    """As many threads as torch.get_num_threads() says; None for one thread."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1:
        return None
    parallel = _parallel()
    return Team(parallel, threads) if parallel is not None else _threads(threads, os.getpid())


@functools.cache
def _threads(threads: int, process: int) -> ThreadTeam:
    """One pool a process: a forked child has none of its parent's threads."""
    return ThreadTeam(threads)


@functools.cache
def _parallel() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP library that torch uses; None if not found."""
    if not sys.platform.startswith("linux"):
        return None
    import torch

    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    except OSError:
        return None
    libraries = {path for path in loaded if os.path.basename(path).startswith(("libgomp", "libiomp5"))}
    home = os.path.dirname(os.path.abspath(torch.__file__))
    own = {path for path in libraries if path.startswith((home, f"{home}.libs"))}
    chosen = own or libraries
    if len(chosen) != 1:
        return None  # which of them torch runs on can't be told
    try:
        parallel = ctypes.CDLL(chosen.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel
