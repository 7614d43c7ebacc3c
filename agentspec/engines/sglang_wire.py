"""SGLang's own words: a request for /generate, its answer, and what the server tells of itself. No HTTP but SGLangHttp.

Ids go in and out, so history stays exact. What the plugin reads (session_id, custom_params) is told in
integrations/sglang/sglang_agentspec/requests.py. Used by sglang.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from agentspec.chat import Grammar
from agentspec.chat.structural import structural_tag
from agentspec.engines.base import CallStats, TokenLogprob
from agentspec.engines.http import HttpServer, refusal
from agentspec.engines.remote import Ask, Notice, Piece, ServerInfo, grammar_of
from agentspec.errors import GrammarError, InvalidRequestError, ServerError

__all__ = ["AnswerReader", "SGLangHttp", "body", "count", "plugin_words", "server_info"]

_FORBIDDEN = -1e30  # JSON has no -inf; as a logit's bias this is one
_MOST_STOPS = 32  # of texts that SGLang looks for; more are looked for here only
_LARGEST_SEED = 2**63 - 1
# (option, least, most): what SGLang takes of what GenerationRequest takes
_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 2.0),
)


def body(ask: Ask, info: ServerInfo, scope: str | None = None) -> dict[str, Any]:
    """The JSON for /generate. scope: the tenant, for SGLang's cache_salt. Raises InvalidRequestError, GrammarError."""
    request = ask.request
    for option, low, high in _RANGES:
        value = getattr(request, option)
        if not low <= value <= high:
            raise InvalidRequestError(f"{option}: SGLang takes {low:g} to {high:g}, got {value!r}")
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.room,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_new_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
    }
    # The engine looks for stops itself; the server only has to end soon. It ignores min_tokens for texts.
    if request.stop_texts and not request.min_tokens and len(request.stop_texts) <= _MOST_STOPS:
        sampling["stop"] = list(request.stop_texts)
    single = [s[0] for s in request.stop_sequences if len(s) == 1]
    if single:
        sampling["stop_token_ids"] = single
    bias = {str(token): max(float(value), _FORBIDDEN) for token, value in request.logit_bias.items()}
    for word in ask.bad_words:
        if len(word) != 1:
            raise InvalidRequestError(
                f"bad_words: SGLang can forbid single ids only, and {list(word)} are {len(word)}; leave it out, or run it "
                f"on LocalEngine"
            )
        bias[str(word[0])] = _FORBIDDEN
    if bias:
        sampling["logit_bias"] = bias
    if ask.seed is not None:
        if ask.seed > _LARGEST_SEED:
            raise InvalidRequestError(f"seed: SGLang takes up to {_LARGEST_SEED}, got {ask.seed}")
        sampling["sampling_seed"] = ask.seed
    grammar = grammar_of(request)
    if grammar is not None:
        sampling |= _served(grammar, info.grammar)
    made: dict[str, Any] = {
        "rid": ask.id,
        "input_ids": [int(i) for i in request.input_ids],
        "sampling_params": sampling,
        "stream": True,
    }
    if request.logprobs or request.top_logprobs:
        made |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": request.top_logprobs}
    if scope is not None:
        made["cache_salt"] = scope
    if ask.session is not None:
        made["session_id"] = ask.session
    if info.plugin:
        told = plugin_words(ask)
        if told:
            sampling["custom_params"] = told
    return made


def plugin_words(ask: Ask) -> dict[str, Any]:
    """What the plugin is told of a call, for custom_params."""
    request = ask.request
    told: dict[str, Any] = {}
    if not request.draft:
        return {"agentspec_draft": False}
    if ask.namespace is not None:
        told["agentspec_namespace"] = ask.namespace
    pieces = [list(piece) for piece in ask.skeletons]
    pieces += [list(seed.content) for seed in ask.seeds if not isinstance(seed.content, str)]
    if pieces:
        told["agentspec_seed_ids"] = [int(i) for piece in pieces for i in (*piece, -1)][:-1]
    texts = [seed.content for seed in ask.seeds if isinstance(seed.content, str)]
    if texts:
        told["agentspec_seed_texts"] = texts
    if request.spans:
        told["agentspec_spans"] = [int(x) for s in request.spans for x in (s.start, s.end, s.source)]
    return told


