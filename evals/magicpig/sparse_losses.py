"""Losses of sparse attention after prompts of a real model, at equal shares of the keys.

The beginning of each text is a prompt. Full attention reads it once, and every method takes its
queries, keys and values from there, because all of them attend exactly until the end of prefill.
The tokens after it are scored by teacher forcing; their queries attend to both ends of the prompt
and to a share of the keys between. K and L of MagicPIG and the mass of top-p are chosen on the
tokens of the same texts after those. Parts are kept under out/, so that an interrupted run
continues.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Chunk, Policy
from jaxkv.errors import UserError
from jaxkv.evals.lib.paired_losses import excess
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import Record, spread
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.text import first_tokens
from jaxkv.evals.lib.verdict import Results, above, below, claim
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.evals.magicpig.heads import capture
from jaxkv.evals.magicpig.matched_budgets import (
    ASKED,
    DRAWING,
    CosineHistogram,
    EndsOnly,
    Masses,
    Seen,
)
from jaxkv.models.generation.score import gather, hidden_by_chunk
from jaxkv.models.generation.shared_prompt import Attended, absorb
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.device import cores
from jaxkv.models.tools import measurement
from jaxkv.policies import Full, MagicPIG
from jaxkv.policy_spec import format_policy
from jaxkv.typing import Array, Float

PROMPT, SCORED = 2_048, 256  # tokens
SHARES = (0.02, 0.05, 0.1, 0.2)
SINKS, WINDOW = 4, 16
ANGLES = 4  # texts on which K, L and the mass are chosen
EVERY = 16  # of the queries by which K, L and the mass are chosen
TIMED = 4  # tokens of a text that are read one by one, for the time
COLUMNS = ("loss", "kl", "agreement", "read", "bytes", "seconds")  # of a method, by text


FLAGS = (
    flag("--prompt", PROMPT, "tokens", minimum=SINKS + WINDOW + 1),
    flag("--scored", SCORED, "tokens after the prompt", minimum=ASKED + 1),
    flag("--shares", SHARES, minimum=1e-9),
    flag("--seeds", 1, "of methods that draw", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """The losses of all methods on the beginnings of texts."""
    llm, options = run.llm, run.options
    if max(options.shares) > 1:
        raise UserError(f"--shares must be at most 1, got {options.shares}; try 0.05")
    size = options.prompt + options.scored + 1
    novels = first_tokens(llm, options.texts, 2 * size)
    texts = [RecordedText(llm, ids[:size], options.prompt) for ids in novels.values()]
    after = [RecordedText(llm, ids[size:], options.prompt) for ids in novels.values()]
    methods = MethodLosses(llm, texts, after[:ANGLES], options.seeds, run.record)
    return {"texts": list(novels), "perplexity": {llm.name: methods.all(options.shares)}}


@dataclass(frozen=True, eq=False)
class RecordedText:
    """The beginning of one text: a prompt, and tokens after it of which all but the last are fed.

    tokens: token ids of both. prompt: number of tokens of the prompt.
    """

    llm: Llm
    tokens: Sequence[int]
    prompt: int

    @cached_property
    def seen(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Queries, keys and values [T,*,H] of every layer under full attention."""
        return capture(self.llm, self.tokens[:-1])

    def free_seen(self) -> None:
        """Free `seen`: a gigabyte after a prompt of 8,000 tokens."""
        self.__dict__.pop("seen", None)

    def chunk(self, layer: int, part: slice) -> Chunk:
        """A part of what one layer attended with."""
        positions = np.arange(len(self.tokens) - 1, dtype=np.uint32)
        every = *self.seen[layer], positions, np.ones(len(positions), bool)
        return Chunk(*(jnp.asarray(a[None, part]) for a in every))

    def after_prompt(self, policy: Policy, seed: int) -> models.Stream:
        """A stream that has taken the prompt in, prefill finished."""
        stream = models.Stream(self.llm, roomy(policy, self.prompt, len(self.tokens)), seed=seed)
        stream.reserve(self.prompt)
        spec, prompt_slice = self.llm.spec, slice(self.prompt)
        states = tuple(
            absorb(layer_policy, spec, state, Attended(*self.chunk(layer, prompt_slice)))
            for layer, (layer_policy, state) in enumerate(
                zip(stream.policies, stream.decoding.states, strict=True)
            )
        )
        position = jnp.full(1, self.prompt, jnp.uint32)
        stream.decoding = stream.decoding._replace(states=states, position=position)
        stream.finish_prefill()
        # Slots for all tokens are there already (`roomy`); to reserve more would double them.
        stream.prompt_lengths = np.array([len(self.tokens)])
        return stream

    def after(self, stream: models.Stream) -> Float[Array, "D 1 T"]:
        """The last layer's output for the tokens after the prompt, which the stream reads."""
        rest = self.tokens[self.prompt :]
        ((hidden, _, _),) = hidden_by_chunk(self.llm, stream, np.asarray(rest, np.int32), len(rest))
        return hidden[:, :, : len(rest) - 1]

    @cached_property
    def full(self) -> Float[Array, "D 1 T"]:
        """`after` under full attention."""
        return self.after(self.after_prompt(Full(max=len(self.tokens)), 0))

    def measured(self, policy: Policy, seed: int) -> tuple[float, ...]:
        """The first five COLUMNS under a policy; exits where a loss is not finite."""
        stream = self.after_prompt(policy, seed)
        read = 1.0 if isinstance(policy, Full) else self.share_read(stream)
        targets = jnp.asarray([self.tokens[self.prompt + 1 :]], jnp.int32)
        hidden = self.after(stream)
        static, weights = stream.static.of_model, self.llm.weights
        compared = measurement.compare(static, weights, hidden, targets, self.full)
        loss, kl, agreement = np.asarray(compared, np.float64).mean(axis=0)
        if not np.isfinite([loss, kl]).all():
            raise SystemExit(f"{policy} gives losses that are not finite; nothing is written")
        return loss, kl, agreement, read, stream.state_bytes

    def share_read(self, stream: models.Stream) -> float:
        """The share of the keys between the ends that the last queries attend to, over layers."""
        last = len(self.tokens) - 1 - ASKED
        middle, asking = slice(self.prompt, last), slice(last, None)
        states = enumerate(zip(stream.policies, stream.decoding.states, strict=True))
        return float(np.mean([
            matched_budgets.share_after(
                policy, self.llm.spec, state, self.chunk(layer, middle), self.chunk(layer, asking),
                last,
            )
            for layer, (policy, state) in states
        ]))  # fmt: skip

    def seconds(self, policy: Policy, seed: int) -> float:
        """Seconds per token, one token at a time, compilation apart."""
        stream = self.after_prompt(policy, seed)
        timed_tokens = self.tokens[self.prompt : self.prompt + TIMED + 1]
        return gather(models.losses(self.llm, timed_tokens, chunk=1, stream=stream))[1] / TIMED


