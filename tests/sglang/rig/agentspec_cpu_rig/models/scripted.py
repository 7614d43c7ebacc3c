"""A model whose logits are scripted: it emits recorded outputs, so that real trajectories run through the
scheduler.

The script is a JSON file named by AGENTSPEC_RIG_SCRIPT: {"end": id, "calls": [{"prompt": [ids], "output":
[ids]}, ...]}. A request whose prompt is one of them gets that call's output, whatever is drafted: the row at
position p of a request puts all weight on the token that was recorded at p + 1. Two calls with one prompt
are served in the script's order. Any other prompt gets the end token. Chunked prefill works; prefix caching
has to be off, since the model knows a prompt only by seeing all of it.
"""

import hashlib
import json
import os

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import nn


def _key(tokens):
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


class ScriptedForCausalLM(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        with open(os.environ["AGENTSPEC_RIG_SCRIPT"]) as file:
            script = json.load(file)
        self.end = script["end"]
        self.outputs = {}
        for call in script["calls"]:
            self.outputs.setdefault(_key(call["prompt"]), []).append(call["output"])
        self.running = {}  # request slot -> (prompt length, output)
        self.prompts = {}  # request slot -> prompt tokens seen so far

    def load_weights(self, weights):
        return set()

    def _read_prompts(self, input_ids, batch):
        at = 0
        lengths = zip(
            batch.req_pool_indices.tolist(),
            batch.extend_prefix_lens.tolist(),
            batch.extend_seq_lens.tolist(),
            strict=True,
        )
        for slot, before, count in lengths:
            piece = input_ids[at : at + count].tolist()
            at += count
            prompt = self.prompts.get(slot, [])[:before] + piece
            assert len(prompt) == before + count, "the scripted model needs --disable-radix-cache"
            self.prompts[slot] = prompt
            waiting = self.outputs.get(_key(prompt))
            self.running[slot] = (len(prompt), waiting.pop(0) if waiting else [])

    def _expected(self, slot, position):
        start, output = self.running.get(slot, (0, []))
        at = position + 1 - start
        return output[at] if 0 <= at < len(output) else self.end

    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **kwargs):
        mode = forward_batch.forward_mode
        slots = forward_batch.req_pool_indices.tolist()
        if mode.is_extend() and not mode.is_target_verify():
            self._read_prompts(input_ids, forward_batch)
            rows = [(slot, length - 1) for slot, length in zip(slots, forward_batch.seq_lens.tolist(), strict=True)]
        else:
            each = len(input_ids) // max(1, len(slots))
            rows = [(slots[i // each], p) for i, p in enumerate(positions.tolist())]
        tokens = torch.tensor([self._expected(slot, p) for slot, p in rows], dtype=torch.int64)
        logits = torch.zeros(len(rows), self.config.vocab_size)
        logits[torch.arange(len(rows)), tokens] = 50.0
        return LogitsProcessorOutput(next_token_logits=logits)


EntryClass = ScriptedForCausalLM