def _served(grammar: Grammar, backend: str) -> dict[str, str]:
    """A grammar as the sampling parameter that the server's grammar backend takes."""
    if not backend or backend == "none":
        raise GrammarError("grammar: this server runs without grammars; start it with --grammar-backend xgrammar")
    kind, text = grammar.source if grammar.source is not None and not grammar.parts else ("", "")
    if backend == "llguidance" and not grammar.parts:
        return {"ebnf": grammar.lark}  # it reads Lark there too
    if backend == "xgrammar" and kind not in ("regex", "ebnf"):
        return {"structural_tag": json.dumps(structural_tag(grammar))}
    if kind:
        return {kind: text}
    what = "this one is made of several" if backend == "llguidance" else "this is more than a JSON schema or a pattern"
    raise GrammarError(
        f"grammar: the server's grammar backend {backend} can't take it, {what}; start it with --grammar-backend xgrammar"
    )


class AnswerReader:
    """Turns SGLang's outputs of one request into Pieces, whether each repeats what came before (its default) or not."""

    def __init__(self, where: str = "SGLang") -> None:
        self._where = where
        self._seen = 0

    def piece(self, out: Mapping[str, Any]) -> Piece:
        """Raises ServerError for what is no output, InvalidRequestError where the server refuses the request."""
        if "error" in out:
            raise self._failed(out["error"])
        meta, ids = out.get("meta_info"), out.get("output_ids")
        if not isinstance(meta, Mapping) or not isinstance(ids, list):
            raise ServerError(
                f"{self._where}: needed output_ids and meta_info, got {json.dumps(out, default=str)[:200]}"
            )
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else None
        if kind == "abort":
            assert isinstance(reason, Mapping)
            raise self._failed({"message": reason.get("message"), "code": reason.get("status_code")})
        total = meta.get("completion_tokens")
        if isinstance(total, bool) or not isinstance(total, int) or not self._seen <= total:
            raise ServerError(f"{self._where}: needed completion_tokens from {self._seen} on, got {total!r}")
        if len(ids) == total:
            begin = self._seen
        elif len(ids) == total - self._seen:
            begin = 0
        else:
            raise ServerError(
                f"{self._where}: {len(ids)} output_ids after {self._seen} make no {total} completion tokens"
            )
        new = ids[begin:]
        if not all(type(i) is int and i >= 0 for i in new):
            raise ServerError(f"{self._where}: needed token ids, got {new!r:.120}")
        self._seen = total
        return Piece(
            new,
            _logprobs(meta, len(new)),
            "" if kind is None else "length" if kind == "length" else "stop",
            reason.get("matched") if isinstance(reason, Mapping) else None,
            meta,
        )

    def _failed(self, said: Any) -> Exception:
        code = said.get("code") if isinstance(said, Mapping) else None
        words = said.get("message") if isinstance(said, Mapping) else said
        try:
            status = int(code) if code is not None else 500
        except (TypeError, ValueError):
            status = 500
        return refusal(self._where, status, str(words))


def _logprobs(meta: Mapping[str, Any], new: int) -> list[TokenLogprob]:
    """Those of the last `new` tokens; they come whole or in pieces, as the ids do."""
    given = meta.get("output_token_logprobs")
    if not given or not new:
        return []
    top = meta.get("output_top_logprobs") or []
    best: list[Sequence[Any]] = [entry or () for entry in top[-new:]] if len(top) >= new else [()] * new
    return [
        TokenLogprob(int(i), float(value), tuple((int(t), float(v)) for v, t, *_ in likely))
        for (value, i, *_), likely in zip(given[-new:], best, strict=True)
    ]


