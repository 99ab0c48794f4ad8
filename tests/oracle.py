"""Every policy by its definition, in float64 numpy, one token at a time. It imports no jaxkv.

A token's number is its index in the sequence. A rule takes the `Inputs` of one KV head. For each
token it yields (view, cached): lists of (number, log weight), oldest token first.
- view: the tokens that the query attends to. An entry may have a third item, a factor of the value.
- cached: the tokens in the cache after this step.
- A third list is yielded where cache-relative positions have gaps: the position of each token in
  view.

theta: a rotary base, or frequencies and an amplitude (`yarn`). None: no rotation.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Inputs(NamedTuple):
    """The tokens of one KV head of one sequence.

    tokens, prompt: the length of the sequence, and of the prompt in it. rng: two uint32.
    q [T,G,H], k, v [T,H]: before rotation. start: position of the first token. slopes: ALiBi
    slopes of the query heads.
    """

    tokens: int
    prompt: int
    rng: Any
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    start: int = 0
    slopes: Any = None


def in_int8(rows):
    """Rows [...,H] as a cache in int8 has them: whole multiples of one bfloat16 scale per row."""
    scale = (np.abs(rows).max(axis=-1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    scale = scale.astype(np.float64)
    return np.clip(np.rint(rows / np.where(scale > 0, scale, 1)), -127, 127) * scale


def stored_in_int8(k, v, exact, theta, start=0):
    """The tokens [T,K,H] of such a cache, keys before rotation: the first `exact` as they are."""
    rotated = k
    if theta is not None:
        rotated = rotate_heads(k, start + np.arange(len(k)), theta)
    found = in_int8(rotated)
    if theta is not None:
        found = rotate_heads(found, -start - np.arange(len(k)), theta)
    later = np.arange(len(k))[:, None, None] >= exact
    return np.where(later, found, k), np.where(later, in_int8(v), v)


def full():
    """Every token."""
    return streaming(0, 10**9)


def window(size):
    """The newest tokens."""
    return streaming(0, size)


def streaming(sinks, size):
    """Sinks and a window: the first tokens and the newest ones."""

    def rule(inputs):
        cached = []
        for number in range(inputs.tokens):
            cached.append((number, 0.0))
            if len(cached) > sinks + size:
                del cached[sinks]
            yield list(cached), list(cached)

    return rule


def reservoir(sinks, size, sample, scheme="uniform", weighted=1):
    """Sinks, a window, and a sample of the evicted tokens, updated at each eviction.

    weighted: the exponent of a sampled token's weight, 0 if it counts once.
    """

    def rule(inputs):
        first, newest, sampled, num_evicted = [], [], [], 0
        for number in range(inputs.tokens):
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                evicted = newest.pop(0)
                draw = priority(evicted + inputs.start, inputs.rng)
                if num_evicted < sample:
                    sampled.append(evicted)
                elif scheme == "uniform":
                    worst = max(sampled, key=lambda n: priority(n + inputs.start, inputs.rng))
                    if draw < priority(worst + inputs.start, inputs.rng):
                        sampled[sampled.index(worst)] = evicted
                elif draw % (sample + 1) < sample:
                    sampled[draw % (sample + 1)] = evicted
                num_evicted += 1
            weight = weighted * math.log(max(1, num_evicted / sample))
            view = [(n, 0.0) for n in first + newest] + [(n, weight) for n in sampled]
            yield sorted(view), sorted(view)

    return rule


def merge_and_reduce(sinks, size, levels, slots, choose, weighted=1):
    """Sinks, a window, and the evicted tokens in levels of `slots`. A full level is halved.

    choose(numbers, uniforms, inputs) returns the half that moves up one level. weighted: the
    exponent of a sampled token's weight, 0 if it counts once.
    """

    def rule(inputs):
        first, newest, filled, num_evicted, raised = [], [], [[] for _ in range(levels)], 0, 0
        # The number of evicted tokens before each token, and when level 0 was last emptied.
        evicted_before, emptied = {}, 0
        for number in range(inputs.tokens):
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                evicted, group = newest.pop(0), 2**raised
                begin = num_evicted - num_evicted % group
                evicted_before[evicted] = num_evicted
                if num_evicted - begin == priority(begin, inputs.rng) * group // 2**32:
                    filled[0].append(evicted)
                num_evicted, level = num_evicted + 1, 0
                while num_evicted % group == 0 and len(filled[level]) == slots:
                    at = num_evicted * 0x9E3779B1 + level * slots
                    uniforms = [uniform(at + i, inputs.rng) for i in range(slots)]
                    half = choose(filled[level], uniforms, inputs)
                    if level == levels - 1:
                        filled[level], raised = half, raised + 1
                        break
                    emptied = num_evicted
                    filled[level] = []
                    level += 1
                    filled[level] += half
            places, at = {}, len(first)
            for level in range(levels - 1, 0, -1):
                places |= {n: at + i for i, n in enumerate(filled[level])}
                at += len(filled[level])
            # A group of level 0 has its position from its first token on.
            places |= {n: at + ((evicted_before[n] - emptied) >> raised) for n in filled[0]}
            at += -(-(num_evicted - emptied) // 2**raised)
            places |= {n: at + i for i, n in enumerate(newest)}
            places |= {n: i for i, n in enumerate(first)}
            view = [(n, 0.0) for n in first + newest]
            for level, numbers in enumerate(filled):
                view += [(n, weighted * (level + raised) * math.log(2)) for n in numbers]
            yield sorted(view), sorted(view), [places[n] for n, _ in sorted(view)]

    return rule


def heavy_hitters(heavy, size, theta, scale):
    """H2O: a window, and the older tokens with the most attention so far."""

    def rule(inputs):
        cached, score = [], {}
        place = np.arange(inputs.tokens)
        k = inputs.k if theta is None else rotate(inputs.k, place, theta)
        for number in range(inputs.tokens):
            if len(cached) == heavy + size:
                cached.remove(min(cached[: heavy + 1], key=lambda n: (score[n], n)))
            cached.append(number)
            score[number] = 0.0
            for query in inputs.q[number]:
                query = query if theta is None else rotate(query[None], [number], theta)[0]
                e = np.exp(k[cached] @ query * scale)
                for n, share in zip(cached, e / e.sum(), strict=True):
                    score[n] += share
            yield [(n, 0.0) for n in cached], [(n, 0.0) for n in cached]

    return rule


def compressed(sinks, size, rounds, choose, weight=None):
    """Prompt compression: of a finished prompt, sinks, window, and a choice of the other tokens.

    Before the end of prefill, and after the prompt, every token is cached.

    choose(numbers, inputs) returns the tokens that stay, or a dictionary of them with factors of
    their values. Tokens after the last whole group of 2^rounds are not compressed.
    """

    def rule(inputs):
        cached, factors = [], {}
        for number in range(inputs.tokens):
            if number == inputs.prompt:
                count = max(0, number - sinks - size)
                count -= count % 2**rounds
                chosen = choose(list(range(sinks, sinks + count)), inputs)
                factors = chosen if isinstance(chosen, dict) else {}
                log = rounds * math.log(2) if weight is None else weight
                cached = cached[:sinks] + [(n, log) for n in chosen] + cached[sinks + count :]
            cached.append((number, 0.0))
            yield [(n, log, factors.get(n, 1.0)) for n, log in sorted(cached)], sorted(cached)

    return rule


def in_blocks(rounds, block, choose):
    """Halving in blocks, `rounds` times."""

    def all_rounds(numbers, inputs):
        for round in range(rounds):
            uniforms = [uniform(16 * i + round, inputs.rng) for i in range(len(numbers))]
            numbers = [
                n
                for at in range(0, len(numbers), block)
                for n in choose(numbers[at : at + block], uniforms[at : at + block], inputs)
            ]
        return numbers

    return all_rounds


def as_published(rounds, block, theta, scale, temperature, c):
    """The halving of BalanceKV's published code: walks in blocks, over values times their factors.

    At the token where one sign has half of all tokens, the earlier tokens of the other sign stay
    and count twice. All later tokens stay and count once.
    """

    def choose(numbers, inputs):
        times = np.ones(inputs.tokens)
        for round in range(rounds if numbers else 0):
            signs, half = [], len(numbers) // 2
            for at in range(0, len(numbers), block):
                some = numbers[at : at + block]
                v = inputs.v * times[:, None]
                phi = gram(some, inputs.k, v, theta, scale, temperature, False)
                uniforms = [uniform(16 * (at + i) + round, inputs.rng) for i in range(len(some))]
                signs += walk(phi, uniforms, c)
            end = next(i for i in range(len(signs)) if signs[: i + 1].count(signs[i]) == half)
            rarer = [n for n, sign in zip(numbers[:end], signs, strict=False) if sign != signs[end]]
            times[rarer] *= 2
            numbers = rarer + numbers[end + 1 :]
        return {n: times[n] / 2**rounds for n in numbers}

    return choose


def at_random(rounds):
    """A uniform sample: the tokens with the lowest draws, one in 2^rounds."""

    def choose(numbers, inputs):
        order = sorted(range(len(numbers)), key=lambda place: priority(place, inputs.rng))
        return [numbers[place] for place in order[: len(numbers) >> rounds]]

    return choose


def most_attended(capacity, size, kernel, pool, theta, scale):
    """SnapKV: the tokens with the most attention from the last `size` queries, pooled per head."""

    def choose(numbers, inputs):
        last = [n for n in range(inputs.prompt - size, inputs.prompt) if n >= 0]
        k, side = inputs.k[: inputs.prompt], kernel // 2
        k = k if theta is None else rotate(k, np.arange(inputs.prompt), theta)
        pooled = np.zeros(len(numbers))
        for head in range(len(inputs.q[0])):
            score = np.zeros(inputs.prompt)
            for n in last:
                query = inputs.q[n][head]
                query = query if theta is None else rotate(query[None], [n], theta)[0]
                e = np.exp(k[: n + 1] @ query * scale)
                score[: n + 1] += e / e.sum()
            padded = np.pad(score[: len(numbers)], side)
            around = [padded[i : i + kernel] for i in range(len(numbers))]
            pooled += [x.max() if pool == "max" else x.mean() for x in around]
        return sorted(numbers, key=lambda n: -pooled[n])[: capacity - size]

    return choose


def least_alike(capacity, theta):
    """KeyDiff: the tokens whose keys have the smallest cosine with the mean key direction."""

    def choose(numbers, inputs):
        k = inputs.k[: inputs.prompt]
        k = k if theta is None else rotate(k, np.arange(inputs.prompt), theta)
        k = k / np.linalg.norm(k, axis=1)[:, None]
        anchor = k.sum(axis=0)
        cosines = k @ anchor / np.linalg.norm(anchor)
        return sorted(numbers, key=lambda n: cosines[n])[:capacity]

    return choose


def most_expected(capacity, sinks, future, theta, scale, epsilon=0.0):
    """Expected attention: E exp(logit) of later queries, which are normal as the prompt's are."""

    def choose(numbers, inputs):
        if not numbers:
            return []
        ahead = inputs.prompt + np.arange(future)
        k, turn = inputs.k[numbers], np.eye(inputs.k.shape[1])
        if theta is not None:
            k = rotate(k, numbers, theta)
            turn = sum(rotate(turn, [n] * len(turn), theta) for n in ahead) / future
        share = np.zeros(len(numbers))
        for head in range(len(inputs.q[0])):
            q = inputs.q[sinks : inputs.prompt, head] @ turn
            mean, covariance = q.mean(axis=0), np.atleast_2d(np.cov(q.T, bias=True))
            logits = scale * (k @ mean) + scale**2 / 2 * np.sum(k @ covariance * k, axis=1)
            if inputs.slopes is not None:
                logits = logits - inputs.slopes[head] * (ahead.mean() - np.array(numbers))
            e = np.exp(logits)
            share += e / e.sum() / len(inputs.q[0])
        score = (share + epsilon) * np.linalg.norm(inputs.v[numbers], axis=1)
        best = sorted(range(len(numbers)), key=lambda i: -score[i])[: capacity - sinks]
        return [numbers[i] for i in best]

    return choose