class MethodLosses:
    """The losses of all methods on some texts."""

    def __init__(
        self,
        llm: Llm,
        texts: Sequence[RecordedText],
        between: Sequence[RecordedText],
        seeds: int,
        record: Record,
    ):
        """between: texts of other tokens, on which K, L and the mass are chosen."""
        self.llm, self.texts, self.between, self.seeds, self.record = (
            llm, texts, between, seeds, record,
        )  # fmt: skip
        self.size = len(texts[0].tokens)

    def all(self, shares: Sequence[float]) -> dict[str, Any]:
        """By share and method, the loss minus that of full attention, and what it costs."""
        prompt, scored = self.texts[0].prompt, self.size - self.texts[0].prompt - 1
        drawn = len(DRAWING) * self.seeds
        methods = len(matched_budgets.methods(0.1, (4, 4), SINKS, WINDOW, 0.5))
        self.parts = Parts(self.record, 4 + len(shares) * (methods - len(DRAWING) + drawn))
        angles, masses = self.angles(), self.masses()
        for text in self.between:
            text.free_seen()
        base = self.columns_by_seed(Full(max=self.size), False)
        full = columns(base)
        results: dict[str, Any] = {
            "prompt": prompt, "scored": scored, "sinks": SINKS, "window": WINDOW,
            "stretches": len(self.texts), "seeds": self.seeds, "timed": TIMED,
            "full": {"loss": full["loss"].mean(), "each": full["loss"][0].tolist()} | cost(full),
            "ends alone": self.line(EndsOnly(sinks=SINKS, window=WINDOW), False, base),
            "shares": {},
        }  # fmt: skip
        for share in shares:
            tables, mass = matched_budgets.tables(angles, share), masses.reaching(share)
            chosen = matched_budgets.methods(share, tables, SINKS, WINDOW, mass)
            results["shares"][f"{share:g}"] = {
                name: self.line(policy, name in DRAWING, base) for name, policy in chosen.items()
            }
            jax.clear_caches()  # a process can map only this many compiled programs
        return results | {"commits_of_parts": self.parts.commits}

    def line(self, policy: Policy, drawing: bool, base: np.ndarray) -> dict[str, Any]:
        """The entry of one method in the record."""
        by_column = columns(self.columns_by_seed(policy, drawing))
        return {
            "policy": format_policy(policy),
            "over_full": excess(by_column["loss"], columns(base)["loss"]),
            "kl": excess(by_column["kl"], np.zeros_like(by_column["kl"])),
            "agreement": by_column["agreement"].mean(),
            "share_read": {
                "mean": by_column["read"].mean(),
                "each": by_column["read"].mean(0).tolist(),
            },
        } | cost(by_column)

    def columns_by_seed(self, policy: Policy, drawing: bool) -> np.ndarray:
        """The COLUMNS of a method [seeds,texts,C]."""
        return np.stack([
            self.part(
                f"{format_policy(policy)}, seed {seed}", self.texts,
                partial(self.measured, policy, seed),
            )
            for seed in range(self.seeds if drawing else 1)
        ])  # fmt: skip

    def measured(self, policy: Policy, seed: int) -> np.ndarray:
        """The COLUMNS of each text [texts,C]; the texts have seeds of their own."""
        seeds = [seed + self.seeds * number for number in range(len(self.texts))]
        measure_text = lambda text, seed: text.measured(policy, seed)  # noqa: E731
        by_text = [measure_text(self.texts[0], seeds[0])]  # compiles
        with ThreadPoolExecutor(cores()) as pool:
            by_text += pool.map(measure_text, self.texts[1:], seeds[1:])
        times = [text.seconds(policy, seed) for text, seed in zip(self.texts, seeds, strict=True)]
        return np.column_stack([by_text, times])

    def angles(self) -> CosineHistogram:
        """Those by which K and L are chosen."""
        histogram = self.part("angles", self.between, lambda: np.stack(
            matched_budgets.angles(self.llm.spec, *self.seen_between(), SINKS, WINDOW, EVERY)
        ))  # fmt: skip
        return CosineHistogram(*histogram)

    def masses(self) -> Masses:
        """Those by which the mass of top-p is chosen."""
        curve = self.part("masses", self.between, lambda: np.stack(
            matched_budgets.masses(self.llm.spec, *self.seen_between(), SINKS, WINDOW, EVERY)
        ))  # fmt: skip
        return Masses(*curve)

    def seen_between(self) -> tuple[list[Seen], int]:
        return [text.seen for text in self.between], self.between[0].prompt

    def part(
        self, name: str, texts: Sequence[RecordedText], compute: Callable[[], np.ndarray]
    ) -> Any:
        """A part, named by what it depends on."""
        every = np.concatenate([np.asarray(text.tokens, np.int32) for text in texts])
        prompt, hash_ = texts[0].prompt, zlib.crc32(every.tobytes())
        return self.parts.part(f"{self.llm.name}, prompt {prompt}, {hash_:x}, {name}", compute)


