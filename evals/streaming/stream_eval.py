"""Questions about numbers that a stream named earlier (StreamEval of StreamingLLM).

Novels are read as streams, and every 200 tokens a sentence names the secret number of a thing. A
question names the thing a set number of tokens after the end of its sentence; it is read with a
copy of the cache, so the stream goes on without it. An answer is right if greedy decoding would
write it: every token of the number is the likeliest after those before it. The gate is full
attention to the last 1,024 tokens at most, read again for each sentence.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import read, standard_error
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.text import first_tokens
from jaxkv.evals.lib.verdict import Results, above, below, claim
from jaxkv.evals.reservoir.stream_losses import ENDS, SAMPLED
from jaxkv.evals.tasks.generators import DIGITS, THINGS
from jaxkv.evals.tasks.score import GATE as PASSES
from jaxkv.models.generation.decoding import positions_of, run_layers
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Decoder, Weights
from jaxkv.typing import Array, Float, Int32

CACHE, EVERY, DISTANCES = 256, 200, (60, 120, 200, 300, 600)
FIRST = 1_000  # tokens before the first sentence that is asked about
GATE, GATE_EVERY = 1_024, 5  # tokens that the gate reads; it asks about every fifth sentence
WIDTHS = (40, 20)  # of compiled programs that read the stream; the distances are multiples of 20
POLICIES = {
    "window": f"window:window={CACHE}",
    "streaming": f"streaming:sinks=4,window={CACHE - 4}",
    **{name: SAMPLED[name] for name in ("reservoir", "stratified", "balance-stream")},
}
MAX_TOKENS = 8_000  # tokens of a stream: full attention reads it too


def measure(run: Run) -> dict[str, Any]:
    """Shares of right answers in streams that are made from novels."""
    options = run.options
    if options.tokens > MAX_TOKENS:
        raise UserError(f"--tokens must be at most {MAX_TOKENS}, got {options.tokens}; try 6000")
    novels = first_tokens(run.llm, options.texts, options.tokens)
    streams = [stream_of(run.llm, ids, [options.seed, n]) for n, ids in enumerate(novels.values())]
    parts = Parts(run.record, len(POLICIES) + 2)
    return all_answers(run.llm, streams, parts) | {"texts": list(novels)}


class Fact(NamedTuple):
    """ids: a question with its answer. start: where the number begins in them."""

    ids: list[int]
    start: int


class Streamed(NamedTuple):
    """The tokens of a stream, and its facts: fact n - 1 is in the sentence before token n EVERY."""

    tokens: list[int]
    facts: list[Fact]


def stream_of(llm: Llm, novel: Sequence[int], seed: Sequence[int]) -> Streamed:
    """A novel with a sentence at the end of every EVERY tokens."""
    rng = np.random.default_rng(seed)
    encode = lambda text: llm.tokenizer.encode(text, bos=False, start=False)
    tokens, facts, at, things = [], [], 0, []
    for _ in range(len(novel) // EVERY):
        things = things or rng.permutation(THINGS).tolist()  # no thing again within eight sentences
        said = f"\n\nThe secret number of the {things.pop()} is"
        number = str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))
        sentence = encode(f"{said} {number}.\n\n")
        room = EVERY - len(sentence)
        front = list(llm.tokenizer.front) if not tokens else []
        tokens += [*front, *novel[at : at + room - len(front)], *sentence]
        at += room - len(front)
        asked, question = encode(f"{said} {number}"), encode(f"{said} ")
        start = next(i for i, pair in enumerate(zip(asked, [*question, -1], strict=False))
                     if pair[0] != pair[1])  # fmt: skip
        facts.append(Fact(asked, start))
    return Streamed(tokens, facts)


def all_answers(llm: Llm, streams: Sequence[Streamed], parts: Parts) -> dict[str, Any]:
    """Shares of right answers by policy and distance, and those of the gate."""
    tokens, count = len(streams[0].tokens), len(streams[0].facts)
    last = (tokens - max(DISTANCES)) // EVERY
    asked = range(FIRST // EVERY, min(last, count - 1) + 1)
    policies = POLICIES | {"full": f"full:max={tokens + EVERY}"}
    digest = zlib.crc32(np.array([streamed.tokens for streamed in streams], np.int32).tobytes())
    part = lambda name, compute: parts.part(f"{llm.name}, {digest:x}, {name}", compute)
    right = {
        name: part(policy, partial(answers, llm, streams, policy, times(asked), tokens))
        for name, policy in policies.items()
    }
    gated = part(f"gate of {GATE}, {GATE_EVERY}", partial(gate, llm, streams, asked[::GATE_EVERY]))
    return {
        "model": llm.name, "tokens": tokens, "every": EVERY, "cache": CACHE, "ends": ENDS,
        "policies": policies, "questions": len(asked), "gate_questions": len(asked[::GATE_EVERY]),
        "gate_tokens": GATE, "gate": by_distance(gated),
        "right": {name: by_distance(shares) for name, shares in right.items()},
        "commits_of_parts": parts.commits,
    }  # fmt: skip


def by_distance(shares: np.ndarray) -> dict[str, Any]:
    """Of shares [B,D]: mean, two standard errors over streams, and every stream's."""
    return {
        str(distance): {
            "mean": row.mean(), "two_errors": 2 * (standard_error(row) or 0), "each": row.tolist(),
        } for distance, row in zip(DISTANCES, shares.T, strict=True)
    }  # fmt: skip


def times(sentences: Iterable[int]) -> list[tuple[int, int]]:
    """(tokens read, number of the sentence) of every question, in order."""
    return sorted((EVERY * n + distance, n) for n in sentences for distance in DISTANCES)