class Query(NamedTuple):
    """One query of one query head.

    s: its logits of the tokens so far. k, q: their keys and the query, rotated. candidates: the
    tokens to select from. prompt: the candidates at the end of prefill. at: index of its first
    draw. rng, start: as in `Inputs`.
    """

    s: np.ndarray
    k: np.ndarray
    q: np.ndarray
    candidates: list
    prompt: list
    at: int
    rng: Any
    start: int


def sparse_attention(sinks, size, choose, theta, scale, softcap=None, generated=True):
    """Every token is cached. During decode each query head attends to a selection of them.

    It attends to sinks, window, and the candidates that choose(query) returns with log weights.
    generated: whether tokens after the prompt become candidates when they leave the window.
    Otherwise every query attends to them.
    """

    def rule(inputs):
        rotated = lambda x, n: x if theta is None else rotate(x, n + inputs.start, theta)  # noqa: E731
        keys = rotated(inputs.k, np.arange(inputs.tokens))
        for number in range(inputs.tokens):
            cached = [(n, 0.0) for n in range(number + 1)]
            if number < inputs.prompt:
                yield cached, cached
                continue
            prompt = list(range(sinks, inputs.prompt - size)) or list(range(inputs.prompt))
            end = number + 1 if generated else inputs.prompt
            candidates = list(range(sinks, end - size))
            views = []
            for head, q in enumerate(inputs.q[number]):
                k, q = keys[: number + 1], rotated(q[None], np.array([number]))[0]
                s = k @ q * scale
                if softcap is not None:
                    s = softcap * np.tanh(s / softcap)
                if inputs.slopes is not None:
                    s = s - inputs.slopes[head] * (number - np.arange(number + 1))
                at = ((number + inputs.start) * len(inputs.q[number]) + head) * 0x9E3779B1
                query = Query(s, k, q, candidates, prompt, at, inputs.rng, inputs.start)
                chosen = choose(query) if candidates else {}
                ends = {n: 0.0 for n in range(number + 1) if n not in candidates}
                views.append(sorted((ends | chosen).items()))
            yield views, cached

    return rule


