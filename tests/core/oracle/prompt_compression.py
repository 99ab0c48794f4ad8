"""Rules of caches that compress a finished prompt."""

import math

import numpy as np

from tests.core.oracle.attended import highest
from tests.core.oracle.draws import priority, uniform
from tests.core.oracle.halving import gram, walk
from tests.core.oracle.positions import rotate


def compressed(sinks, size, rounds, choose):
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
                log = rounds * math.log(2)
                cached = cached[:sinks] + [(n, log) for n in chosen] + cached[sinks + count :]
            cached.append((number, 0.0))
            yield [(n, log, factors.get(n, 1.0)) for n, log in sorted(cached)], sorted(cached)

    return rule


def repeated(capacity, every, sinks, size, choose):
    """Whenever `every` tokens beyond `capacity` are cached, compress to `capacity`; ends stay."""

    def rule(inputs):
        cached = []
        for number in range(inputs.tokens):
            cached.append(number)
            view = [(n, 0.0) for n in cached]
            if len(cached) == capacity + every:
                end = len(cached) - size
                chosen = choose(
                    cached[sinks:end], inputs._replace(prompt=number + 1, cached=cached)
                )
                cached = cached[:sinks] + sorted(chosen) + cached[end:]
            yield view, [(n, 0.0) for n in cached]

    return rule


def repeated_of_layer(capacity, every, sinks, size, score=None):
    """The same for KV heads that compete, by default with their keys before rotation.

    A position in the cache is at most so many tokens back as with equal heads: sampled tokens
    further back share one.
    """

    def rule(inputs):
        budget, heads = capacity - sinks - size, range(inputs.layer_k.shape[1])
        cached, excess = [[] for _ in heads], [0 for _ in heads]
        for number in range(inputs.tokens):
            for head in heads:
                cached[head].append(number)
            view = [(n, 0.0) for n in cached[inputs.head]]
            shared = excess[inputs.head]
            places = [i if i < sinks else max(sinks, i - shared) for i in range(len(view))]
            if sum(map(len, cached)) == len(heads) * (capacity + every):
                between = [cached[head][sinks : len(cached[head]) - size] for head in heads]
                asked = [
                    inputs.of_head(
                        head, prompt=number + 1, cached=cached[head], excess=excess[head]
                    )
                    for head in heads
                ]
                best = best_of_layer(between, asked, budget, score or unlike(None))
                for head in heads:
                    kept = sorted(n for _, at, n in best if at == head)
                    first, last = cached[head][:sinks], cached[head][len(cached[head]) - size :]
                    cached[head], excess[head] = first + kept + last, max(0, len(kept) - budget)
            yield view, [(n, 0.0) for n in cached[inputs.head]], places

    return rule


def repeated_of_heads(capacity, budgets, every, sinks, size):
    """The same for KV heads with budgets of their own; they compress at the same tokens."""

    def rule(inputs):
        ends, budget = sinks + size, budgets[inputs.head]
        mean, cached, excess = capacity - ends, [], 0
        for number in range(inputs.tokens):
            cached.append(number)
            view = [(n, 0.0) for n in cached]
            places = [i if i < sinks else max(sinks, i - excess) for i in range(len(view))]
            since = number + 1 - ends - ((mean - 1) % every + 1)
            if since >= 0 and since % every == 0:
                end = len(cached) - size
                asked = inputs._replace(prompt=number + 1, cached=cached, excess=excess)
                kept = sorted(highest(unlike(None), budget)(cached[sinks:end], asked))
                cached, excess = cached[:sinks] + kept + cached[end:], max(0, len(kept) - mean)
            yield view, [(n, 0.0) for n in cached], places

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


