"""Conversion: a GGUF as a directory with safetensors in agentspec's cache, which loads in under a second; transformers
takes over a minute to read a GGUF itself.

A conversion is used as long as every file in it is as it was written: whoever edits a template there, or runs out of
disk, would otherwise change what the model says, and nobody would see why. Called by models.py. Imports torch and
transformers where they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentspec.errors import ModelLoadError

__all__ = ["Notice", "damage", "ensure", "path_of", "quiet"]

_MARKER = "agentspec-conversion.json"
_FORMAT = 2  # of the marker, and of what _write makes
_LONGEST_S = 1800

Notice = Callable[[str], None]


def _fingerprint(path: Path) -> tuple[int, str]:
    """A file's size and the hash of its first and last 4 MB: all of a small one, of weights the header and the end."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(4 << 20))
        if size > 8 << 20:
            file.seek(-(4 << 20), os.SEEK_END)
        digest.update(file.read())
    return size, digest.hexdigest()


def path_of(gguf: Path, root: Path) -> Path:
    """Where below `root` the conversion of this GGUF is, or would be."""
    size, digest = _fingerprint(gguf)
    return root / f"{gguf.stem}-{size:x}-{digest[:16]}"


def _files(path: Path) -> dict[str, list[Any]]:
    """The fingerprint of each file below path that transformers may read, by its name there."""
    found = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {
        name: list(_fingerprint(file))
        for name, file in found.items()
        if name != _MARKER and not name.startswith(".")  # what a file manager leaves there
    }


def damage(path: Path) -> list[str]:
    """The names of a conversion's files that aren't as they were written, are missing, or were added; [] where it is
    whole, the marker's own where there is none (so also where there is no conversion)."""
    try:
        marker = json.loads((path / _MARKER).read_text(encoding="utf-8"))
        if marker["format"] != _FORMAT:
            return [_MARKER]
        written, found = marker["files"], _files(path)
        return sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return [_MARKER]


def ensure(gguf: Path, path: Path, name: str, announce: Notice) -> None:
    """See to it that path, as path_of gives it, is a whole conversion: nothing is done where it is.

    name: how the user named the model. Raises ModelLoadError with the remedy.
    """
    import filelock

    if not damage(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(str(path) + ".lock")
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            announce(f"another process is converting {gguf.name}; waiting for it")
            lock.acquire(timeout=_LONGEST_S)
        try:
            broken = damage(path)
            if broken and path.exists():
                shown = ", ".join(broken[:3]) + ", ..." * (len(broken) > 3)
                announce(f"the converted model in {path} is damaged ({shown}); converting again")
            if broken:
                _convert(gguf, path, name, announce)
        finally:
            lock.release()
    except filelock.Timeout as error:
        raise ModelLoadError(
            f"model {name!r}: another process has been converting it for {_LONGEST_S} s and isn't done; "
            f"end it, or set AGENTSPEC_CACHE_DIR to another directory ({error})"
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"model {name!r}: the conversion is kept in {path.parent}, which can't be used ({error}); set "
            f"AGENTSPEC_CACHE_DIR to a directory that can be written and has room"
        ) from error


def _convert(gguf: Path, path: Path, name: str, announce: Notice) -> None:
    """GGUF -> path, atomically: written beside it and renamed. The caller holds the lock, so one process does the work."""
    megabytes = gguf.stat().st_size / 1e6
    announce(
        f"converting {gguf.name} ({megabytes:.0f} MB) once, to {path.parent}; this takes a minute or two, "
        f"later starts take a second"
    )
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=path.name + ".", dir=path.parent))
    try:
        new, old = work / "new", work / "old"
        new.mkdir()
        # transformers' bars are for a terminal: in a log each redrawn bar is a line of its own.
        shown = sys.stderr is not None and sys.stderr.isatty()
        with contextlib.nullcontext() if shown else _no_bars():
            _write(gguf, new, name)
        (new / _MARKER).write_text(json.dumps({"format": _FORMAT, "files": _files(new)}, indent=1), encoding="utf-8")
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    announce(f"converted in {time.monotonic() - started:.0f} s")


def _write(gguf: Path, work: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        # The weights are plain floats from here on; what says otherwise would make transformers refuse to save them.
        model.hf_quantizer = None
        for attribute in ("is_quantized", "quantization_method"):
            model.__dict__.pop(attribute, None)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
    except OSError as error:
        if error.errno is not None:  # the disk, not the file
            raise ModelLoadError(
                f"model {name!r}: the conversion can't be written to {work.parent.parent}: {error}"
            ) from error
        raise ModelLoadError(f"model {name!r}: {gguf} can't be read as a model: {error}") from error
    except Exception as error:
        raise ModelLoadError(
            f"model {name!r}: {gguf} can't be read as a model ({type(error).__name__}: {error}); it may be "
            f"damaged or of an architecture that transformers doesn't read from GGUF"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' progress bars off while a cached model loads; its warnings stay."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """All of a conversion's bars off: the GGUF reader's is tqdm's own, which transformers' switch doesn't reach."""
    from transformers import modeling_gguf_pytorch_utils as reader

    module: Any = reader
    was = getattr(module, "tqdm", None)
    if was is not None:
        module.tqdm = lambda items, **_: items
    try:
        with quiet():
            yield
    finally:
        if was is not None:
            module.tqdm = was