def gate(llm: Llm, streams: Sequence[Streamed], sentences: Sequence[int]) -> np.ndarray:
    """The shares of right answers of full attention, read again for each sentence."""
    policy = f"full:start={GATE + EVERY},max={GATE + EVERY}"
    shares = []
    for number in sentences:
        end = EVERY * number + max(DISTANCES)
        shares.append(answers(llm, streams, policy, times([number]), end, max(0, end - GATE)))
    return np.mean(shares, axis=0)


def answers(
    llm: Llm, streams: Sequence[Streamed], policy: str, asked: Sequence[tuple[int, int]], end: int,
    begin: int = 0,
) -> np.ndarray:  # fmt: skip
    """The shares of right answers [B,D] of a stream of the tokens from `begin` on."""
    stream = models.Stream(llm, policy, len(streams), seed=range(len(streams)))
    tokens = np.array([streamed.tokens for streamed in streams], np.int32)
    right = np.zeros((len(streams), len(DISTANCES)))
    moments = sorted({begin, *(at for at, _ in asked if at <= end)})
    for before, at in pairwise([*moments[:1], *moments]):
        feed(stream, tokens[:, before:at])
        for _, number in (question for question in asked if question[0] == at):
            facts = [streamed.facts[number - 1] for streamed in streams]
            right[:, DISTANCES.index(at - EVERY * number)] += correct(stream, facts)
    return right / len({number for _, number in asked})


def feed(stream: models.Stream, tokens: Int32[np.ndarray, "B T"]) -> None:
    """Read tokens in pieces of WIDTHS, and of what is left."""
    done = 0
    while done < tokens.shape[1]:
        remaining = tokens.shape[1] - done
        width = next((w for w in WIDTHS if w <= remaining), remaining)
        stream.prefill(tokens[:, done : done + width].tolist(), width)
        done += width


def correct(stream: models.Stream, facts: Sequence[Fact]) -> np.ndarray:
    """Whether each sequence's number is answered rightly; the stream stays as it was."""
    llm, size = stream.llm, max(len(fact.ids) for fact in facts)
    tokens, valid, number = np.zeros((3, len(facts), size), np.int32)
    for row, fact in enumerate(facts):
        tokens[row, : len(fact.ids)], valid[row, : len(fact.ids)] = fact.ids, 1
        number[row, fact.start : len(fact.ids)] = 1
    valid = valid.astype(bool)
    lengths = stream.lengths
    stream.reserve(size)
    stream.lengths = lengths  # room alone reads no token
    states = jax.tree.map(jnp.copy, stream.decoding.states)  # `run_layers` donates its states
    positions = positions_of(stream.decoding.position, valid)
    x, _ = run_layers(stream.static, llm.weights, tokens, positions, valid, states)
    likeliest = np.asarray(_likeliest(llm.config, llm.weights, x))[:, :-1]
    return ((likeliest == tokens[:, 1:]) | (number[:, 1:] == 0)).all(axis=1)


@partial(jax.jit, static_argnums=0)
def _likeliest(config: Config, weights: Weights, x: Float[Array, "B T D"]) -> Int32[Array, "B T"]:
    decoder = Decoder(config, weights)
    return jnp.argmax(decoder.logits(decoder.normed(x)), axis=-1).astype(jnp.int32)


QUESTION = 40  # tokens of a question and of what it asks about, at most


def distances_past_gate(results: Results) -> list[str]:
    """The distances at which full attention passes the gate."""
    return [key for key, right in results["gate"].items() if right["mean"] >= PASSES]


def within_cache(results: Results) -> dict[str, float]:
    """Right answers of streaming minus those of full attention, within the cache."""
    right = results["right"]["streaming"]
    return {
        f"{distance} tokens back": right[distance]["mean"] - results["gate"][distance]["mean"]
        for distance in distances_past_gate(results)
        if int(distance) + QUESTION <= results["cache"]
    }


def beyond_cache(results: Results) -> dict[str, float]:
    """Right answers of streaming beyond the cache."""
    return {
        f"{distance} tokens back": results["right"]["streaming"][distance]["mean"]
        for distance in distances_past_gate(results)
        if int(distance) > results["cache"]
    }


def distances_table() -> str:
    """Right answers by cache and by the tokens since the number."""
    results = read("stream_eval")["results"]
    rows = {f"full attention to at most {results['gate_tokens']:,} tokens": results["gate"]}
    rows |= {f"`{name}`": results["right"][name] for name in results["policies"] if name != "full"}
    heads = ("cache", *(f"{distance} tokens back" for distance in results["gate"]))
    cells = (
        (title, *(f"{row[key]['mean']:.0%}" for key in results["gate"]))
        for title, row in rows.items()
    )
    caption = (
        f"{len(results['texts'])} novels of {results['tokens']:,} tokens with a number every "
        f"{results['every']}; caches of {results['cache']} tokens."
    )
    return table(heads, cells, caption)


MEASURE = Measure(
    "stream_eval", measure,
    [flag("--tokens", 6_000, "of each stream", minimum=FIRST + EVERY + max(DISTANCES)),
     flag("--seed", 0)], model=SMOLLM2, texts=2,
)  # fmt: skip
TABLES = {"stream_eval": distances_table}
CLAIMS = (
    claim("StreamEval, cache 2048: 85.8 % at distance 460, 0 % at 2300",
          "Numbers within the cache are answered as by full attention, within 10 points; beyond it "
          "under 10 %", "stream_eval", above(within_cache, by=-0.1), below(beyond_cache, 0.1),
          seen=[above(beyond_cache, -1)], unit="share"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