def count(stats: CallStats, meta: Mapping[str, Any], tokens: int, arrivals: int) -> None:
    """Add one choice's figures by DESIGN.md's definitions.

    tokens, arrivals: of this choice, as they came. SGLang counts verify steps after the prefill's own token, so one
    is added; its proposed drafts assume the widest draft everywhere, so the histogram of widths is summed instead.
    A call that was cut short, and another server, has no such figures: each arrival counts as a step.
    """
    after = meta.get("spec_verify_ct")
    if not isinstance(after, int):
        off = meta.get("finish_reason") is not None  # SGLang without speculation
        steps = tokens if off else arrivals
        stats.verify_steps += steps
        _undrafted(stats, "off" if off else "not told by the server", steps)
        return
    stats.mismatches = None  # not told: the histograms of widths and of accepted drafts aren't joint
    stats.verify_steps += min(after + 1, tokens)
    widths = meta.get("spec_cap_lens_histogram")
    if isinstance(widths, list):
        stats.proposed += sum(width * n for width, n in enumerate(widths)) - sum(widths)
        plain = sum(int(n) for n in widths[:2])
    else:
        stats.proposed += int(meta.get("spec_num_proposed_drafts") or 0)
        plain = 0
    correct = int(meta.get("spec_num_correct_drafts") or 0)
    stats.accepted += max(0, min(correct, tokens - after))  # not those after a stop
    told = (meta.get("agentspec") or [{}])[0]
    reason = told.get("reason") if isinstance(told, Mapping) else None
    _undrafted(stats, {None: "no match or not worth it", "switched_off": "off"}.get(reason, str(reason)), plain)


def _undrafted(stats: CallStats, reason: str, steps: int) -> None:
    if steps > 0:
        stats.not_drafted[reason] = stats.not_drafted.get(reason, 0) + steps


def server_info(model: Mapping[str, Any], server: Mapping[str, Any]) -> ServerInfo:
    """From /model_info and /server_info (or an Engine's)."""
    path = str(model.get("model_path") or server.get("model_path") or "")
    algorithm = server.get("speculative_algorithm")
    context = _whole(server.get("context_length"), server.get("max_req_input_len"))
    info = ServerInfo(
        kind="sglang",
        model=str(model.get("served_model_name") or path),
        path=str(model.get("tokenizer_path") or path),
        context_length=context,
        plugin=algorithm == "AGENTSPEC",
        seeded=bool(server.get("enable_deterministic_inference")),
        grammar=str(server.get("grammar_backend") or ("xgrammar" if "grammar_backend" not in server else "")),
    )
    if not info.plugin:
        instead = f"it runs {algorithm}" if algorithm else "it runs without speculation"
        info.notices.append(
            Notice(
                "plugin",
                f"the server doesn't run AGENTSPEC, {instead}: no drafts from trajectories' memory, the text is the same",
                "start it with --speculative-algorithm AGENTSPEC, the package agentspec-decoding installed beside SGLang",
            )
        )
    return info


def _whole(*values: Any) -> int | None:
    found = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    return found[0] if found else None


class SGLangHttp:
    """A running SGLang server, or its router. scope: the tenant."""

    def __init__(self, http: HttpServer, scope: str | None = None) -> None:
        self._http = http
        self._scope = scope
        self.host, self.port = http.host, http.port
        self.info = ServerInfo("sglang", "")

    @staticmethod
    async def found(http: HttpServer) -> bool:
        """Whether this is one. Other servers say in many ways that they don't know the route."""
        try:
            told = await http.get("/get_model_info")
        except InvalidRequestError:
            return False
        except ServerError as error:
            if error.status == 200:  # a page
                return False
            raise
        return isinstance(told, Mapping) and "model_path" in told

    async def describe(self) -> ServerInfo:
        model = await self._http.get("/get_model_info")
        if not isinstance(model, Mapping) or not model.get("model_path"):
            raise ServerError(
                f"{self._http.url}: needed an SGLang server, this one has no /get_model_info; for another "
                f"OpenAI-compatible server pass api='completions' or 'chat'"
            )
        server = await self._http.get("/get_server_info")
        self.info = server_info(model, server if isinstance(server, Mapping) else {})
        return self.info

    def body(self, ask: Ask) -> dict[str, Any]:
        return body(ask, self.info, self._scope)

    async def stream(self, ask: Ask, body: dict[str, Any], headers: Mapping[str, str]) -> AsyncIterator[Piece]:
        reader = AnswerReader(self._http.url)
        if ask.session is not None:
            headers = {**headers, "X-SMG-Routing-Key": ask.session.encode("ascii", "replace").decode()}
        events = self._http.events("/generate", body, headers)
        try:
            async for event in events:
                piece = reader.piece(event)
                yield piece
                if piece.finish:
                    return
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def abort(self, id: str) -> None:
        try:
            await self._http.post("/abort_request", {"rid": id})
        except Exception:
            pass  # it has noticed that we hung up, or soon will

    async def close(self) -> None:
        await self._http.close()

    def abandon(self) -> None:
        self._http.abandon()
