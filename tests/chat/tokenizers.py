"""Small tokenizers, made here: the kinds that real models have, without their vocabularies.

byte_level:    GPT-2, Llama 3, Qwen, SmolLM2: any bytes, one token each where nothing was learned
byte_fallback: Llama 2, Mistral 7B, Gemma: "▁" for spaces, a space in front of every text, bytes as <0xNN>
slow:          a tokenizer without offsets
"""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox reads the file and answers the question about the weather in Paris.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
    "<think>\nLet me think about this first, then call the tool.\n</think>\n\nHello, the answer is 42.",
    "def read_file(path: str) -> str:\n    with open(path) as file:\n        return file.read()\n",
    "你好，世界。今天天气很好。 Grüße aus München, 😀 émoji 🎉 and naïve café.",
] * 4

MARKERS = [
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]


@functools.cache
def byte_level(template: str = "") -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=MARKERS
    )
    tokenizer.chat_template = template or None
    return tokenizer


@functools.cache
def byte_fallback(template: str = "") -> Any:
    words = sorted({w for line in CORPUS for w in line.split(" ")})
    vocabulary = {"<unk>": 0, "</s>": 1}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    pieces = {"▁"} | {c for w in words for c in w if ord(c) < 128 and c != "\n"}
    merges = []
    for word in words:
        current = "▁"
        if not all(ord(c) < 128 and c != "\n" for c in word):
            continue
        for c in word:
            merges.append((current, c))
            current += c
            pieces.add(current)
    for piece in sorted(pieces):
        vocabulary.setdefault(piece, len(vocabulary))
    core = Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges)), byte_fallback=True, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template or None
    return tokenizer


class Slow:
    """A tokenizer that knows no offsets, as the Python ones and mistral-common's don't."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        if options.pop("return_offsets_mapping", False):
            raise NotImplementedError("return_offset_mapping is not available when using Python tokenizers")
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def split(tokenizer: Any, text: str, at: list[int]) -> list[int]:
    """The ids of text tokenised in pieces cut at the given characters: another tokenisation of the same
    text.
    """
    ids: list[int] = []
    for start, end in zip([0, *at], [*at, len(text)], strict=True):
        ids += tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
    return ids
