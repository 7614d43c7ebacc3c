"""Which attention backends may verify trees, and which only chains. May import nothing from sglang.

Read off SGLang 0.5.23's sources; DESIGN.md has the places. A tree needs every node to see its ancestors and
nothing
else: a backend that ignores the mask would score siblings as if they followed each other, silently.
"""

from __future__ import annotations

import logging

from agentspec.errors import InvalidRequestError

__all__ = ["TREE_BACKENDS", "tree_width"]

logger = logging.getLogger(__name__)

# Backend -> whether it honours the mask at page sizes above 1 too.
TREE_BACKENDS = {"flashinfer": True, "triton": False, "fa3": False, "intel_amx": False}

# speculative_eagle_topk where trees are verified: backends ask only whether it is above 1, and the KV
# reserve takes max(steps * topk, draft tokens), so any small number does.
_BRANCHES = 4


def tree_width(
    wanted: bool | None,
    *,
    attention: str | None,
    prefill: str | None,
    decode: str | None,
    verify_on_prefill: bool,
    page_size: int,
) -> int:
    """The speculative_eagle_topk to run with: above 1 for trees, 1 for chains (with 1, FlashAttention's
    verify ignores the mask, which is right for chains).

    wanted: PluginSettings.trees. attention, prefill, decode: SGLang's three backend options. Raises
    InvalidRequestError where trees were asked for and would be wrong, or nothing can be verified at all.
    """
    verifying = (prefill if verify_on_prefill else decode) or attention
    if wanted is False:
        return 1
    if wanted is None:
        if verifying == "torch_native":
            raise InvalidRequestError(
                "AGENTSPEC: SGLang's torch_native attention has no verify step: choose another --attention-backend"
            )
        allowed = verifying in TREE_BACKENDS and (page_size == 1 or TREE_BACKENDS[verifying])
        if not allowed:
            logger.warning(
                "AGENTSPEC: drafts are chains, not trees: attention backend %s at page size %d is not known "
                "to honour a tree's mask (known: %s at page size 1, flashinfer at any)",
                verifying,
                page_size,
                ", ".join(sorted(TREE_BACKENDS)),
            )
        return _BRANCHES if allowed else 1
    if page_size > 1 and verifying != "flashinfer":
        raise InvalidRequestError(
            f"AGENTSPEC: trees at page size {page_size} give wrong results on attention backend {verifying}: "
            'only flashinfer takes them. Use --page-size 1, or set "trees" to false'
        )
    if verifying not in TREE_BACKENDS:
        logger.warning(
            'AGENTSPEC: "trees" is set by hand: attention backend %s is not on the list of those that are '
            "known to honour a tree's mask (%s)",
            verifying,
            ", ".join(sorted(TREE_BACKENDS)),
        )
    return _BRANCHES
