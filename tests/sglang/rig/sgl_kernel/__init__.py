"""Stands in for the compiled package `sgl_kernel` where there is neither a GPU nor Intel AMX: for tests only.

The real SGLang 0.5.23 imports a handful of CPU symbols from it when SGLANG_USE_CPU_ENGINE=1. Here they are in
plain torch and numpy: exact, not fast. Argument names and order are those of SGLang's call sites
(`sglang/kernels/ops/speculative/*.py`, `sglang/kernels/ops/kvcache/cache_move.py`,
`sglang/srt/mem_cache/allocation.py`). What this suite never reaches raises NotImplementedError, so that
nothing is silently approximated.
"""

import ctypes

import numpy as np
import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """req_to_token[r, s:e] = the next e - s of out_cache_loc, request by request."""
    taken = 0
    for row, low, high in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, low:high] = out_cache_loc[taken : taken + high - low].to(req_to_token.dtype)
        taken += high - low


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The inverse: pack req_to_token[r, s:e] of every request into out_cache_loc."""
    taken = 0
    for row, low, high in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[taken : taken + high - low] = req_to_token[row, low:high].to(out_cache_loc.dtype)
        taken += high - low


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Pack out_cache_loc[i] for every accepted index i (-1: none)."""
    index = accept_index.reshape(-1)
    index = index[index >= 0].long()
    accept_out_cache_loc[: index.numel()] = out_cache_loc[index]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    rows = torch.arange(accept_lens.numel())
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows * stride + accept_lens.long() - 1])


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move cache rows src_loc to tgt_loc in every layer's buffer (address and bytes a row given)."""
    target, source = tgt_loc.numpy(), src_loc.numpy()
    moved = target != source
    target, source = target[moved], source[moved]
    if not target.size:
        return
    rows = int(max(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.to(torch.int64).tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        buffer[target] = buffer[source]


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each request's tree along the target's argmax; the CUDA kernel of the same name is the model."""
    nodes, width = candidates.shape[1], accept_index.shape[1]
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    target = target_predict.reshape(-1).tolist()
    for row, (tokens, index, children, siblings) in enumerate(rows):
        node, last, accepted = 0, index[0], 0
        accept_index[row, 0] = last
        while accepted + 1 < width:
            node = children[node]
            while node != -1 and tokens[node] != target[last]:
                node = siblings[node]
            if node == -1:
                break
            predicts[last] = target[last]
            last = index[node]
            accepted += 1
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = target[last]
    assert nodes == len(target) // max(1, candidates.shape[0])


def _absent(*args, **kwargs):
    raise NotImplementedError("the sgl_kernel stand-in of agentspec's tests does not provide this operator")


assign_draft_cache_locs_contiguous_cpu = _absent
build_tree_kernel_efficient_cpu = _absent
build_draft_decode_metadata_cpu = _absent
rotate_input_ids_cpu = _absent
