"""The file format: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.errors import MemoryFormatError, VocabularyMismatchError
from agentspec.memory import MemoryStore, Span, TrajectoryMemory, saved
from tests.memory.test_index import compare

pytestmark = pytest.mark.fast


class Learned:
    def __init__(self, nbytes: int = 64) -> None:
        self.table = np.arange(8, dtype=np.float32).reshape(2, 4)
        self.nbytes = nbytes

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {"table": self.table, "counts": np.array([3], np.int64), "none": np.empty((0, 2), np.uint8)}


def filled() -> MemoryStore:
    store = MemoryStore(fingerprint="tok-1")
    random = np.random.default_rng(5)
    for id, namespace in (("a", None), ("b", "one"), ("c", "one"), ("ünï", "two\n")):
        memory = store.open(id, namespace)
        for _ in range(4):
            prompt = random.integers(0, 60, int(random.integers(30, 200))).tolist()
            context = memory.extend(prompt, [Span(3, 20, role="user"), Span(20, 25, role="tool")])
            memory.append(context, random.integers(0, 60, 12).tolist())
            memory.close(context)
            memory.seed(random.integers(0, 60, 15).tolist())
    store.open("nothing in it")
    store.open("b", "one").attachments["mixture"] = Learned()
    return store


def test_round_trip(tmp_path: Path) -> None:
    store, path = filled(), tmp_path / "memory"
    store.open("a").extend([1, 2, 3])  # an open call isn't saved, its prompt is
    size = store.save(path)
    assert size == path.stat().st_size
    other = MemoryStore(fingerprint="tok-1")
    assert other.load(path) == 7
    other.check()
    for key, memory in store._memories.items():
        again = other._memories[key]
        assert again.tokens.tolist() == memory.tokens.tolist()
        assert again.segments == memory.segments
        assert (again.shared is None) == (memory.shared is None)
        context = again.extend([5, *memory.tokens[-9:].clip(0)])
        compare(again, context)
    learned = other.open("b", "one").learned["mixture"]
    assert learned["table"].tolist() == Learned().table.tolist() and learned["table"].dtype == np.float32
    assert learned["none"].shape == (0, 2)
    # What came from a file and nobody has taken is saved again.
    other.save(tmp_path / "again")
    third = MemoryStore(fingerprint="tok-1")
    third.load(tmp_path / "again")
    assert third.open("b", "one").learned["mixture"]["counts"].tolist() == [3]
    # A prompt that was held before is held after.
    tokens = [*range(200, 260)]
    call = store.open("d").extend(tokens)
    store.open("d").close(call)
    store.save(path)
    fourth = MemoryStore(fingerprint="tok-1")
    fourth.load(path)
    assert fourth.open("d").extend(tokens).held == 60


def test_the_same_memories_give_the_same_file(tmp_path: Path) -> None:
    filled().save(tmp_path / "a")
    filled().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_is_held_stays(tmp_path: Path) -> None:
    filled().save(tmp_path / "a")
    store = MemoryStore(fingerprint="tok-1")
    store.open("a").seed([1, 2, 3])
    assert store.load(tmp_path / "a") == 6
    assert store.open("a").tokens.tolist() == [1, 2, 3]
    assert store.load(tmp_path / "a") == 1  # the empty one
    store.check()


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    filled().save(tmp_path / "a")
    with pytest.raises(VocabularyMismatchError, match=r"tok-1.*tok-2"):
        MemoryStore(fingerprint="tok-2").load(tmp_path / "a")
    with pytest.raises(VocabularyMismatchError, match="fingerprint="):
        MemoryStore().load(tmp_path / "a")
    with pytest.raises(VocabularyMismatchError, match="fingerprint="):
        MemoryStore().save(tmp_path / "a")


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    store = MemoryStore(fingerprint="t")
    store.open("a", "n").seed([1, 2, 3, 4])
    path = tmp_path / "a"
    store.save(path)
    good = path.read_bytes()
    for place in range(len(good)):
        for damaged in (
            good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :],
            good[:place],
            good[:place] + good[place + 1 :],
        ):
            path.write_bytes(damaged)
            fresh = MemoryStore(fingerprint="t")
            with pytest.raises(MemoryFormatError, match=str(path)):
                fresh.load(path)
            assert len(fresh) == 0
    path.write_bytes(good + b"\0")
    with pytest.raises(MemoryFormatError, match="damaged"):
        MemoryStore(fingerprint="t").load(path)


def test_foreign_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a"
    store = MemoryStore(fingerprint="t")
    for content in (b"", b"\0" * 100, pickle.dumps({"a": 1}) * 10, b"agentspec-memory"):
        path.write_bytes(content)
        with pytest.raises(MemoryFormatError, match="not a memory that agentspec saved"):
            store.load(path)
    with open(path, "wb") as file:
        file.truncate(2**29)
    tracemalloc.start()
    with pytest.raises(MemoryFormatError, match="not a memory that agentspec saved"):
        store.load(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20  # a model's weights aren't read to be refused
    tracemalloc.stop()
    store.save(path)
    newer = bytearray(path.read_bytes())
    newer[16] = 2
    path.write_bytes(newer)
    with pytest.raises(MemoryFormatError, match=r"format version 2.*reads version 1"):
        store.load(path)
    with pytest.raises(FileNotFoundError):
        store.load(tmp_path / "none")


def forge(path: Path, change: Any) -> None:
    """Rewrite a file's header, with a checksum that fits."""
    data = path.read_bytes()
    _, version, length = saved._PREFIX.unpack_from(data)
    start = saved._PREFIX.size
    header = json.loads(data[start : start + length])
    body = bytearray(data[start + length : -32])
    change(header, body)
    text = json.dumps(header).encode()
    content = saved._PREFIX.pack(saved.MAGIC, version, len(text)) + text + bytes(body)
    path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())


