"""Conversations through the engine, with what was read of prompts kept and without.

Each turn sends all that was said before once more, and all users begin with the same instructions,
as clients of chat models do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evals import prefix_report, runtime
from evals.palette import styles
from evals.prefix_figures import MODES
from jaxkv.engine import Collected, Prefixes, Request, answer
from jaxkv.memory import show
from jaxkv.prefix import Chain, root
from models.llm import Llm
from models.serving import engine_of


class Talk(NamedTuple):
    """Requests in the order in which they come, and the turn of each, from 0."""

    requests: list[Request]
    turns: list[int]


class Served(NamedTuple):
    """What an engine made of a talk. bytes: of the prefixes that it has room for."""

    answers: list[Collected]
    bytes: int

    @property
    def tokens(self) -> list[list[int]]:
        return [one.tokens for one in self.answers]

    @property
    def read(self) -> int:
        """Tokens of prompts that were computed."""
        return sum(one.outcome.read_tokens for one in self.answers)

    @property
    def found(self) -> int:
        """Tokens of prompts that need not be."""
        return sum(one.outcome.cached_tokens for one in self.answers)

    def first(self, turns: Sequence[int]) -> list[float]:
        """By turn the median seconds from where a slot was there to the first token."""
        waited = np.array([one.outcome.first - one.outcome.begun for one in self.answers])
        return [float(np.median(waited[np.array(turns) == turn])) for turn in sorted(set(turns))]


def talk(llm: Llm, users: int, turns: int, instructions: int = 256, seed: int = 0) -> Talk:
    """Users who take turns: the instructions, then again and again something of the passage."""
    rng, ids = np.random.default_rng(seed), runtime.passage(llm, 15_000)
    said = [list(ids[:instructions]) for _ in range(users)]
    made = Talk([], [])
    for turn in range(turns):
        for prompt in said:
            begin, size = rng.integers(1_000, 14_000), rng.integers(80, 160)
            prompt += ids[begin : begin + size]
            made.requests.append(Request(tuple(prompt), 8, seed=len(made.turns)))
            made.turns.append(turn)
    return made


def serve(llm: Llm, policy: str, asked: Talk, prefixes: Prefixes | None, chunk: int = 64) -> Served:
    """All answers of an engine of its own, which begins with nothing."""
    longest = max(len(one.tokens) + one.max_new_tokens for one in asked.requests)
    engine = engine_of(
        llm, policy, slots=4, room=longest, chunk=chunk, queue=len(asked.requests),
        prefixes=prefixes,
    )  # fmt: skip
    answer(engine, asked.requests[:1])  # what runs for the first time takes longer
    engine.forget()
    return Served(answer(engine, asked.requests), engine.bytes_of_prefixes)


def keys(ids: Sequence[int], block: int = 16) -> list[str]:
    """The first digits of what each block of a prompt is known by."""
    return [key.hex()[:6] for key in Chain(block).read(ids, root(model="any")).keys]


def hits(modes: Sequence[str], shares: Sequence[float], requests: int) -> dict[str, list[float]]:
    """The report's experiment: blocks found in percent, by the share of frequent prompts."""
    setting = {"requests": requests, "block": 16, "slots": 16}
    return {
        mode: [prefix_report.hits(prefix_report.Setting(mode=mode, p=p, **setting), 0)
               for p in shares]
        for mode in modes
    }  # fmt: skip


def draw_hits(found: dict[str, list[float]], shares: Sequence[float]) -> runtime.Picture:
    """What an index finds by how alike prompts are."""
    figure, axes = runtime.axes(7.0, 3.2)
    for mode, line in found.items():
        axes.plot(100 * np.array(shares), line, "o-", ms=3, color=MODES[mode], label=mode)
    axes.set(xlabel="prompts drawn from ten frequent ones (%)", ylabel="blocks found (%)",
             ylim=(0, 100))  # fmt: skip
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=3)
    return runtime.picture(figure, "prompts of 15 tokens in blocks of 16, 16 requests at a time")


def draw_first(served: dict[str, tuple[Served, Served]], turns: Sequence[int]) -> runtime.Picture:
    """Seconds to the first token by turn, without and with prefixes kept."""
    figure, axes = runtime.axes(7.0, 3.2)
    at = np.arange(len(set(turns))) + 1
    for (policy, pair), look in zip(served.items(), styles(list(served)), strict=True):
        name = policy.split(":")[0]
        for one, line, label in zip(pair, ("dashed", "solid"), ("read anew", "kept"), strict=True):
            seconds = 1e3 * np.array(one.first(turns))
            axes.plot(at, seconds, marker="o", ms=3, color=look["color"], linestyle=line,
                      label=f"{name}, {label}")  # fmt: skip
    axes.set(xlabel="turn of a conversation", ylabel="time to the first token (ms)", ylim=(0, None))
    axes.set_xticks(at)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=2)
    return runtime.picture(figure, f"median of all users, {runtime.device()}")


def table(served: dict[str, tuple[Served, Served]]) -> str:
    """Tokens read and found again, and the memory of what is kept."""
    lines = [f"{'':12}{'read anew':>12}{'read with it':>14}{'found again':>13}{'memory of it':>14}"]
    lines += [
        f"{policy.split(':')[0]:12}{none.read:12,}{kept.read:14,}{kept.found:13,}"
        f"{show(kept.bytes):>14}"
        for policy, (none, kept) in served.items()
    ]
    return "\n".join(lines)
