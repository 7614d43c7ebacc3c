"""encodable: text that a tokenizer can read. Used wherever a caller's text comes in. Imports nothing but errors."""

from __future__ import annotations

from agentspec.errors import InvalidRequestError

__all__ = ["encodable"]


def encodable(what: str, text: str) -> str:
    """The text as it is. Raises InvalidRequestError for half a surrogate pair, which no encoding of a text has."""
    try:
        str.encode(text, "utf-8")  # not as a subclass may encode
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        raise InvalidRequestError(
            f"{what}: needed text that UTF-8 can encode, got half a surrogate pair (a badly decoded file?) at character "
            f"{error.start}, in {around!r}; read it with errors='replace', or "
            f"text.encode('utf-8', 'replace').decode() replaces it"
        ) from error
    return text
