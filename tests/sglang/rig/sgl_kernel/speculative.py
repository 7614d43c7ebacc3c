"""The one operator of `sgl_kernel.speculative` that SGLang 0.5.23's NGRAM worker imports on a CPU."""

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    bs,
    n,
):
    """Links and positions of a draft tree from its ancestor mask; semantics as documented in
    `sglang/kernels/ops/speculative/reconstruct_tree.py`."""
    node = torch.arange(n)
    ancestors = tree_mask[: bs * n * n].view(bs, n, n).bool() & (node < node.view(n, 1))
    positions.copy_((ancestors.sum(-1) + verified_seq_len.view(bs, 1)).reshape(-1))
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    parent = torch.where(ancestors, node, -1).amax(-1)
    first_child = torch.where(ancestors, node.view(n, 1), n).amin(-2)
    retrieve_next_token.copy_(torch.where(first_child < n, first_child, -1))
    same_parent = (parent.unsqueeze(2) == parent.unsqueeze(1)) & (parent.unsqueeze(1) >= 0)
    later = same_parent & (node.view(n, 1) > node)
    sibling = torch.where(later, node.view(n, 1), n).amin(-2)
    retrieve_next_sibling.copy_(torch.where(sibling < n, sibling, -1))