def part(share, count):
    """A share of `count`, rounded up. 0.1 is exactly a tenth here."""
    return math.ceil(Fraction(str(share)) * count)


def of_largest(share):
    """`topk`: the largest logits."""

    def choose(query):
        best = sorted(query.candidates, key=lambda n: (-query.s[n], n))
        return dict.fromkeys(best[: part(share, len(best))], 0.0)

    return choose


def of_mass(mass):
    """`topp`: the largest logits, until their softmax weights reach the mass."""

    def choose(query):
        chosen, e = {}, np.exp(query.s)
        for n in sorted(query.candidates, key=lambda n: -e[n]):
            if sum(e[list(chosen)]) < mass * sum(e[query.candidates]):
                chosen[n] = 0.0
        return chosen

    return choose


def by_weight(share):
    """`oracle`: draws by the softmax over the candidates. All draws weigh the same."""

    def choose(query):
        e = np.exp(query.s[query.candidates])
        up_to, draws, chosen = np.cumsum(e) / e.sum(), part(share, len(e)), {}
        for j in range(draws):
            place = np.searchsorted(up_to, uniform(query.at + j, query.rng), side="right")
            n = query.candidates[place]
            chosen[n] = chosen.get(n, 0) + 1
        return {n: math.log(f / draws * e.sum()) - query.s[n] for n, f in chosen.items()}

    return choose


