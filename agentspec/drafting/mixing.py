"""The mixture's arithmetic: candidates of a context, their probabilities, learning, and the best-first tree.

Called by mixture.py. May import numpy, tables, contexts and memory's kernel decorator.

Score of a candidate c, a sum of learned weights, one for each feature that is on:

    for each context found, in each table: its state there, or that it is absent there
    and a few of the candidate as a whole: token, last token, longest orders, distance, hits, votes

Probability: softmax over the candidates and an escape (none of them). The weights are learned by AdaGrad on the
cross-entropy of every emitted token. The sum over "absent" features is the same for all candidates but for
those that are present, so it is taken once, and a present candidate adds the difference: the work grows with
the successors that are found, not with contexts times candidates.

Tables: own (this trajectory, all tokens), shared (outputs of the namespace's earlier trajectories), language
(general text; only its first contexts). A pair is a context in a table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agentspec.drafting.contexts import CONTEXTS, HISTORY, NAMES, ORDERS, ROLE, STATE, advance, hashes, recent
from agentspec.drafting.policy import due, widest
from agentspec.drafting.tables import (
    K1,
    M32,
    OFFSET,
    follow_slot,
    insert,
    log2_floor,
    lookup,
    seen_slot,
    wide_line,
)
from agentspec.memory.kernels import kernel

__all__ = [
    "FEATURES",
    "LANGUAGE",
    "LEXICAL",
    "PAIRS",
    "PAIR_NAMES",
    "absorb",
    "contexts",
    "ingest",
    "learn",
    "propose",
    "publish",
]

LANGUAGE = 2  # the first so many contexts are in the language table
PAIRS = 2 * CONTEXTS + LANGUAGE
PAIR_NAMES = tuple(
    [f"own {n}" for n in NAMES] + [f"shared {n}" for n in NAMES] + [f"language {n}" for n in NAMES[:LANGUAGE]]
)
MAX_CANDIDATES = 40
MAX_NODES = 64
SLOTS = 512  # of the hash that finds a candidate by token
KINDS = 4
# State of a candidate in a pair: count {1, 2, 3-4, 5+} x others {0, 1, 2-3, 4-8, 9+} x place {0, 1, 2, 3+} x kind.
PRESENT = 4 * 5 * 4 * KINDS
STRIDE = PRESENT + 16
F_OWN = PAIRS * STRIDE
F_SHARED = F_OWN + 64
F_DISTANCE = F_SHARED + 64
F_HITS = F_DISTANCE + 128
F_SEEN = F_HITS + 64
F_STATES = F_SEEN + 64
F_VOTES = F_STATES + 1024
F_LANGUAGE = F_VOTES + 512
F_ESCAPE = F_LANGUAGE + 256
F_ESCAPE_TOTAL = F_ESCAPE + 64
F_ESCAPE_HITS = F_ESCAPE_TOTAL + 64
F_ESCAPE_LANGUAGE = F_ESCAPE_HITS + 16
FEATURES = F_ESCAPE_LANGUAGE + 16
COMMON = 10
# Lexical features, which know tokens: they have weights of their own, never shared without a namespace.
L_TOKEN = 0
L_LAST = 4096
LEXICAL = L_LAST + 4096
MOST = 2 * PAIRS + COMMON
# Columns of the candidates' int32 array.
TOKEN, COUNT, OWN, SHARED, OWN_STATE, SHARED_STATE, OWN_VOTES, SHARED_VOTES, LANG, KIND = range(10)
COLUMNS = 10
# Rows of a tree: token, parent, whether it was its parent's top guess, its own top guess (-1: not looked at), kind
TREE = 5
# A node is looked into only if a child with this share of its path probability would be among the best. The last
# nodes of a tree are improbable ones, and their children's odds come out too high: looking into all of them takes
# half as long again and drafts 0.3 % worse.
LAZY = 0.5
NEGLIGIBLE = -11.0  # log of the odds against the best under which a candidate counts as impossible
SMALL = 0.003  # gradients under this teach nothing worth the time


@kernel(
    "int64(uint32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1], int64,"
    " int64[::1], int64, int64, int64, boolean,"
    " int32[:, ::1], float64[::1], int32[:, ::1], int32[::1], int64[::1], int64[::1], int64[::1])"
)
def candidates(
    own: Any, shared: Any, language: Any, weights: Any, lexical: Any, mask: Any, hashed: Any, last: Any,
    hits: Any, clock: Any,
    keep: Any, cand: Any, score: Any, features: Any, index: Any, found: Any, absent: Any, escape: Any,
) -> Any:  # fmt: skip
    """The candidates at one context and their probabilities, in score[:n]; n is returned.

    cand[n, COLUMNS], features[n, MOST] (written only if keep), index[SLOTS] all -1 before and after,
    found[PAIRS], absent[PAIRS] (its absent feature, -1: context not found), escape[4] features."""
    longest_own = 0
    longest_shared = 0
    longest_language = 0
    own_total = 0
    distance = 15
    base = 0.0
    # Touch every line that may be looked up, without a branch between: their cache misses overlap.
    touched = 0
    for t in range(3):
        table = own if t == 0 else (shared if t == 1 else language)
        buckets = int(table[0])
        if buckets != 0:
            for context in range(CONTEXTS if t < 2 else LANGUAGE):
                touched += int(table[OFFSET + (((hashed[context] & M32) * buckets) >> 32) * 16])
    found[PAIRS - 1] = touched
    for p in range(PAIRS):
        absent[p] = -1
    for t in range(3):
        table = own if t == 0 else (shared if t == 1 else language)
        if int(table[0]) == 0:
            continue
        alive = True
        best = 0
        many = CONTEXTS if t < 2 else LANGUAGE
        for context in range(many):
            if context < ORDERS and not alive:
                continue
            h = hashed[context]
            p = t * CONTEXTS + context
            if h < 0 or ((mask >> p) & 1) == 0:
                continue
            at = lookup(table, h)
            if at < 0:
                if context < ORDERS:
                    alive = False
                continue
            if context < ORDERS:
                best = context + 1
            head = int(table[at]) & M32
            total = (head >> 13) & 127
            bucket = total - 1
            if total >= 16:
                bucket = 5
            elif total >= 8:
                bucket = 4
            elif total >= 4:
                bucket = 3
            single = 1 if table[at + 2] == 0 else 0
            found[p] = at
            absent[p] = p * STRIDE + PRESENT + bucket * 2 + single
            base += np.float64(weights[absent[p]])
            if t == 0 and context < ORDERS:
                own_total = bucket * 2 + single
                distance = log2_floor((((clock >> 4) - (head >> 20)) & 0xFFF) + 1)
        if t == 0:
            longest_own = best
        elif t == 1:
            longest_shared = best
        else:
            longest_language = best
    # Successors, those of the highest orders first.
    n = 0
    for turn in range(CONTEXTS):
        context = ORDERS - 1 - turn if turn < ORDERS else turn
        for t in range(3):
            p = t * CONTEXTS + context
            if (t == 2 and context >= LANGUAGE) or absent[p] < 0:
                continue
            table = own if t == 0 else (shared if t == 1 else language)
            at = found[p]
            head = int(table[at]) & M32
            total = (head >> 13) & 127
            without = weights[absent[p]]
            first = p * STRIDE
            slot = at + 1
            j = 0
            end = 3
            while True:
                if j == end:
                    if end == 18 or ((head >> 12) & 1) == 0:
                        break
                    line = wide_line(table, hashed[context])
                    if line < 0:
                        break
                    slot = line + 1 - 3
                    end = 18
                s = int(table[slot + j]) & M32
                if s == 0:
                    break
                token = s & 0xFFFFF
                count = (s >> 20) & 63
                i = ((token * K1) & M32) >> 23
                c = -1
                while True:
                    v = index[i]
                    if v < 0:
                        break
                    if cand[v, TOKEN] == token:
                        c = v
                        break
                    i = (i + 1) & (SLOTS - 1)
                if c < 0:
                    if n >= MAX_CANDIDATES:
                        j += 1
                        continue
                    c = n
                    n += 1
                    index[i] = c
                    cand[c, TOKEN] = token
                    cand[c, COUNT] = 0
                    cand[c, OWN] = 0
                    cand[c, SHARED] = 0
                    cand[c, OWN_STATE] = 20
                    cand[c, SHARED_STATE] = 20
                    cand[c, OWN_VOTES] = 0
                    cand[c, SHARED_VOTES] = 0
                    cand[c, LANG] = 0
                    cand[c, KIND] = (s >> 26) & 7 if t == 0 else 6 + t
                    score[c] = 0.0
                others = total - count
                o = 0
                if others >= 9:
                    o = 4
                elif others >= 4:
                    o = 3
                elif others >= 2:
                    o = 2
                elif others >= 1:
                    o = 1
                q = count - 1
                if count >= 5:
                    q = 3
                elif count >= 3:
                    q = 2
                state = q * 5 + o
                f = first + (state * 4 + min(j, 3)) * KINDS + ((s >> 26) & 3)
                score[c] += weights[f] - without
                if keep:
                    m = cand[c, COUNT]
                    features[c, m] = f
                    features[c, m + 1] = -1 - p
                    cand[c, COUNT] = m + 2
                if t == 0:
                    cand[c, OWN_VOTES] += 1
                    if context < ORDERS:
                        if context + 1 == longest_own:
                            cand[c, OWN_STATE] = state
                        elif cand[c, OWN] == 0:
                            cand[c, OWN_STATE] = 21 + min(2, longest_own - context - 2)
                        if cand[c, OWN] == 0:
                            cand[c, OWN] = context + 1
                elif t == 1:
                    cand[c, SHARED_VOTES] += 1
                    if context < ORDERS:
                        if context + 1 == longest_shared:
                            cand[c, SHARED_STATE] = state
                        elif cand[c, SHARED] == 0:
                            cand[c, SHARED_STATE] = 21 + min(2, longest_shared - context - 2)
                        if cand[c, SHARED] == 0:
                            cand[c, SHARED] = context + 1
                elif context < ORDERS and cand[c, LANG] == 0:
                    cand[c, LANG] = context + 1
                j += 1
    last_feature = L_LAST + ((((last + 1) * K1) & M32) >> 21) * 2
    now = int(own[2])
    escape[0] = F_ESCAPE + longest_own * 8 + longest_shared
    escape[1] = F_ESCAPE_TOTAL + own_total + (16 if longest_own > 0 else 0)
    escape[2] = F_ESCAPE_HITS + hits
    escape[3] = F_ESCAPE_LANGUAGE + longest_language
    nothing = 0.0
    for k in range(4):
        nothing += np.float64(weights[escape[k]])
    highest = nothing
    for c in range(n):
        token = int(cand[c, TOKEN])
        own_order = int(cand[c, OWN])
        shared_order = int(cand[c, SHARED])
        top = 1 if (own_order == longest_own and shared_order == longest_shared) else 0
        rank = 0 if c == 0 else (1 if top == 1 else 2)
        seen = int(own[seen_slot(token)]) & M32
        ago = 30
        if seen != 0:
            ago = min(29, log2_floor(max(1, now + 1 - seen)))
        f0 = L_TOKEN + (((token * K1) & M32) >> 20)
        f1 = last_feature + top
        f2 = F_OWN + longest_own * 8 + own_order
        f3 = F_SHARED + longest_shared * 8 + shared_order
        f4 = F_DISTANCE + own_order * 16 + distance
        f5 = F_HITS + hits * 3 + rank
        f6 = F_SEEN + ago
        f7 = F_STATES + int(cand[c, OWN_STATE]) * 25 + int(cand[c, SHARED_STATE])
        f8 = F_VOTES + int(cand[c, OWN_VOTES]) * 17 + int(cand[c, SHARED_VOTES])
        f9 = F_LANGUAGE + (longest_language * 5 + int(cand[c, LANG])) * 8 + min(own_order, 3) * 2 + min(shared_order, 1)
        if keep:
            m = int(cand[c, COUNT])
            features[c, m] = f2
            features[c, m + 1] = f3
            features[c, m + 2] = f4
            features[c, m + 3] = f5
            features[c, m + 4] = f6
            features[c, m + 5] = f7
            features[c, m + 6] = f8
            features[c, m + 7] = f9
            features[c, m + 8] = f0
            features[c, m + 9] = f1
            cand[c, COUNT] = m + COMMON
        x = (
            score[c] + base + lexical[f0] + lexical[f1] + weights[f2] + weights[f3] + weights[f4] +
            weights[f5]
            + weights[f6] + weights[f7] + weights[f8] + weights[f9]
        )  # fmt: skip
        score[c] = x
        if x > highest:
            highest = x
    for c in range(n):
        i = ((int(cand[c, TOKEN]) * K1) & M32) >> 23
        while index[i] >= 0:
            index[i] = -1
            i = (i + 1) & (SLOTS - 1)
    total_mass = math.exp(nothing - highest)
    for c in range(n):
        x = score[c] - highest
        if x > NEGLIGIBLE:
            x = math.exp(x)
            total_mass += x
        else:
            x = 0.0
        score[c] = x
    for c in range(n):
        score[c] /= total_mass
    return n


@kernel("void(float32[::1], int64, int64, float64, float64)")
def _descend(weights: Any, half: Any, f: Any, gradient: Any, rate: Any) -> Any:
    squares = weights[half + f] + gradient * gradient
    weights[half + f] = squares
    weights[f] -= rate * gradient / math.sqrt(squares + 1e-4)


@kernel(
    "void(float32[::1], float32[::1], float64, int64, int64, int32[:, ::1], float64[::1],"
    " int32[:, ::1], int64[::1],"
    " int64[::1], float64[::1])"
)
def _teach(
    weights: Any, lexical: Any, rate: Any, n: Any, truth: Any, cand: Any, score: Any, features: Any,
    absent: Any, escape: Any,
    sums: Any,
) -> Any:  # fmt: skip
    """One AdaGrad step on the cross-entropy; truth is the candidate that came, -1: none of them."""
    left = 1.0
    for c in range(n):
        left -= score[c]
    missed = left - (1.0 if truth < 0 else 0.0)
    for p in range(PAIRS):
        sums[p] = -missed
    for c in range(n):
        g = score[c] - (1.0 if c == truth else 0.0)
        if abs(g) < SMALL:
            for k in range(int(cand[c, COUNT]) - COMMON):
                f = int(features[c, k])
                if f < 0:
                    sums[-1 - f] -= g
            continue
        last = int(cand[c, COUNT]) - 2
        for k in range(last):
            f = int(features[c, k])
            if f < 0:
                sums[-1 - f] -= g
            else:
                _descend(weights, FEATURES, f, g, rate)
        _descend(lexical, LEXICAL, int(features[c, last]), g, rate)
        _descend(lexical, LEXICAL, int(features[c, last + 1]), g, rate)
    for p in range(PAIRS):
        if absent[p] >= 0 and abs(sums[p]) > SMALL:
            _descend(weights, FEATURES, absent[p], sums[p], rate)
    if abs(missed) > SMALL:
        for k in range(4):
            _descend(weights, FEATURES, escape[k], missed, rate)


@kernel("void(uint32[::1], int64, int64, int64)")
def _note(own: Any, before: Any, token: Any, kind: Any) -> Any:
    """Token followed `before`: the small arrays, and the clock."""
    slot = follow_slot(before)
    own[slot + 1] = own[slot]
    own[slot] = token + 1
    own[seen_slot(token)] = int(own[2]) + 1
    own[2] = int(own[2]) + 1


@kernel("void(uint32[::1], int32[::1], int64, int64, int64, int64, int64[::1], uint8[::1])")
def ingest(own: Any, tokens: Any, start: Any, end: Any, kind: Any, mask: Any, state: Any, classes: Any) -> Any:
    """Insert tokens[start:end] (input: nothing to be learned from) with what stands before them."""
    history = np.empty(HISTORY, np.int64)
    hashed = np.empty(CONTEXTS, np.int64)
    for i in range(start, end):
        token = int(tokens[i])
        if token < 0:
            continue
        recent(tokens, i, history)
        hashes(history, state, 0, own, classes, hashed)
        for k in range(CONTEXTS):
            if hashed[k] >= 0 and k != ROLE and ((mask >> k) & 1) == 1:
                insert(own, hashed[k], token, kind, 0, False)
        _note(own, history[0], token, kind)
        advance(state, token, classes)


@kernel("void(int32[::1], uint32[::1], uint8[::1], int64[:, ::1])")
def contexts(tokens: Any, table: Any, classes: Any, out: Any) -> Any:
    """out[n, LANGUAGE]: the hashes of the contexts before each of tokens[n] that the language table has; negative:
    none."""
    history = np.empty(HISTORY, np.int64)
    hashed = np.empty(CONTEXTS, np.int64)
    state = np.zeros(STATE, np.int64)
    for i in range(len(tokens)):
        recent(tokens, i, history)
        hashes(history, state, 0, table, classes, hashed)
        for k in range(LANGUAGE):
            out[i, k] = hashed[k]


@kernel("void(uint32[::1], int64[::1], int64[::1])")
def absorb(table: Any, hashed: Any, tokens: Any) -> Any:
    """Fill the language table: the context with hash hashed[i] was followed by tokens[i], for each i in turn."""
    for i in range(len(tokens)):
        insert(table, hashed[i], tokens[i], 0, 0, False)


@kernel("void(uint32[::1], int32[::1], uint32[:, ::1], int64, int64, int64)")
def publish(shared: Any, tokens: Any, hashed: Any, count: Any, tag: Any, mask: Any) -> Any:
    """Insert an output of `count` tokens, by the hashes it was learned with (0: no context)."""
    for i in range(count):
        for k in range(CONTEXTS):
            h = int(hashed[i, k]) & M32
            if h != 0 and ((mask >> (CONTEXTS + k)) & 1) == 1:
                insert(shared, h, int(tokens[i]), 0, tag, True)
        shared[2] = int(shared[2]) + 1


@kernel(
    "void(uint32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1], int64,"
    " float64, int32[::1], int64, int64, int64,"
    " int64[::1], uint8[::1], uint32[:, ::1], int32[::1], float64[::1])"
)
def learn(
    own: Any, shared: Any, language: Any, weights: Any, lexical: Any, mask: Any, rate: Any, tokens: Any,
    prompt_length: Any,
    start: Any, end: Any, state: Any, classes: Any, kept: Any, kept_tokens: Any, sums_out: Any,
) -> Any:  # fmt: skip
    """Learn from tokens[start:end] of a call and insert them.

    kept[end - start, CONTEXTS], kept_tokens: the hashes and tokens, for publish(). sums_out[3] += log-loss
    (nats),
    tokens that were no candidate, tokens.
    """
    history = np.empty(HISTORY, np.int64)
    hashed = np.empty(CONTEXTS, np.int64)
    cand = np.empty((MAX_CANDIDATES, COLUMNS), np.int32)
    score = np.empty(MAX_CANDIDATES, np.float64)
    features = np.empty((MAX_CANDIDATES, MOST), np.int32)
    index = np.full(SLOTS, -1, np.int32)
    found = np.empty(PAIRS, np.int64)
    absent = np.empty(PAIRS, np.int64)
    escape = np.empty(4, np.int64)
    sums = np.empty(PAIRS, np.float64)
    for i in range(start, end):
        token = int(tokens[i])
        recent(tokens, i, history)
        hashes(history, state, i - prompt_length, own, classes, hashed)
        n = candidates(
            own, shared, language, weights, lexical, mask, hashed, history[0], state[5], int(own[2]), True,
            cand, score,
            features, index, found, absent, escape,
        )  # fmt: skip
        truth = -1
        best = -1.0
        guess = -1
        left = 1.0
        for c in range(n):
            left -= score[c]
            if cand[c, TOKEN] == token:
                truth = c
            if score[c] > best:
                best = score[c]
                guess = c
        if truth >= 0:
            sums_out[0] -= math.log(max(score[truth], 1e-9))
        else:
            sums_out[0] -= math.log(max(left, 1e-9))
            sums_out[1] += 1.0
        sums_out[2] += 1.0
        _teach(weights, lexical, rate, n, truth, cand, score, features, absent, escape, sums)
        state[5] = ((state[5] << 1) | (1 if (truth >= 0 and truth == guess) else 0)) & 15
        for k in range(CONTEXTS):
            h = hashed[k]
            if h >= 0:
                if ((mask >> k) & 1) == 1:
                    insert(own, h, token, 2, 0, False)
                kept[i - start, k] = h
            else:
                kept[i - start, k] = 0
        kept_tokens[i - start] = token
        _note(own, history[0], token, 2)
        advance(state, token, classes)


@kernel(
    "int64(uint32[::1], uint32[::1], uint32[::1], float32[::1], float32[::1], int64,"
    " int32[::1], int64, int64, int64[::1],"
    " uint8[::1], int64, int64, boolean, float64[::1], float64[::1], int32[:, ::1], float64[::1])"
)
def propose(
    own: Any, shared: Any, language: Any, weights: Any, lexical: Any, mask: Any, tokens: Any,
    prompt_length: Any, size: Any,
    state: Any, classes: Any, most: Any, deepest: Any, tree: Any, price: Any, cost: Any, nodes: Any, paths: Any,
) -> Any:  # fmt: skip
    """The best draft of at most `most` nodes: nodes[TREE, >= most], paths[>= most] path probabilities; how
    many.

    Best-first by path probability, so the first n nodes are the best tree of n (but for what LAZY leaves out); n maximises
    sum(paths[:n]) - due(n) (policy.py; price and cost as in DraftLimits, cost empty where the price stands). It stops
    when not even certain children could change that."""
    most = min(most, MAX_NODES)
    history = np.empty(HISTORY, np.int64)
    hashed = np.empty(CONTEXTS, np.int64)
    cand = np.empty((MAX_CANDIDATES, COLUMNS), np.int32)
    score = np.empty(MAX_CANDIDATES, np.float64)
    features = np.empty((1, MOST), np.int32)
    index = np.full(SLOTS, -1, np.int32)
    found = np.empty(PAIRS, np.int64)
    absent = np.empty(PAIRS, np.int64)
    escape = np.empty(4, np.int64)
    states = np.empty((MAX_NODES, STATE), np.int64)
    depths = np.empty(MAX_NODES, np.int64)
    # Pending children, the most probable first; never more than there is room for.
    waiting = 0
    chance = np.empty(MAX_NODES + 1, np.float64)
    child = np.empty((MAX_NODES + 1, 4), np.int64)  # token, parent, top, kind
    here = np.empty(STATE, np.int64)
    n = 0
    node = -1
    gains = np.zeros(MAX_NODES + 1, np.float64)
    ratio = 1.0 / cost[0] if len(cost) > 0 else 0.0
    best_gain = 0.0
    best = 0
    while most > 0:
        depth = 0
        probability = 1.0
        if node < 0:
            recent(tokens, size, history)
            for k in range(STATE):
                here[k] = state[k]
        else:
            probability = paths[node]
            depth = depths[node]
            at = node
            k = 0
            while at >= 0 and k < HISTORY:
                history[k] = nodes[0, at]
                at = nodes[1, at]
                k += 1
            ended = False
            while k < HISTORY:
                j = size - 1 - (k - depth)
                if j < 0 or ended:
                    history[k] = -1
                else:
                    history[k] = int(tokens[j])
                    if history[k] < 0:
                        ended = True
                k += 1
            for k in range(STATE):
                here[k] = states[node, k]
        if depth < deepest and (waiting < most - n or chance[most - n - 1] < LAZY * probability):
            hashes(history, here, size + depth - prompt_length, own, classes, hashed)
            m = candidates(
                own, shared, language, weights, lexical, mask, hashed, history[0], here[5],
                int(own[2]) + depth, False, cand,
                score, features, index, found, absent, escape,
            )  # fmt: skip
            guess = -1
            high = -1.0
            for c in range(m):
                if score[c] > high:
                    high = score[c]
                    guess = c
            if node >= 0:
                nodes[3, node] = int(cand[guess, TOKEN]) if guess >= 0 else -1
            else:
                nodes[3, most] = int(cand[guess, TOKEN]) if guess >= 0 else -1
            room = most - n
            for c in range(m):
                if not tree and c != guess:
                    continue
                p = probability * score[c]
                if waiting >= room:
                    if p <= chance[room - 1]:
                        continue
                    waiting = room - 1
                k = waiting
                while k > 0 and chance[k - 1] < p:
                    chance[k] = chance[k - 1]
                    for x in range(4):
                        child[k, x] = child[k - 1, x]
                    k -= 1
                chance[k] = p
                child[k, 0] = int(cand[c, TOKEN])
                child[k, 1] = node
                child[k, 2] = 1 if c == guess else 0
                child[k, 3] = int(cand[c, KIND])
                waiting += 1
        if waiting == 0:
            break
        p = chance[0]
        pays = False
        for m in range(n + 1, most + 1):
            if gains[n] + (m - n) * p - due(price, cost, ratio, m) > best_gain:
                pays = True
                break
        if not pays:
            break
        parent = child[0, 1]
        if parent < 0:
            for k in range(STATE):
                states[n, k] = state[k]
            depths[n] = 1
        else:
            for k in range(STATE):
                states[n, k] = states[parent, k]
            depths[n] = depths[parent] + 1
        states[n, 5] = ((states[n, 5] << 1) | child[0, 2]) & 15
        advance(states[n], child[0, 0], classes)
        nodes[0, n] = child[0, 0]
        nodes[1, n] = parent
        nodes[2, n] = child[0, 2]
        nodes[3, n] = -1
        nodes[4, n] = child[0, 3]
        paths[n] = p
        waiting -= 1
        for k in range(waiting):
            chance[k] = chance[k + 1]
            for x in range(4):
                child[k, x] = child[k + 1, x]
        node = n
        n += 1
        gains[n] = gains[n - 1] + p
        if len(cost) > 0 and 1.0 + gains[n] > ratio * cost[n]:
            ratio = (1.0 + gains[n]) / cost[n]
            best = widest(gains, n, price, cost, ratio)
            best_gain = gains[best] - due(price, cost, ratio, best)
        else:
            gain = gains[n] - due(price, cost, ratio, n)
            if gain > best_gain:
                best_gain = gain
                best = n
        if n >= most:
            break
    return best


@kernel("void(int64[::1], int32[::1], int64, int64, int64, int32[:, ::1], int64, uint8[::1])")
def follow(state: Any, tokens: Any, start: Any, end: Any, most: Any, nodes: Any, drafted: Any, classes: Any) -> Any:
    """The call's state after tokens[start:end] came where nodes[:, :drafted] had been drafted.

    Whether the top guess came true is read off the draft; past a node that was not looked into, it counts as true.
    """
    node = -1
    inside = True
    for i in range(start, end):
        token = int(tokens[i])
        hit = 1
        if inside:
            guess = int(nodes[3, most]) if node < 0 else int(nodes[3, node])
            if guess >= 0 and guess != token:
                hit = 0
            after = -1
            for k in range(drafted):
                if nodes[1, k] == node and nodes[0, k] == token:
                    after = k
                    break
            if after < 0:
                inside = False
            node = after
        state[5] = ((state[5] << 1) | hit) & 15
        advance(state, token, classes)


@kernel("void(int64[::1], int32[::1], int64, int64, uint8[::1])")
def settle(state: Any, tokens: Any, start: Any, end: Any, classes: Any) -> Any:
    """The state after tokens[start:end], whatever it was before."""
    for k in range(5):
        state[k] = 0
    for i in range(start, end):
        if tokens[i] >= 0:
            advance(state, int(tokens[i]), classes)
