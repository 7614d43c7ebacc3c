"""torch_native attention that honours the mask of a verify step (the stock backend knows no such step)."""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention


class MaskedTorchNativeBackend(TorchNativeAttnBackend):
    """Adds TARGET_VERIFY with SGLang's CPU convention: custom_mask is bool[bs * n * n], drafts against
    drafts."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        rows, nodes = forward_batch.batch_size, forward_batch.spec_info.draft_token_num
        mask = forward_batch.spec_info.custom_mask[: rows * nodes * nodes].view(rows, nodes, nodes)
        query = q.view(rows, nodes, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(rows, nodes, layer.tp_q_head_num, layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        for row, length in enumerate(forward_batch.seq_lens.tolist()):
            place = table[forward_batch.req_pool_indices[row], : length + nodes]
            seen = torch.cat([mask.new_ones(nodes, length), mask[row]], 1)
            out[row] = scaled_dot_product_attention(
                query[row].transpose(0, 1)[None],
                keys[place].transpose(0, 1)[None],
                values[place].transpose(0, 1)[None],
                attn_mask=seen,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0].transpose(0, 1)
        return out.view(rows * nodes, -1)