def in_buckets(bits, tables, least=2, center=True, budget=10**9, floor=0.0):
    """`magicpig`: the keys that share the query's bucket in at least `least` tables.

    Of more keys than the budget, every total/budget-th is taken, from a random one on. The weight
    of a key is one over its probability of being selected.
    """

    def choose(query):
        planes = normals(tuple(query.rng), len(query.q), bits * tables)
        if center and query.prompt:
            query = query._replace(k=query.k - query.k[query.prompt].mean(axis=0))
        sides = lambda x: (x @ planes > 0).reshape(len(x), tables, bits)  # noqa: E731
        agree = (sides(query.k) == sides(query.q[None])).all(axis=2).sum(axis=1)
        found, share = [n for n in query.candidates if agree[n] >= least], 1.0
        if len(found) > budget:
            draw = np.float32(uniform(query.at, query.rng)) * np.float32(len(found))
            begin, share = min(int(draw), len(found) - 1), budget / len(found)
            found = [found[(j * len(found) + begin) // budget] for j in range(budget)]
        size = np.linalg.norm(query.q) * np.linalg.norm(query.k, axis=1)
        cosine = np.divide(query.k @ query.q, size, out=np.zeros_like(size), where=size > 1e-9)
        p = (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** bits
        u = sum(math.comb(tables, i) * p**i * (1 - p) ** (tables - i)
                for i in range(least, tables + 1))  # fmt: skip
        return {n: -math.log((u[n] + floor) * share) for n in found}

    return choose


@functools.cache
def normals(rng, rows, columns):
    """Normal random numbers (Box-Muller)."""
    draws = [uniform(i, rng) for i in range(2 * rows * columns)]
    radius = np.sqrt(-2 * np.log1p(-np.array(draws[::2])))
    return (radius * np.cos(2 * np.pi * np.array(draws[1::2]))).reshape(rows, columns)


def of_pages(share, page, fewest):
    """`quest`: the pages of candidates with the highest upper bound of their logits."""

    def choose(query):
        pages = {}
        for n in query.candidates:
            pages.setdefault(n // page, []).append(n)

        def bound(number):
            k = query.k[pages[number]]
            return np.maximum(query.q * k.min(axis=0), query.q * k.max(axis=0)).sum()

        best = sorted(pages, key=lambda number: (-bound(number), number))
        best = best[: max(fewest, part(share, len(pages)))]
        return {n: 0.0 for number in best for n in pages[number]}

    return choose


def verified(top, base, epsilon, quantile):
    """`vattention`: the largest logits, and a uniform sample whose size follows their spread."""

    def choose(query):
        e = np.exp(query.s)
        best = list(of_largest(top)(query))
        rest = [n for n in query.candidates if n not in best]
        draw = lambda n: uniform(query.at + n + query.start, query.rng)  # noqa: E731
        rest = sorted(rest, key=lambda n: (draw(n), n))
        first = e[rest[: max(2, part(base, len(rest)))]]
        chosen = dict.fromkeys(best, 0.0)
        if not rest:
            return chosen
        known = sum(e) - sum(e[rest])
        spread = first.std(ddof=1) if len(first) > 1 else 0.0
        error = quantile * len(rest) * spread / (epsilon * (known + len(rest) * first.mean()))
        budget = min(max(math.ceil(error**2), len(first)), len(rest))
        return chosen | dict.fromkeys(rest[:budget], math.log(len(rest) / budget))

    return choose


def by_coin(numbers, uniforms, inputs):
    """One of each two neighbours, by a fair coin."""
    return [numbers[i] if uniforms[i] < 0.5 else numbers[i + 1] for i in range(0, len(numbers), 2)]


def by_pairs(theta, scale, temperature, c, cache_relative=False):
    """A self-balancing walk over the differences of neighbours, with random signs."""

    def choose(numbers, uniforms, inputs):
        steps = len(numbers) // 2
        phi = gram(numbers, inputs.k, inputs.v, theta, scale, temperature, cache_relative)
        pick = np.zeros((steps, len(numbers)))
        pick[np.arange(steps), 2 * np.arange(steps)] = 1
        pick[np.arange(steps), 2 * np.arange(steps) + 1] = -1
        signs = walk(pick @ phi @ pick.T, uniforms[::2], c)
        return [numbers[2 * i + (signs[i] < 0)] for i in range(steps)]

    return choose


def by_walk(theta, scale, temperature, c, cache_relative=False):
    """A self-balancing walk over tokens. Random signs change until each has half of the tokens."""

    def choose(numbers, uniforms, inputs):
        phi = gram(numbers, inputs.k, inputs.v, theta, scale, temperature, cache_relative)
        signs = walk(phi, uniforms, c)
        order = lambda i: (signs[i] < 0, uniforms[i] * 4096 % 1)  # noqa: E731
        first = sorted(range(len(numbers)), key=order)[: len(numbers) // 2]
        return [numbers[i] for i in sorted(first)]

    return choose


def gram(numbers, keys, values, theta, scale, temperature, cache_relative):
    """exp(<k,k'>) (<v,v'> + 1) of these tokens. Keys are centred; values are at most 1 long."""
    k, v = keys[numbers], values[numbers]
    if theta is not None:
        k = rotate(k, np.arange(len(numbers)) if cache_relative else np.array(numbers), theta)
    k = (k - k.mean(0)) * math.sqrt(temperature * scale)
    v = v / np.sqrt((v**2).sum(1).max())
    return np.exp(k @ k.T) * (v @ v.T + 1)


def walk(gram, uniforms, c):
    """Signs: +1 with probability 1/2 - s/(2c). Vectors are scaled to length 1 at most."""
    gram = gram / gram.diagonal().max()
    s, signs = np.zeros(len(gram)), []
    for i, draw in enumerate(uniforms):
        signs.append(1 if s[i] / (2 * c) < 0.5 - draw else -1)
        s += signs[-1] * gram[i]
    return signs


def uniform(number, rng):
    """A uniform draw from [0, 1)."""
    return (priority(number % 2**32, rng) >> 8) / 2**24


def priority(position, rng):
    """The uint32 draw of a position: two rounds of an integer hash, a bijection for each rng."""
    return _mix(_mix((position + int(rng[0])) % 2**32) ^ int(rng[1]))


def _mix(x):
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


def attention(
    q,
    k,
    v,
    rule,
    *,
    cache_relative=False,
    start=0,
    prompt=0,
    rngs=None,
    theta=None,
    slopes=None,
    scale=1.0,
    softcap=None,
    sink=None,
):
    """One layer over one sequence: outputs [T,N,H], and the cached tokens by token and KV head.

    q [T,N,H], k, v [T,K,H]. cache_relative: the tokens in view have positions 0, 1, 2, ... and the
    query has the last of them; otherwise positions in the text. slopes: ALiBi.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = np.zeros((tokens, heads, head_dim))
    cached = [[None] * kv_heads for _ in range(tokens)]
    for kv in range(kv_heads):
        rng = None if rngs is None else rngs[kv]
        heads_of = range(kv * group, (kv + 1) * group)
        group_slopes = None if slopes is None else [slopes[n] for n in heads_of]
        own = q[:, heads_of], k[:, kv], v[:, kv]
        inputs = Inputs(tokens, prompt, rng, *own, start, group_slopes)
        for t, (view, after, *gaps) in enumerate(rule(inputs)):
            cached[t][kv] = after
            per_query_head = isinstance(view[0], list)
            for n, seen in zip(heads_of, view if per_query_head else [view] * group, strict=True):
                numbers = [number for number, *_ in seen]
                weights = np.array([weight for _, weight, *_ in seen])
                values = np.array([share[0] if share else 1.0 for _, _, *share in seen])[:, None]
                values = values * v[numbers, kv]
                place = np.array(gaps[0]) if gaps else np.arange(len(seen))
                place = place if cache_relative else np.array(numbers) + start
                keys, query = k[numbers, kv], q[t, n]
                if theta is not None:
                    keys = rotate(keys, place, theta)
                    query = rotate(query[None], place[-1:], theta)[0]
                logits = keys @ query * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                if slopes is not None:
                    logits = logits - slopes[n] * (place[-1] - place)
                logits = logits + weights
                extra = -np.inf if sink is None else sink[n]
                top = max(logits.max(), extra)
                e = np.exp(logits - top)
                out[t, n] = e @ values / (e.sum() + np.exp(extra - top))
    return out, cached


def rotate(x, positions, theta):
    """Rotary embedding of x [T,H] by the formula, over pairs (i, i + H/2)."""
    half = x.shape[-1] // 2
    if not isinstance(theta, tuple):
        theta = theta ** (-np.arange(half) / half), 1.0
    frequencies, amplitude = theta
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def yarn(head_dim, theta, factor, context, fast, slow):
    """YaRN: slow the pairs with at most `slow` rotations per context, and none from `fast` on."""
    i = np.arange(head_dim // 2)
    frequencies = theta ** (-2 * i / head_dim)
    low, high = (
        head_dim * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(theta))
        for rotations in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    slowed = np.clip((i - low) / (high - low), 0, 1)
    return frequencies * (slowed / factor + 1 - slowed), 0.1 * math.log(factor) + 1


def softmax_attention(q, k, v, bias, scale=1.0, softcap=None):
    """Out and lse of q [B,T,N,H] over slots k, v [B,K,S,H] with bias [B,K,G,T,S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = np.einsum("btnh,bnsh->bnts", q, k) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    shape = (q.shape[0], k.shape[1] // group, group, q.shape[1], k.shape[2])
    logits = logits + np.broadcast_to(np.asarray(bias, np.float64), shape).reshape(logits.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = logits.max(axis=-1, keepdims=True, initial=-1e300)
        e = np.exp(logits - top)
        total = e.sum(axis=-1, keepdims=True)
        out = np.where(total == 0, 0.0, np.einsum("bnts,bnsh->bnth", e, v) / total)
        lse = (top + np.log(total))[..., 0]
    return out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)


def rotate_heads(x, positions, theta):
    """`rotate` for x [T,N,H]."""
    return np.stack([rotate(x[:, n], positions, theta) for n in range(x.shape[1])], axis=1)