def _set(*path: Any) -> Any:
    *places, value = path

    def change(header: Any, body: bytearray) -> None:
        at = header["memories"][0]
        for place in places[:-1]:
            at = at[place]
        at[places[-1]] = value

    return change


def _body(offset: int, value: int) -> Any:
    def change(header: Any, body: bytearray) -> None:
        body[offset : offset + 4] = int(value).to_bytes(4, "little", signed=True)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("tokens", [0, 10**9]),
        _set("tokens", [-8, 4]),
        _set("tokens", [0, 3]),
        _set("tokens", [0, 4.5]),
        _set("tokens", None),
        _set("rows", [0, 1]),
        _set("rows", [16, 0]),
        _set("roles", []),
        _set("roles", [7]),
        _set("id", 7),
        _set("id", ""),
        _set("id", "a\0b"),
        _set("namespace", ["n"]),
        _set("learned", {"m": {"a": [0, "object", [1]]}}),
        _set("learned", {"m": {"a": [0, "float64", [2**40, 2**40]]}}),
        _set("learned", {"m": {"a": [0, "int8", [-1]]}}),
        _set("learned", 5),
        _body(0, -2),
        _body(4, -1),
        _body(0, -1),
        _body(16, 5),
        _body(16, -1),
        _body(20, 5),
        _body(20, 0),
        _body(24, 6),
        _body(24, -1),
        _body(28, 1),
        lambda header, body: header.pop("tokenizer"),
        lambda header, body: header.update(memories=5),
        lambda header, body: header.update(memories=[None]),
        lambda header, body: body.clear(),
    ],
)
def test_forged_content_is_refused(tmp_path: Path, change: Any) -> None:
    """A checksum can be computed by anyone: content that can't be is refused all the same."""
    path = tmp_path / "a"
    store = MemoryStore(fingerprint="t")
    store.open("a").seed([1, 2, 3, 4])
    store.save(path)
    forge(path, lambda header, body: None)
    MemoryStore(fingerprint="t").load(path)
    forge(path, change)
    fresh = MemoryStore(fingerprint="t")
    with pytest.raises(MemoryFormatError, match="content can't be"):
        fresh.load(path)
    assert len(fresh) == 0


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    store = filled()
    store.save(path)
    good = path.read_bytes()
    store.open("more").seed([1, 2, 3])

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                store.save(path)
        assert path.read_bytes() == good
        assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(OSError):
        store.save(tmp_path / "no directory" / "a")


def test_what_a_killed_process_left_is_removed_later(tmp_path: Path) -> None:
    for name, age in (("old", 7200), ("new", 60)):
        path = tmp_path / f".agentspec-memory-{name}"
        path.write_bytes(b"half of it")
        os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "mine").write_bytes(b"")
    os.utime(tmp_path / "mine", (0, 0))
    filled().save(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == [".agentspec-memory-new", "a", "mine"]


def test_loading_keeps_the_budget(tmp_path: Path) -> None:
    store = MemoryStore(fingerprint="t")
    for i in range(40):
        store.open(f"run {i}").seed(np.random.default_rng(i).integers(0, 9999, 3000))
    store.save(tmp_path / "a")
    small = MemoryStore(2**20, fingerprint="t")
    small.load(tmp_path / "a")
    assert small.nbytes <= 2**20
    assert (None, "run 39") in small and (None, "run 0") not in small
    small.check()


def test_a_memory_larger_than_allowed_keeps_its_newest_tokens() -> None:
    memory = TrajectoryMemory()
    for i in range(30):
        memory.seed(np.arange(i * 1000, i * 1000 + 200))
    small = TrajectoryMemory(max_tokens=1024)
    small.restore(memory.snapshot())
    assert len(small) <= 1024 and small.tokens[-1] == memory.tokens[-1]
    small.check()
