"""The contexts in which the mixture looks a token up, each as a 32-bit hash.

Called by the mixture's kernels. May import numpy, tables and memory's kernel decorator.

a, b, c, d are the last tokens, a the latest.

     0..4   the last 1, 2, 3, 8, 16 tokens
     5      the line's first token, a
     6      a and what followed it the last two times
     7      the last three punctuation, newline or special tokens, a
     8      the last two of them, and the classes of a and b
     9      the role of the last input, how far into the output we are
    10      b d and the class of a

The state of a call (int64[STATE]) carries what is not in the last tokens: 0 the line's first token, 1..3 the
last punctuation tokens, 4 whether a new line begins, 5 the last four top guesses' hits (bits), 6 the role."""

from __future__ import annotations

from typing import Any

from agentspec.drafting.tables import M32, follow_slot, log2_floor, mix
from agentspec.memory.kernels import kernel

__all__ = ["CONTEXTS", "HISTORY", "NAMES", "ORDERS", "ROLE", "STATE", "advance", "hashes", "recent"]

NAMES = (
    "1", "2", "3", "8", "16", "line", "indirect", "punct3", "punct2", "role", "-2-4",
)  # fmt: skip
CONTEXTS = len(NAMES)
ORDERS = 5  # the first ORDERS contexts are the last k tokens, by rising k
ROLE = 9  # the context that means nothing in input
HISTORY = 16
STATE = 8
NO_CONTEXT = -1
# Classes of tokens (vocabulary.py); a newline anywhere in the token adds NEWLINE.
WORD, CONTINUATION, DIGIT, PUNCTUATION, SPACE, SPECIAL = range(6)
NEWLINE = 8


@kernel("int64(uint8[::1], int64)")
def class_of(classes: Any, token: Any) -> Any:
    if token < 0 or token >= len(classes):
        return 0
    return int(classes[token])


@kernel("void(int64[::1], int64, uint8[::1])")
def advance(state: Any, token: Any, classes: Any) -> Any:
    """The call's state after one more token."""
    if state[4] == 1:
        state[0] = token
        state[4] = 0
    c = class_of(classes, token)
    if c & NEWLINE:
        state[4] = 1
    kind = c & 7
    if kind == PUNCTUATION or kind == SPECIAL or (c & NEWLINE) != 0:
        state[3] = state[2]
        state[2] = state[1]
        state[1] = token


@kernel("void(int32[::1], int64, int64[::1])")
def recent(tokens: Any, size: Any, history: Any) -> Any:
    """The last HISTORY tokens of tokens[:size], the latest first; -1 where there is none, or behind a
    seam."""
    open_ = True
    for i in range(HISTORY):
        j = size - 1 - i
        if j < 0 or not open_:
            history[i] = -1
        else:
            history[i] = int(tokens[j])
            if history[i] < 0:
                open_ = False


@kernel("void(int64[::1], int64[::1], int64, uint32[::1], uint8[::1], int64[::1])")
def hashes(history: Any, state: Any, output_length: Any, own: Any, classes: Any, out: Any) -> Any:
    """out[CONTEXTS]: each context's hash, NO_CONTEXT where the history is too short for it."""
    h = 0x1234567
    k = 0
    for i in range(16):
        t = history[i]
        if t < 0:
            break
        h = mix(h, t)
        if i < 3 or i == 7 or i == 15:
            out[k] = mix(h, k)
            k += 1
    while k < ORDERS:
        out[k] = NO_CONTEXT
        k += 1
    a = history[0]
    b = history[1]
    d = history[3]
    out[5] = mix(mix(5, state[0]), a)
    slot = follow_slot(a)
    out[6] = mix(mix(mix(6, a), int(own[slot]) & M32), int(own[slot + 1]) & M32)
    out[7] = mix(mix(mix(mix(7, state[1]), state[2]), state[3]), a)
    class_a = class_of(classes, a) & 7
    class_b = class_of(classes, b) & 7
    out[8] = mix(mix(mix(mix(8, state[1]), state[2]), class_a), class_b)
    far = output_length
    if far > 8:
        far = 8 + log2_floor(output_length >> 2)
    out[ROLE] = mix(mix(ROLE, state[6]), far)
    out[10] = mix(mix(mix(10, b), d), class_a)
