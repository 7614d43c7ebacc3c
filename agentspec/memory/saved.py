"""The file in which memories are kept: written whole or not at all, and read only if every byte is as
written.

Called by MemoryStore. May import numpy and its neighbours in memory.

    16 bytes   b"agentspec-memory"
    uint32     version (1), little-endian like all numbers here
    uint32     length of the header
    header     JSON: {"tokenizer": fingerprint, "memories": [{"namespace", "id", "roles", "tokens", "rows",
               "learned"}]} tokens and rows are [offset, count] into the data, counted in bytes and int32;
               learned is {attachment: {array: [offset, dtype, shape]}}; id is null for what a namespace
    shares data       int32 token ids (-1: a seam), int32 rows of four (start, end, source, role), and arrays,
               each at a multiple of 8
    32 bytes   BLAKE2b of everything before

Nothing in it is executed, and links and tables aren't in it: they are made again from the tokens (0.1 s a
million). An attachment that has `to_arrays() -> {name: array}` is saved too; after a load its arrays lie in
the memory's `learned[name]`, for the proposer to take and to judge.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import MemoryFormatError, VocabularyMismatchError
from agentspec.memory.index import LEAD, MAX_TOKENS, SEAM

if TYPE_CHECKING:
    from agentspec.memory.trajectory import TrajectoryMemory

__all__ = ["SavedMemory", "read", "write"]

MAGIC = b"agentspec-memory"
VERSION = 1
_PREFIX = struct.Struct("<16sII")
_DIGEST = 32
_TEMPORARY = ".agentspec-memory-"
_LEFT_AFTER_SECONDS = 3600
_SOURCES = 6
_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")


@dataclass(slots=True)
class SavedMemory:
    """One memory as it is in a file.

    tokens: int32[n]; rows: int32[m, 4] (start, end, source, place in roles); learned: arrays by attachment
            and name
    """

    namespace: str | None
    id: str | None
    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]
    roles: list[str]
    learned: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)


def write(
    path: str | os.PathLike[str],
    fingerprint: str,
    memories: Iterable[tuple[str | None, str | None, TrajectoryMemory]],
) -> int:
    """Write memories to a file, replacing it at once. Returns its size in bytes. Raises OSError."""
    chunks: list[bytes] = []
    size = 0

    def add(array: NDArray[Any]) -> int:
        nonlocal size
        offset = size
        data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        padding = -len(data) % 8
        chunks.append(data + bytes(padding))
        size += len(data) + padding
        return offset

    listed = []
    for namespace, id, memory in memories:
        part = memory.snapshot()
        learned = {
            attachment: {
                name: [add(array), array.dtype.newbyteorder("=").name, list(array.shape)]
                for name, array in arrays.items()
            }
            for attachment, arrays in part.learned.items()
        }
        listed.append(
            {
                "namespace": namespace,
                "id": id,
                "roles": part.roles,
                "tokens": [add(part.tokens), len(part.tokens)],
                "rows": [add(part.rows), len(part.rows)],
                "learned": learned,
            }
        )
    header = json.dumps({"tokenizer": fingerprint, "memories": listed}).encode()
    header += b" " * (-(len(header) + _PREFIX.size) % 8)
    digest = hashlib.blake2b(digest_size=_DIGEST)
    path = os.path.abspath(os.fspath(path))
    _sweep(os.path.dirname(path))
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in (_PREFIX.pack(MAGIC, VERSION, len(header)), header, *chunks):
                digest.update(chunk)
                file.write(chunk)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            written = file.tell()
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return written


def _sweep(directory: str) -> None:
    """Remove what processes that were killed while they wrote have left there."""
    for name in os.listdir(directory):
        if name.startswith(_TEMPORARY):
            path = os.path.join(directory, name)
            try:
                if time.time() - os.stat(path).st_mtime > _LEFT_AFTER_SECONDS:
                    os.unlink(path)
            except OSError:
                pass  # another process has done it, or it isn't ours to do


def read(path: str | os.PathLike[str], fingerprint: str) -> list[SavedMemory]:
    """The memories in a file. Raises MemoryFormatError, VocabularyMismatchError, OSError."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        data = file.read(_PREFIX.size)
        if data.startswith(MAGIC):  # another file can be of any size
            data += file.read()
    if len(data) < _PREFIX.size + _DIGEST:
        raise MemoryFormatError(f"{name}: not a memory that agentspec saved")
    _, version, header_length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise MemoryFormatError(
            f"{name}: written in format version {version}, this agentspec reads version {VERSION}: "
            "save it again with the version that is to read it"
        )
    if hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise MemoryFormatError(f"{name}: damaged (its checksum doesn't fit); restore it from a copy, or delete it")
    start = _PREFIX.size + header_length
    if start > len(data) - _DIGEST:
        raise MemoryFormatError(f"{name}: its header is longer than the file")
    try:
        header = json.loads(data[_PREFIX.size : start])
        body = memoryview(data)[start : len(data) - _DIGEST]
        if header["tokenizer"] != fingerprint:
            raise VocabularyMismatchError(
                f"{name}: written with the tokenizer {header['tokenizer']!r}, "
                f"this engine has {fingerprint!r}: token ids mean something else there"
            )
        return [_parse(entry, body) for entry in header["memories"]]
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as error:
        raise MemoryFormatError(f"{name}: its content can't be ({type(error).__name__}: {error})") from error


