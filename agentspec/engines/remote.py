"""What a remote engine and its servers say to each other: Ask, Piece, ServerInfo, Server. Imports no torch.

sglang.py holds the engine; sglang_wire.py and openai_wire.py are its servers, one for each way of asking.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentspec.chat import Grammar, MessageDelta
from agentspec.engines.base import TokenLogprob
from agentspec.engines.request import Constraint, GenerationRequest
from agentspec.errors import InvalidRequestError
from agentspec.loop import Seed

__all__ = ["Ask", "Notice", "Piece", "ServedGrammar", "Server", "ServerInfo", "grammar_of"]


@dataclass(slots=True, frozen=True)
class Notice:
    """Something that this server doesn't give. subject: what; text: what that means; remedy: what mends it, or ""."""

    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(slots=True)
class ServerInfo:
    """What a server says of itself.

    kind:       for CallStats.engine: "sglang", "vllm", "openai"
    model:      the name it answers to; path: where its tokenizer can be had, or ""
    context_length: most tokens of prompt and output; None: it doesn't say
    plugin:     it runs AGENTSPEC
    ids:        its answers have token ids
    messages:   it takes messages, not ids
    seeded:     a request's seed decides the sample
    grammar:    how it takes grammars: "xgrammar", "llguidance", ..., "" not at all
    """

    kind: str
    model: str
    path: str = ""
    context_length: int | None = None
    plugin: bool = False
    ids: bool = True
    messages: bool = False
    seeded: bool = True
    grammar: str = ""
    notices: list[Notice] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Ask:
    """One choice, to be asked for.

    id:        the request's, unique, for aborting it
    seed:      of this choice's sample; None: the server's own
    room:      most tokens to emit
    bad_words: as ids
    session:   the trajectory's name on the server; None: it has none
    namespace: whom the trajectory shares with
    seeds, skeletons: draft material: new seeds of the trajectory; ids that the output is likely to hold
    chat:      the messages and chat options, where the call was a chat
    """

    id: str
    request: GenerationRequest
    seed: int | None
    room: int
    bad_words: Sequence[Sequence[int]] = ()
    session: str | None = None
    namespace: str | None = None
    seeds: Sequence[Seed] = ()
    skeletons: Sequence[Sequence[int]] = ()
    chat: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Piece:
    """What arrived together.

    ids, logprobs: the new ones
    finish: "stop", "length", or "" while there is more; matched: the id or text that it ended at, where known
    meta:   what the server tells of the call so far, in SGLang's words (meta_info)
    tokens: how many tokens the server counts here, where that isn't the number of ids; None: it is
    text, delta: from a server that takes messages: new content, and what it adds to the message
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish: str = ""
    matched: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    text: str = ""
    delta: MessageDelta | None = None


class Server(Protocol):
    """One way of asking. All but `body` runs in the engine's loop.

    body:   what is sent for an Ask; raises InvalidRequestError for what this server can't do, before anything is sent
    stream: the pieces of the answer; closing it ends the request. Raises ServerError, InvalidRequestError
    abort:  end a request of which the server may not have noticed that nobody listens; never raises
    """

    host: str
    port: int | None

    async def describe(self) -> ServerInfo: ...

    def body(self, ask: Ask) -> dict[str, Any]: ...

    def stream(self, ask: Ask, body: dict[str, Any], headers: Mapping[str, str]) -> AsyncIterator[Piece]: ...

    async def abort(self, id: str) -> None: ...

    async def close(self) -> None: ...

    def abandon(self) -> None: ...


@dataclass(slots=True, frozen=True)
class ServedGrammar:
    """A grammar that the server enforces: what SGLangEngine.compile gives, for a request's `constraint`."""

    grammar: Grammar

    def __call__(self) -> Constraint:
        raise InvalidRequestError("this grammar was compiled for a server; compile it with the engine that runs it")


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """The grammar of a request. Raises InvalidRequestError for a constraint that would have to run here."""
    if request.constraint is None:
        return None
    if not isinstance(request.constraint, ServedGrammar):
        raise InvalidRequestError(
            "constraint: a server can't call back for every token; pass a grammar (engine.compile(Grammar...), or chat's "
            "response_format and grammar)"
        )
    return request.constraint.grammar