def roomy(policy: Policy, prompt: int, size: int) -> Policy:
    """The policy with slots for all `size` tokens at once, so that none are empty."""
    if isinstance(policy, MagicPIG):
        return replace(policy, start=prompt, tail=size - prompt)
    return replace(policy, start=size)


def columns(measured: np.ndarray) -> dict[str, np.ndarray]:
    """The values of each of the COLUMNS, by seed and text."""
    return dict(zip(COLUMNS, np.moveaxis(measured, -1, 0), strict=True))


def cost(by_column: dict[str, np.ndarray]) -> dict[str, Any]:
    """Bytes of the caches with all tokens, and seconds per token."""
    return {
        "state_bytes": by_column["bytes"].mean(),
        "seconds": spread(by_column["seconds"].ravel()),
    }


MEASURE = Measure("sparse_135m", measure, FLAGS, model=SMOLLM2, texts=2)
RECORDS = {"sparse_135m": "2,048", "sparse_135m_4096": "4,096", "sparse_135m_7680": "7,680"}
TASKS = {"tasks": "1,024", "tasks_2048": "2,048", "tasks_4096": "4,096"}  # tokens of prompts
LOSS = 0.1  # of all answers; a smaller difference counts as none


def loss_path(method: str, share: str = "{share}") -> str:
    """The path of a method's loss over full attention's."""
    return f"perplexity/{{model}}/shares/{share}/{method}/over_full"


