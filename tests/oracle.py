"""What the policies mean, in plain float64 numpy, one token at a time. Imports nothing of jaxkv.

A rule says which tokens are in view and which are held afterwards. It is called with a `Row` and
yields for each token (view, held), two lists of (number, log weight) in the order of the text; and
where positions inside the cache have gaps, a third, the place of each token in view. There a token
may have a third number, by which its value is multiplied.

theta is a rotary base, or the frequencies of pairs and an amplitude (`yarn`); None: nothing turns.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """One kv head of a row: how many tokens, how many of them the prompt, and its random key.

    q [T,G,H], k, v [T,H]: as they came. start: the position of the first. slopes: ALiBi's, of the
    query heads.
    """

    tokens: int
    prompt: int
    key: Any
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    start: int = 0
    slopes: Any = None


def full():
    """Every token."""
    return streaming(0, 10**9)


def window(size):
    """The newest tokens."""
    return streaming(0, size)


def streaming(sinks, size):
    """The first tokens and the newest."""

    def rule(row):
        held = []
        for number in range(row.tokens):
            held.append((number, 0.0))
            if len(held) > sinks + size:
                del held[sinks]
            yield list(held), list(held)

    return rule


def reservoir(sinks, size, sample, scheme="uniform", weighted=True):
    """First and newest tokens, and a sample of those between, as one token comes after another."""

    def rule(row):
        first, newest, held, left = [], [], [], 0
        for number in range(row.tokens):
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                leaving = newest.pop(0)
                draw = priority(leaving + row.start, row.key)
                if left < sample:
                    held.append(leaving)
                elif scheme == "uniform":
                    worst = max(held, key=lambda n: priority(n + row.start, row.key))
                    if draw < priority(worst + row.start, row.key):
                        held[held.index(worst)] = leaving
                elif draw % (sample + 1) < sample:
                    held[draw % (sample + 1)] = leaving
                left += 1
            weight = math.log(left / sample) if weighted and left > sample else 0.0
            view = [(n, 0.0) for n in first + newest] + [(n, weight) for n in held]
            yield sorted(view), sorted(view)

    return rule


def merge_and_reduce(sinks, size, levels, slots, choose, weighted=True):
    """First and newest tokens, and those between in levels of `slots`: a full level is halved.

    choose(numbers, chances, row) says which half of some tokens is kept.
    """

    def rule(row):
        first, newest, held, left, raised = [], [], [[] for _ in range(levels)], 0, 0
        came, emptied = {}, 0  # when a token left the window, and when level 0 was last emptied
        for number in range(row.tokens):
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                leaving, group = newest.pop(0), 2**raised
                begun = left - left % group
                came[leaving] = left
                if left - begun == priority(begun, row.key) * group // 2**32:
                    held[0].append(leaving)
                left, level = left + 1, 0
                while left % group == 0 and len(held[level]) == slots:
                    at = left * 0x9E3779B1 + level * slots
                    chances = [chance(at + i, row.key) for i in range(slots)]
                    half = choose(held[level], chances, row)
                    if level == levels - 1:
                        held[level], raised = half, raised + 1
                        break
                    emptied = left
                    held[level] = []
                    level += 1
                    held[level] += half
            places, at = {}, len(first)
            for level in range(levels - 1, 0, -1):
                places |= {n: at + i for i, n in enumerate(held[level])}
                at += len(held[level])
            # A group of level 0 has its place from when it begins.
            places |= {n: at + ((came[n] - emptied) >> raised) for n in held[0]}
            at += -(-(left - emptied) // 2**raised)
            places |= {n: at + i for i, n in enumerate(newest)}
            places |= {n: i for i, n in enumerate(first)}
            view = [(n, 0.0) for n in first + newest]
            for level, numbers in enumerate(held):
                view += [(n, weighted * (level + raised) * math.log(2)) for n in numbers]
            yield sorted(view), sorted(view), [places[n] for n, _ in sorted(view)]

    return rule


def heavy_hitters(heavy, size, theta, scale):
    """The newest tokens, and of those before them the ones that got most attention so far."""

    def rule(row):
        held, score = [], {}
        place = np.arange(row.tokens)
        k = row.k if theta is None else rotate(row.k, place, theta)
        for number in range(row.tokens):
            if len(held) == heavy + size:
                held.remove(min(held[: heavy + 1], key=lambda n: (score[n], n)))
            held.append(number)
            score[number] = 0.0
            for query in row.q[number]:
                query = query if theta is None else rotate(query[None], [number], theta)[0]
                e = np.exp(k[held] @ query * scale)
                for n, share in zip(held, e / e.sum(), strict=True):
                    score[n] += share
            yield [(n, 0.0) for n in held], [(n, 0.0) for n in held]

    return rule


def thinned(sinks, size, rounds, choose, weight=None):
    """Every token, but of a finished prompt the ends, and what `choose` keeps of what lies between.

    choose(numbers, row) says which, and may say by what their values are multiplied (a dictionary).
    Groups of 2^rounds are thinned; the last that make none stay.
    """

    def rule(row):
        held, share = [], {}
        for number in range(row.tokens):
            if number == row.prompt:
                between = max(0, number - sinks - size)
                between -= between % 2**rounds
                kept = choose(list(range(sinks, sinks + between)), row)
                share = kept if isinstance(kept, dict) else {}
                log = rounds * math.log(2) if weight is None else weight
                held = held[:sinks] + [(n, log) for n in kept] + held[sinks + between :]
            held.append((number, 0.0))
            yield [(n, log, share.get(n, 1.0)) for n, log in sorted(held)], sorted(held)

    return rule


def in_blocks(rounds, block, choose):
    """Halve in blocks, and what is left in blocks again."""

    def all_rounds(numbers, row):
        for round in range(rounds):
            chances = [chance(16 * i + round, row.key) for i in range(len(numbers))]
            numbers = [
                n
                for at in range(0, len(numbers), block)
                for n in choose(numbers[at : at + block], chances[at : at + block], row)
            ]
        return numbers

    return all_rounds


def as_published(rounds, block, theta, scale, temperature, c):
    """Walks in blocks over values times what they count for; where one sign has half of all tokens,
    those of the other before it count twice, and all that come after stay and count once."""

    def choose(numbers, row):
        times = np.ones(row.tokens)
        for round in range(rounds if numbers else 0):
            signs, half = [], len(numbers) // 2
            for at in range(0, len(numbers), block):
                some = numbers[at : at + block]
                phi = gram(some, row.k, row.v * times[:, None], theta, scale, temperature, False)
                chances = [chance(16 * (at + i) + round, row.key) for i in range(len(some))]
                signs += walk(phi, chances, c)
            end = next(i for i in range(len(signs)) if signs[: i + 1].count(signs[i]) == half)
            rarer = [n for n, sign in zip(numbers[:end], signs, strict=False) if sign != signs[end]]
            times[rarer] *= 2
            numbers = rarer + numbers[end + 1 :]
        return {n: times[n] / 2**rounds for n in numbers}

    return choose


def at_random(rounds):
    """The tokens of lowest draws, one in 2^rounds."""

    def choose(numbers, row):
        order = sorted(range(len(numbers)), key=lambda place: priority(place, row.key))
        return [numbers[place] for place in order[: len(numbers) >> rounds]]

    return choose


def most_attended(capacity, size, kernel, pool, theta, scale):
    """The tokens that the last `size` queries look at most, pooled over neighbours head by head."""

    def choose(numbers, row):
        last = [n for n in range(row.prompt - size, row.prompt) if n >= 0]
        k, side = row.k[: row.prompt], kernel // 2
        k = k if theta is None else rotate(k, np.arange(row.prompt), theta)
        pooled = np.zeros(len(numbers))
        for head in range(len(row.q[0])):
            score = np.zeros(row.prompt)
            for n in last:
                query = row.q[n][head]
                query = query if theta is None else rotate(query[None], [n], theta)[0]
                e = np.exp(k[: n + 1] @ query * scale)
                score[: n + 1] += e / e.sum()
            padded = np.pad(score[: len(numbers)], side)
            around = [padded[i : i + kernel] for i in range(len(numbers))]
            pooled += [x.max() if pool == "max" else x.mean() for x in around]
        return sorted(numbers, key=lambda n: -pooled[n])[: capacity - size]

    return choose


class Asked(NamedTuple):
    """One query head: its logits s of the tokens so far, their keys and the query, turned, and
    those between the ends that it chooses from. prompt: those that were between when it ended.
    at: of its draws."""

    s: np.ndarray
    k: np.ndarray
    q: np.ndarray
    between: list
    prompt: list
    at: int
    key: Any
    start: int


def met(sinks, size, choose, theta, scale, softcap=None, generated=True):
    """Every token is held; behind the prompt a query head sees the ends, and of the tokens between
    what choose(Asked) says, with log weights. generated: of those behind the prompt too."""

    def rule(row):
        turn = lambda x, n: x if theta is None else rotate(x, n + row.start, theta)  # noqa: E731
        keys = turn(row.k, np.arange(row.tokens))
        for number in range(row.tokens):
            held = [(n, 0.0) for n in range(number + 1)]
            if number < row.prompt:
                yield held, held
                continue
            prompt = list(range(sinks, row.prompt - size)) or list(range(row.prompt))
            between = list(range(sinks, number - size + 1 if generated else row.prompt - size))
            views = []
            for head, q in enumerate(row.q[number]):
                k, q = keys[: number + 1], turn(q[None], np.array([number]))[0]
                s = k @ q * scale
                if softcap is not None:
                    s = softcap * np.tanh(s / softcap)
                if row.slopes is not None:
                    s = s - row.slopes[head] * (number - np.arange(number + 1))
                at = ((number + row.start) * len(row.q[number]) + head) * 0x9E3779B1
                asked = Asked(s, k, q, between, prompt, at, row.key, row.start)
                chosen = choose(asked) if between else {}
                ends = {n: 0.0 for n in range(number + 1) if n not in between}
                views.append(sorted((ends | chosen).items()))
            yield views, held

    return rule


def part(share, count):
    """A share of so many, rounded up: by decimals as they are written."""
    return math.ceil(Fraction(str(share)) * count)


def of_largest(share):
    """The largest logits."""

    def choose(asked):
        best = sorted(asked.between, key=lambda n: (-asked.s[n], n))
        return dict.fromkeys(best[: part(share, len(best))], 0.0)

    return choose


def of_mass(mass):
    """The largest, until they hold that mass."""

    def choose(asked):
        chosen, e = {}, np.exp(asked.s)
        for n in sorted(asked.between, key=lambda n: -e[n]):
            if sum(e[list(chosen)]) < mass * sum(e[asked.between]):
                chosen[n] = 0.0
        return chosen

    return choose


def by_weight(share):
    """Draws by the softmax over those between; each draw has one part of their whole weight."""

    def choose(asked):
        e = np.exp(asked.s[asked.between])
        up_to, draws, chosen = np.cumsum(e) / e.sum(), part(share, len(e)), {}
        for j in range(draws):
            place = np.searchsorted(up_to, chance(asked.at + j, asked.key), side="right")
            n = asked.between[place]
            chosen[n] = chosen.get(n, 0) + 1
        return {n: math.log(f / draws * e.sum()) - asked.s[n] for n, f in chosen.items()}

    return choose


def in_buckets(bits, tables, least=2, center=True, budget=10**9, floor=0.0):
    """Keys that have all bits of the query's in enough tables; of more than the budget every
    total/budget-th, from a random one on. Each counts for one over the chance of that."""

    def choose(asked):
        planes = normals(tuple(asked.key), len(asked.q), bits * tables)
        if center and asked.prompt:
            asked = asked._replace(k=asked.k - asked.k[asked.prompt].mean(axis=0))
        sides = lambda x: (x @ planes > 0).reshape(len(x), tables, bits)  # noqa: E731
        agree = (sides(asked.k) == sides(asked.q[None])).all(axis=2).sum(axis=1)
        found, share = [n for n in asked.between if agree[n] >= least], 1.0
        if len(found) > budget:
            draw = np.float32(chance(asked.at, asked.key)) * np.float32(len(found))
            begin, share = min(int(draw), len(found) - 1), budget / len(found)
            found = [found[(j * len(found) + begin) // budget] for j in range(budget)]
        size = np.linalg.norm(asked.q) * np.linalg.norm(asked.k, axis=1)
        cosine = np.divide(asked.k @ asked.q, size, out=np.zeros_like(size), where=size > 1e-9)
        p = (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** bits
        u = sum(math.comb(tables, i) * p**i * (1 - p) ** (tables - i)
                for i in range(least, tables + 1))  # fmt: skip
        return {n: -math.log((u[n] + floor) * share) for n in found}

    return choose


@functools.cache
def normals(key, rows, columns):
    """Normal numbers by pairs of draws (Box and Muller)."""
    draws = [chance(i, key) for i in range(2 * rows * columns)]
    radius = np.sqrt(-2 * np.log1p(-np.array(draws[::2])))
    return (radius * np.cos(2 * np.pi * np.array(draws[1::2]))).reshape(rows, columns)


def of_pages(share, page, fewest):
    """Pages of the highest bound on the products of the keys between."""

    def choose(asked):
        pages = {}
        for n in asked.between:
            pages.setdefault(n // page, []).append(n)

        def bound(number):
            k = asked.k[pages[number]]
            return np.maximum(asked.q * k.min(axis=0), asked.q * k.max(axis=0)).sum()

        best = sorted(pages, key=lambda number: (-bound(number), number))
        best = best[: max(fewest, part(share, len(pages)))]
        return {n: 0.0 for number in best for n in pages[number]}

    return choose


def verified(top, base, epsilon, quantile):
    """The largest logits, and of the others as many of the lowest draws as their spread demands."""

    def choose(asked):
        e = np.exp(asked.s)
        best = list(of_largest(top)(asked))
        rest = [n for n in asked.between if n not in best]
        lot = lambda n: chance(asked.at + n + asked.start, asked.key)  # noqa: E731
        rest = sorted(rest, key=lambda n: (lot(n), n))
        first = e[rest[: max(2, part(base, len(rest)))]]
        chosen = dict.fromkeys(best, 0.0)
        if not rest:
            return chosen
        sure = sum(e) - sum(e[rest])
        spread = first.std(ddof=1) if len(first) > 1 else 0.0
        error = quantile * len(rest) * spread / (epsilon * (sure + len(rest) * first.mean()))
        budget = min(max(math.ceil(error**2), len(first)), len(rest))
        return chosen | dict.fromkeys(rest[:budget], math.log(len(rest) / budget))

    return choose


def by_coin(numbers, chances, row):
    """One of two neighbours."""
    return [numbers[i] if chances[i] < 0.5 else numbers[i + 1] for i in range(0, len(numbers), 2)]


def by_pairs(theta, scale, temperature, c, by_rank=False):
    """A self-balancing walk over the differences of neighbours, with chances."""

    def choose(numbers, chances, row):
        steps = len(numbers) // 2
        phi = gram(numbers, row.k, row.v, theta, scale, temperature, by_rank)
        pick = np.zeros((steps, len(numbers)))
        pick[np.arange(steps), 2 * np.arange(steps)] = 1
        pick[np.arange(steps), 2 * np.arange(steps) + 1] = -1
        signs = walk(pick @ phi @ pick.T, chances[::2], c)
        return [numbers[2 * i + (signs[i] < 0)] for i in range(steps)]

    return choose


def by_walk(theta, scale, temperature, c, by_rank=False):
    """A self-balancing walk over tokens; where one sign has more than half some change, by lot."""

    def choose(numbers, chances, row):
        signs = walk(gram(numbers, row.k, row.v, theta, scale, temperature, by_rank), chances, c)
        lot = lambda i: (signs[i] < 0, chances[i] * 4096 % 1)  # noqa: E731
        first = sorted(range(len(numbers)), key=lot)[: len(numbers) // 2]
        return [numbers[i] for i in sorted(first)]

    return choose


def gram(numbers, keys, values, theta, scale, temperature, by_rank):
    """exp(<k,k'>) (<v,v'> + 1) of some tokens, keys centred, values no longer than 1."""
    k, v = keys[numbers], values[numbers]
    if theta is not None:
        k = rotate(k, np.arange(len(numbers)) if by_rank else np.array(numbers), theta)
    k = (k - k.mean(0)) * math.sqrt(temperature * scale)
    v = v / np.sqrt((v**2).sum(1).max())
    return np.exp(k @ k.T) * (v @ v.T + 1)


def walk(gram, chances, c):
    """Signs: +1 with the chance 1/2 - s/(2c), no vector being longer than 1."""
    gram = gram / gram.diagonal().max()
    s, signs = np.zeros(len(gram)), []
    for i, chance in enumerate(chances):
        signs.append(1 if s[i] / (2 * c) < 0.5 - chance else -1)
        s += signs[-1] * gram[i]
    return signs


def chance(number, key):
    """A draw from 0 to less than 1."""
    return (priority(number % 2**32, key) >> 8) / 2**24


def priority(position, key):
    """The draw of a position: two rounds of an integer hash, one-to-one for each key."""
    return _mix(_mix((position + int(key[0])) % 2**32) ^ int(key[1]))


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
    by_rank=False,
    start=0,
    prompt=0,
    keys=None,
    theta=None,
    slopes=None,
    scale=1.0,
    softcap=None,
    sink=None,
):
    """One layer over one row: outputs [T,N,H], and for each token and kv head what is held.

    q [T,N,H], k, v [T,K,H]. by_rank: the tokens in view stand at 0, 1, 2, ... and the query at
    the last of them; otherwise where they stand in the text. slopes: ALiBi.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = np.zeros((tokens, heads, head_dim))
    held = [[None] * kv_heads for _ in range(tokens)]
    for kv in range(kv_heads):
        key = None if keys is None else keys[kv]
        heads_of = range(kv * group, (kv + 1) * group)
        its_slopes = None if slopes is None else [slopes[n] for n in heads_of]
        row = Row(tokens, prompt, key, q[:, heads_of], k[:, kv], v[:, kv], start, its_slopes)
        for t, (view, after, *gaps) in enumerate(rule(row)):
            held[t][kv] = after
            apart = isinstance(view[0], list)
            for n, seen in zip(heads_of, view if apart else [view] * group, strict=True):
                numbers = [number for number, *_ in seen]
                weights = np.array([weight for _, weight, *_ in seen])
                values = np.array([share[0] if share else 1.0 for _, _, *share in seen])[:, None]
                values = values * v[numbers, kv]
                place = np.array(gaps[0]) if gaps else np.arange(len(seen))
                place = place if by_rank else np.array(numbers) + start
                turned, query = k[numbers, kv], q[t, n]
                if theta is not None:
                    turned = rotate(turned, place, theta)
                    query = rotate(query[None], place[-1:], theta)[0]
                logits = turned @ query * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                if slopes is not None:
                    logits = logits - slopes[n] * (place[-1] - place)
                logits = logits + weights
                extra = -np.inf if sink is None else sink[n]
                top = max(logits.max(), extra)
                e = np.exp(logits - top)
                out[t, n] = e @ values / (e.sum() + np.exp(extra - top))
    return out, held


def rotate(x, positions, theta):
    """Rotary embedding of x [T,H], pairs (i, i + H/2), from the formula."""
    half = x.shape[-1] // 2
    if not isinstance(theta, tuple):
        theta = theta ** (-np.arange(half) / half), 1.0
    frequencies, amplitude = theta
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def yarn(head_dim, theta, factor, context, fast, slow):
    """Pairs that turn `fast` times in the context stay, those that turn `slow` times are slowed."""
    i = np.arange(head_dim // 2)
    frequencies = theta ** (-2 * i / head_dim)
    low, high = (
        head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    slowed = np.clip((i - low) / (high - low), 0, 1)
    return frequencies * (slowed / factor + 1 - slowed), 0.1 * math.log(factor) + 1


def softmax_attention(q, k, v, bias, scale=1.0, softcap=None):
    """q [B,T,N,H] over slots k, v [B,K,S,H] with bias [B,K,G,T,S]: out and lse."""
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
