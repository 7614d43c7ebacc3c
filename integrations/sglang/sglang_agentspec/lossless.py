"""Which requests SGLang's verifier can't serve losslessly, and why. May import nothing from sglang.

Such a request gets no drafts: its token comes from SGLang's ordinary sampler, fed with the logits of its last
token, which is what a server without speculation does. The reason is put into its response. The findings are
about SGLang 0.5.23 (`srt/speculative/eagle_utils.py` against `srt/layers/sampler.py`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["REASONS", "needs_plain_batch", "reason_not_to_draft"]

# What a response's `reason` may say, and what it means.
REASONS = {
    "penalties": "frequency, presence and repetition penalties are shared by all positions of a draft",
    "min_new_tokens": "the end token stays masked for all positions of a draft, or for none",
    "min_p": "the tree verifier has no min-p",
    "top_k_and_top_p": "the verifier applies top-k, then top-p to what is left; the sampler both to all",
    "sampling_on_this_device": "verification is greedy on this device, whatever the temperature",
    "seeded_sampling": "a seed draws other tokens in the verifier than in the sampler",
    "custom_logit_processor": "the verifier runs no custom logit processors",
    "sampling_mask": "the verifier reports no sampling masks",
    "hidden_states": "the verify forward captures no hidden states",
    "switched_off": "the request asked for no drafts",
    "no_memory": "the memory has no room for this request; see the response's problems",
    "health_check": "the server's own health check; it leaves no trace in any memory",
    "no_token_ids": "the prompt came as embeddings, so there is nothing to copy from",
}


def is_greedy(params: Any) -> bool:
    """Whether SGLang's normalised sampling parameters choose the most likely token (it sets top_k to 1)."""
    return params.top_k == 1


def reason_not_to_draft(request: Any, greedy_verifier: bool) -> str | None:
    """A key of REASONS, or None if drafts are lossless for this request.

    request: SGLang's Req. greedy_verifier: verification ignores temperatures on this device.
    """
    params = request.sampling_params
    if params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0:
        return "penalties"
    if params.min_new_tokens > 0:
        return "min_new_tokens"
    if request.custom_logit_processor is not None:
        return "custom_logit_processor"
    if request.return_sampling_mask:
        return "sampling_mask"
    if request.return_hidden_states:
        return "hidden_states"
    if request.input_embeds is not None:
        return "no_token_ids"
    if is_greedy(params):
        return None
    if greedy_verifier:
        return "sampling_on_this_device"
    if params.min_p > 0:
        return "min_p"
    if params.sampling_seed is not None:
        return "seeded_sampling"
    if params.top_p < 1.0 and params.top_k < 1 << 29:
        return "top_k_and_top_p"
    return None


def needs_plain_batch(request: Any) -> bool:
    """Whether the whole batch has to take a plain step: what this request asks for exists only there."""
    return bool(
        request.return_sampling_mask
        or request.return_hidden_states
        or (request.custom_logit_processor is not None and request.return_logprob)
    )
