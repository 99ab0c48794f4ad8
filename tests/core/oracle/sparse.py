"""Rules of policies that select keys for each query."""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from tests.core.oracle.draws import uniform
from tests.core.oracle.positions import rotate


class Query(NamedTuple):
    """One query of one query head.

    s: its logits of the tokens so far. k, q: their keys and the query, rotated. candidates: the
    tokens to select from. prompt: the candidates at the end of prefill. at: index of its first
    draw. rng, start: as in `Inputs`. prompt_k: the keys of the prompt before rotation.
    """

    s: np.ndarray
    k: np.ndarray
    q: np.ndarray
    candidates: list
    prompt: list
    at: int
    rng: Any
    start: int
    prompt_k: Any


def sparse_attention(sinks, size, choose, theta, scale, softcap=None, generated=True):
    """Every token is cached. During decode each query head attends to a selection of them.

    It attends to sinks, window, and the candidates that choose(query) returns with log weights.
    generated: whether tokens after the prompt become candidates when they leave the window.
    Otherwise every query attends to them.
    """

    def rule(inputs):
        rotated = lambda x, n: x if theta is None else rotate(x, n + inputs.start, theta)
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
                prompt_k = inputs.k[: inputs.prompt]
                query = Query(s, k, q, candidates, prompt, at, inputs.rng, inputs.start, prompt_k)
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


def in_components(share, dimensions, unrotated=False):
    """`loki`: the largest products in the first principal components of the prompt's keys."""

    def choose(query):
        prompt_k = query.prompt_k if unrotated else query.k[: len(query.prompt_k)]
        centred = prompt_k - prompt_k.sum(axis=0) / max(1, len(prompt_k))
        variance, axes = np.linalg.eigh(centred.T @ centred)
        axes = axes.T[variance > 1e-5 * variance.max()][::-1][:dimensions]
        s = (query.k @ axes.T) @ (axes @ query.q)
        best = sorted(query.candidates, key=lambda n: (-s[n], n))
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


def in_buckets(bits, tables, center=True, budget=10**9, floor=0.0):
    """`magicpig`: the keys that share the query's bucket in at least two tables.

    Of more keys than the budget, every total/budget-th is taken, from a random one on. The weight
    of a key is one over its probability of being selected.
    """

    def choose(query):
        planes = normals(tuple(query.rng), len(query.q), bits * tables)
        if center and query.prompt:
            query = query._replace(k=query.k - query.k[query.prompt].mean(axis=0))
        sides = lambda x: (x @ planes > 0).reshape(len(x), tables, bits)
        agree = (sides(query.k) == sides(query.q[None])).all(axis=2).sum(axis=1)
        matches, share = [n for n in query.candidates if agree[n] >= 2], 1.0
        if len(matches) > budget:
            draw = np.float32(uniform(query.at, query.rng)) * np.float32(len(matches))
            begin, share = min(int(draw), len(matches) - 1), budget / len(matches)
            matches = [matches[(j * len(matches) + begin) // budget] for j in range(budget)]
        size = np.linalg.norm(query.q) * np.linalg.norm(query.k, axis=1)
        cosine = np.divide(query.k @ query.q, size, out=np.zeros_like(size), where=size > 1e-9)
        p = (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** bits
        u = sum(math.comb(tables, i) * p**i * (1 - p) ** (tables - i)
                for i in range(2, tables + 1))  # fmt: skip
        return {n: -math.log((u[n] + floor) * share) for n in matches}

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
        draw = lambda n: uniform(query.at + n + query.start, query.rng)
        rest = sorted(rest, key=lambda n: (draw(n), n))
        first = e[rest[: max(2, part(base, len(rest)))]]
        chosen = dict.fromkeys(best, 0.0)
        if not rest:
            return chosen
        exact_sum = sum(e) - sum(e[rest])
        spread = first.std(ddof=1) if len(first) > 1 else 0.0
        error = quantile * len(rest) * spread / (epsilon * (exact_sum + len(rest) * first.mean()))
        budget = min(max(math.ceil(error**2), len(first)), len(rest))
        return chosen | dict.fromkeys(rest[:budget], math.log(len(rest) / budget))

    return choose