def over_ends(results: Results) -> dict[str, Any]:
    """The loss of magicpig over that of attention to the ends alone, both minus full's."""
    cases = {}
    for model in results["perplexity"].values():
        ends = model["ends alone"]["over_full"]["mean"]
        for share, methods in model["shares"].items():
            loss = methods["magicpig"]["over_full"]
            cases[f"{float(share):.0%}"] = {
                "mean": loss["mean"] / ends,
                "two_errors": loss["two_errors"]["stretches"] / ends,
            }
    return cases


CLAIMS = (
    *(claim("RULER 86.4 of 88.7, LongBench 70.3 of 71.2, with 2 % of the keys",
            f"After {tokens} tokens, `magicpig` with 2 to 20 % of the keys loses under a tenth of "
            "what sinks and window alone lose", name, below(over_ends, 0.1), unit="share")
      for name, tokens in RECORDS.items()),
    *(claim("RULER 87.6 against 82.1",
            f"After {tokens} tokens, `magicpig` loses less than Quest at equal shares, by more "
            "than two standard errors", name,
            below(loss_path("magicpig") + "/each", loss_path("quest") + "/each"))
      for name, tokens in RECORDS.items()),
    *(claim("RULER 86.4 of 88.7",
            f"In {tokens} tokens, `magicpig` recalls facts at most 10 points less often than full "
            "attention", name,
            above("tasks/{task}/{tokens}/ratios/{budget}/magicpig/score",
                  "tasks/{task}/{tokens}/full/score", by=-LOSS), unit="points")
      for name, tokens in TASKS.items()),
    *(claim("RULER 87.6 against 82.1",
            f"In {tokens} tokens, `magicpig` recalls facts over 10 points more often than Quest",
            name,
            above("tasks/{task}/{tokens}/ratios/{budget}/magicpig/score",
                  "tasks/{task}/{tokens}/ratios/{budget}/quest/score", by=LOSS), unit="points")
      for name, tokens in TASKS.items()),
    claim("RULER 86.4 of 88.7", "The published scores on RULER and LongBench", "",
          needs="an 8B model, RULER and LongBench"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
