"""What a request says to the plugin, read from SGLang's own fields. May import nothing from sglang.

SGLang carries `session_id`, `cache_salt` and `extra_key` at a request's top level and `custom_params` among
its sampling parameters; all of them reach every rank with the broadcast request. `custom_params` may hold
scalars and flat lists only, hence the flat forms below:

    agentspec_trajectory    str, the trajectory where there is no session_id
    agentspec_namespace     str, share earlier outputs with other trajectories that name it, inside the scope
    agentspec_draft         bool, False: no drafts for this request
    agentspec_seed_ids      list[int], token ids to hold as draft material; -1 separates pieces
    agentspec_seed_texts    list[str], the same as text, tokenised here without special tokens
    agentspec_spans         list[int], (start, end, source) triples that cut the prompt into messages, in
    order

The scope is who may see what is remembered: `cache_salt` and `extra_key`, with which SGLang itself keeps
tenants' prefix caches apart. Nothing is ever shared across scopes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentspec.memory import Span, as_source

__all__ = ["RequestSettings", "read_settings"]

_KEYS = ("trajectory", "namespace", "draft", "seed_ids", "seed_texts", "spans")
_PREFIX = "agentspec_"


@dataclass(frozen=True)
class RequestSettings:
    """scope: tenant; trajectory: its id inside the scope, None if the request names none; joined_by: which
    field named it; problems: what was said and could not be used, for the response."""

    scope: str = ""
    trajectory: str | None = None
    joined_by: str = "prompt"
    namespace: str | None = None
    draft: bool = True
    seeds: tuple[np.ndarray, ...] = ()
    seed_texts: tuple[str, ...] = ()
    spans: tuple[Span, ...] | None = None
    problems: tuple[str, ...] = ()


def read_settings(request: Any, prompt_length: int, vocabulary: int) -> RequestSettings:
    """Read SGLang's Req. Never raises: a server can't die of a request; what is wrong goes into
    `problems`."""
    problems: list[str] = []
    params = request.sampling_params.custom_params
    own = {k[len(_PREFIX) :]: v for k, v in params.items() if str(k).startswith(_PREFIX)} if params else {}
    unknown = sorted(set(own) - set(_KEYS))
    if unknown:
        problems.append(f"unknown settings: {', '.join(_PREFIX + k for k in unknown)}")
    session = request.session_id or (request.session.session_id if request.session is not None else None)
    named = own.get("trajectory")
    if session:
        trajectory, joined_by = f"session:{session}", "session_id"
    elif named is not None:
        trajectory, joined_by = f"custom:{named}", "custom_params"
    else:
        trajectory, joined_by = None, "prompt"
    # repr keeps ("a", "b") and ("a|b", "") apart
    tenant = (request.cache_salt or "", request.extra_key or "")
    namespace = own.get("namespace")
    return RequestSettings(
        scope=repr(tenant) if any(tenant) else "",
        trajectory=trajectory,
        joined_by=joined_by,
        namespace=None if namespace is None else str(namespace),
        draft=own.get("draft", True) is not False,
        seeds=_pieces(own.get("seed_ids"), vocabulary, problems),
        seed_texts=_texts(own.get("seed_texts"), problems),
        spans=_spans(own.get("spans"), prompt_length, problems),
        problems=tuple(problems),
    )


def _pieces(given: Any, vocabulary: int, problems: list[str]) -> tuple[np.ndarray, ...]:
    if given is None:
        return ()
    try:
        flat = np.asarray(given)
        if flat.ndim != 1 or (len(flat) and not np.issubdtype(flat.dtype, np.integer)):
            raise ValueError("needed a flat list of token ids")
        if len(flat) and not (int(flat.min()) >= -1 and int(flat.max()) < vocabulary):
            raise ValueError(f"needed ids below {vocabulary}, -1 between pieces")
    except (ValueError, OverflowError) as error:
        problems.append(f"agentspec_seed_ids: {error}")
        return ()
    cuts = np.flatnonzero(flat == -1)
    pieces = np.split(flat.astype(np.int32), cuts)
    return tuple(p for p in (piece[piece >= 0] for piece in pieces) if len(p))


def _texts(given: Any, problems: list[str]) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(t, str) for t in given):
        problems.append("agentspec_seed_texts: needed a list of strings")
        return ()
    return tuple(given)


def _spans(given: Any, length: int, problems: list[str]) -> tuple[Span, ...] | None:
    if given is None:
        return None
    try:
        flat = [int(x) for x in given]
        if len(flat) % 3:
            raise ValueError("needed (start, end, source) triples")
        spans = tuple(Span(flat[i], flat[i + 1], as_source(flat[i + 2])) for i in range(0, len(flat), 3))
        at = 0
        for span in spans:
            if not at <= span.start <= span.end <= length:
                raise ValueError(f"spans must lie in order inside the prompt of {length} tokens")
            at = span.end
    except (TypeError, ValueError) as error:
        problems.append(f"agentspec_spans: {error}")
        return None
    return spans
