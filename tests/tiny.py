"""Tiny random models and a tokenizer, built in code: every engine test runs without any download."""

from __future__ import annotations

import functools
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The lazy dog sleeps; the quick fox runs on.",
    "An agent reads a file, searches it, and writes what it has read: the same words again and again.",
    "def read_file(path):\n    with open(path) as file:\n        return file.read()\n",
    "Speculative decoding checks several guessed tokens in one forward pass of the target model.",
    '{"name": "read_file", "arguments": {"path": "notes.txt"}}',
    "Ein Vogel fliegt über die Straße; das Café ist geöffnet. Naïve façade.",
]


@functools.cache
def tokenizer() -> Any:
    """Byte-level BPE as SmolLM2's: special tokens first, 500 ids or so, any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def model(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of a kind ("llama", "qwen3", "mistral", "gemma3", "mamba", "jamba"), float32, on the CPU.

    A new one each time: an engine takes its model over. Weights are large enough that logits differ clearly between
    ids and between contexts.
    """
    import transformers as t

    eos = tokenizer().eos_token_id
    shape = {
        **SHAPE,
        "vocab_size": len(tokenizer()),
        "eos_token_id": eos,
        "bos_token_id": 1,
        "pad_token_id": eos,
    }
    shape["initializer_range"] = 0.2
    if kind == "llama":
        config: Any = t.LlamaConfig(**{**shape, **changes})
    elif kind == "qwen3":
        config = t.Qwen3Config(**{**shape, "head_dim": 16, **changes})
    elif kind == "mistral":
        config = t.MistralConfig(**{**shape, "sliding_window": 16, **changes})
    elif kind == "gemma3":
        config = t.Gemma3TextConfig(
            **{
                **shape,
                "head_dim": 16,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            **changes,
        )
    elif kind == "mamba":
        config = t.MambaConfig(
            vocab_size=shape["vocab_size"],
            hidden_size=64,
            num_hidden_layers=2,
            state_size=8,
            eos_token_id=eos,
            initializer_range=0.2,
            **changes,
        )
    elif kind == "jamba":
        config = t.JambaConfig(
            **{
                **shape,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "expert_layer_period": 4,
                "num_experts": 2,
                "use_mamba_kernels": False,
                "mamba_d_state": 8,
                "mamba_dt_rank": 8,
            },
            **changes,
        )
    else:
        raise ValueError(kind)
    torch.manual_seed(seed)
    made = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    made.generation_config.eos_token_id = eos
    return made