def _parse(entry: dict[str, Any], body: memoryview) -> SavedMemory:
    """One memory of a file, every field checked. Raises ValueError and its like."""
    namespace, id, roles = entry["namespace"], entry["id"], entry["roles"]
    for name in (namespace, id):
        if name is not None and (not isinstance(name, str) or not name or "\0" in name):
            raise ValueError(f"no name: {name!r}")
    if namespace is None and id is None:
        raise ValueError("shared by no namespace")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError("roles are no list of strings")
    tokens = _array(body, entry["tokens"][0], "int32", [entry["tokens"][1]])
    rows = _array(body, entry["rows"][0], "int32", [entry["rows"][1], 4])
    learned = {
        str(attachment): {str(name): _array(body, *spec) for name, spec in arrays.items()}
        for attachment, arrays in entry["learned"].items()
    }
    part = SavedMemory(namespace, id, tokens, rows, roles, learned)
    _check(part)
    return part


def _array(body: memoryview, offset: int, dtype: str, shape: list[int]) -> NDArray[Any]:
    if dtype not in _DTYPES or not all(isinstance(n, int) and 0 <= n <= 2**40 for n in [offset, *shape]):
        raise ValueError(f"no array: {dtype!r}, {shape!r} at {offset!r}")
    if len(shape) > 8:
        raise ValueError(f"an array of {len(shape)} dimensions")
    count = 1
    for n in shape:
        count *= n
    kind = np.dtype(dtype).newbyteorder("<")
    if offset + count * kind.itemsize > len(body):
        raise ValueError("an array beyond the end of the file")
    return np.frombuffer(body, kind, count, offset).reshape(shape).astype(kind.newbyteorder("="), copy=True)


def _check(part: SavedMemory) -> None:
    """Raise ValueError unless segments, lead-ins and seams lie as trajectory.py lays them."""
    tokens, rows = part.tokens, part.rows
    if len(tokens) > MAX_TOKENS or (len(tokens) and int(tokens.min()) < SEAM):
        raise ValueError("token ids out of range")
    starts, ends = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    before = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    if bool((starts < before[:-1]).any()) or bool((ends <= starts).any()) or before[-1] != len(tokens):
        raise ValueError("segments don't lie in order")
    if len(rows) and (int(rows[:, 2:].min()) < 0 or int(rows[:, 2].max()) >= _SOURCES):
        raise ValueError("an unknown source")
    if len(rows) and int(rows[:, 3].max()) >= len(part.roles):
        raise ValueError("an unknown role")
    seams = np.flatnonzero(tokens == SEAM)
    following = np.searchsorted(starts, seams, side="right")
    if len(seams) and not np.array_equal(before[:-1][np.minimum(following, len(rows) - 1)], seams):
        raise ValueError("a seam where none can be")
    gaps = starts - before[:-1]
    gaps -= np.isin(before[:-1], seams)
    if len(gaps) and (int(gaps.min()) < 0 or int(gaps.max()) > LEAD):
        raise ValueError("a seam inside a segment, or a lead-in that is too long")