def as_published(rounds, block, theta, scale, key_scale, c):
    """The halving of BalanceKV's published code: walks in blocks, over values times their factors.

    At the token where one sign has half of all tokens, the earlier tokens of the other sign stay
    and count twice. All later tokens stay and count once.
    """

    def choose(numbers, inputs):
        times = np.ones(inputs.tokens)
        for round in range(rounds if numbers else 0):
            signs, half = [], len(numbers) // 2
            for at in range(0, len(numbers), block):
                chunk = numbers[at : at + block]
                v = inputs.v * times[:, None]
                phi = gram(chunk, inputs.k, v, theta, scale, key_scale, False)
                uniforms = [uniform(16 * (at + i) + round, inputs.rng) for i in range(len(chunk))]
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


def most_attended(capacity, size, **fields):
    """SnapKV: the highest of its scores."""
    return highest(score_attended(size, **fields), capacity - size)


def score_attended(size, kernel, pool, theta, scale, relative=False, softcap=None):
    """SnapKV: the attention from the last `size` queries, pooled per head.

    relative: by positions in the cache.
    """

    def score(numbers, inputs):
        cached = list(range(inputs.prompt)) if inputs.cached is None else inputs.cached
        place = np.arange(len(cached)) if relative else np.array(cached)
        k, side = inputs.k[cached], kernel // 2
        k = k if theta is None else rotate(k, place, theta)
        pooled = np.zeros(len(numbers))
        for head in range(len(inputs.q[0])):
            shares = np.zeros(len(cached))
            for i in range(max(0, len(cached) - size), len(cached)):
                query = inputs.q[cached[i]][head]
                query = query if theta is None else rotate(query[None], place[i : i + 1], theta)[0]
                logits = k[: i + 1] @ query * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                if inputs.slopes is not None:
                    logits = logits - inputs.slopes[head] * (place[i] - place[: i + 1])
                e = np.exp(logits)
                shares[: i + 1] += e / e.sum()
            padded = np.pad(shares[: len(numbers)], side)
            around = [padded[i : i + kernel] for i in range(len(numbers))]
            pooled += [x.max() if pool == "max" else x.mean() for x in around]
        return pooled

    return score


def least_alike(capacity, theta):
    """KeyDiff: the tokens whose keys have the smallest cosine with the mean key direction."""
    return highest(unlike(theta), capacity)


def unlike(theta):
    """KeyDiff: minus the cosine of keys with the mean key direction."""

    def score(numbers, inputs):
        k = inputs.k[: inputs.prompt]
        k = k if theta is None else rotate(k, np.arange(inputs.prompt), theta)
        k = k / np.linalg.norm(k, axis=1)[:, None]
        anchor = k.sum(axis=0)
        return -(k @ anchor / np.linalg.norm(anchor))[numbers]

    return score


def least_alike_of_heads(capacities):
    """Retrieval with calibrated budgets: keys before rotation, a fixed number in each KV head."""

    def choose(numbers, inputs):
        return least_alike(capacities[inputs.head], None)(numbers, inputs)

    return choose


def best_of_competing(capacity, ends, score=None):
    """KV heads compete, each with a fifth of an equal share; by default with unrotated keys."""

    def choose(numbers, inputs):
        share, heads = min(capacity - ends, len(numbers)), range(inputs.layer_k.shape[1])
        asked = [inputs.of_head(head) for head in heads]
        best = best_of_layer([numbers for _ in heads], asked, share, score or unlike(None))
        return [n for _, head, n in best if head == inputs.head]

    return choose


def best_of_layer(numbers, inputs, share, score):
    """Of the tokens of each KV head, and its inputs, the best of all heads: (-score, head, number).

    share: the tokens of a head, on average. Each head has a fifth of it for itself.
    """
    ranked, fixed = [], []
    for head, (of_head, asked) in enumerate(zip(numbers, inputs, strict=True)):
        scores = score(of_head, asked) if of_head else []
        order = sorted((-value, head, n) for value, n in zip(scores, of_head, strict=True))
        fixed += order[: share // 5]
        ranked += order[share // 5 :]
    return fixed + sorted(ranked)[: len(numbers) * share - len(fixed)]


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
