"""Synthetic and recorded conversations, with and without prefix caching.

As with chat clients, every turn sends all earlier turns and answers again, and all users begin with
the same instructions. mooncake_first.jsonl has the first requests of
FAST25-release/traces/conversation_trace.jsonl of kvcache-ai/Mooncake, commit
3b5a594133958449a1feaf1c9e0fc1b553e34a28 (Apache-2.0), unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.colab import runtime
from jaxkv.evals.lib.figures import draw_spreads
from jaxkv.evals.lib.record import spread
from jaxkv.evals.prefix_caching import report, traces
from jaxkv.evals.prefix_caching.plots import MODES
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import COLOURS
from jaxkv.serve.engine import Collected, Engine, Request, answer
from jaxkv.state.memory import show

TRACE = Path(__file__).parent / "mooncake_first.jsonl"
RECOMPUTED, CACHED = "recomputed", "prefix caching"
ANSWER_TOKENS = 16
Talk = Callable[[Engine], list[Collected]]
Turns = list[list[list[int]]]  # new tokens by turn and user


class Served(NamedTuple):
    """An engine's answers to the same requests in several rounds.

    bytes: memory of its prefix cache.
    """

    rounds: list[list[Collected]]
    bytes: int

    @property
    def tokens(self) -> list[list[list[int]]]:
        """All answers of every round."""
        return [[reply.tokens for reply in replies] for replies in self.rounds]

    @property
    def prompts(self) -> np.ndarray:
        """Tokens per prompt."""
        return np.array([reply.outcome.prompt_tokens for reply in self.rounds[0]])

    @property
    def cached(self) -> np.ndarray:
        """Cached tokens per prompt."""
        return np.array([reply.outcome.cached_tokens for reply in self.rounds[0]])

    @property
    def read(self) -> np.ndarray:
        """Computed tokens per prompt."""
        return np.array([reply.outcome.computed_tokens for reply in self.rounds[0]])

    @property
    def first(self) -> np.ndarray:
        """Milliseconds from a free slot to the first token, by round and request."""
        outcomes = [[reply.outcome for reply in replies] for replies in self.rounds]
        times = [[o.first_token_seconds - o.queue_seconds for o in row] for row in outcomes]
        return 1e3 * np.array(times)


def make_turns(llm: Llm, users: int, turns: int, instructions: int = 256, seed: int = 0) -> Turns:
    """New tokens of each turn and user: parts of the passage, after instructions at first."""
    rng, ids = np.random.default_rng(seed), runtime.passage(llm, 12_000)

    def part() -> list[int]:
        begin = rng.integers(instructions, len(ids) - 160)
        return ids[begin : begin + rng.integers(80, 160)]

    front = [ids[:instructions], *[[]] * (turns - 1)]
    return [[front[turn] + part() for _ in range(users)] for turn in range(turns)]


def serve_both(recomputing: Engine, caching: Engine, talk: Talk, rounds: int) -> dict[str, Served]:
    """The same requests to an engine without and to one with prefix caching, alternately.

    Every round begins with an empty prefix cache.
    """
    engines = {RECOMPUTED: recomputing, CACHED: caching}
    reported: dict[str, list[list[Collected]]] = {name: [] for name in engines}
    for engine in engines.values():  # the first run compiles
        answer(engine, [Request((1, 2, 3), 2)])
    for number in range(rounds):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            engines[name].reset_prefix_cache()
            reported[name].append(talk(engines[name]))
    return {name: Served(reported[name], engines[name].bytes["prefixes"]) for name in engines}


def max_length(said: Turns) -> int:
    """Tokens of the longest conversation, with its answers."""
    longest = max(sum(map(len, of_user)) for of_user in zip(*said, strict=True))
    return longest + ANSWER_TOKENS * len(said)


def measure_hit_rates(
    concurrent: Sequence[int], requests: int, seeds: int
) -> dict[str, list[dict[str, float]]]:
    """The report's experiment with one prompt for all requests: hit rate in percent by the
    number of concurrent requests.

    `formula` predicts it if only requests of one step share blocks.
    """
    settings = [
        replace(report.ONE_PROMPT, concurrent=number, requests=requests) for number in concurrent
    ]
    rates = {
        mode: [
            spread([report.hits(replace(setting, mode=mode), seed) for seed in range(count)])
            for setting in settings
        ]
        for mode, count in (("alias", 1), ("rekey", seeds), ("full", 1))
    }
    formula = [spread([report.closed_form(setting.concurrent, setting)]) for setting in settings]
    return rates | {"formula": formula}


def hit_rate_by_capacity(trace: traces.Trace, shares: Sequence[float]) -> list[float]:
    """Hit rate in percent of an index that has room for a share of all distinct blocks."""
    distinct = len({key for request in trace.requests for key in request.keys})
    replays = [traces.replay(trace, round(share * distinct)) for share in shares]
    return [100 * replay.blocks_hit / replay.blocks for replay in replays]


def draw_hit_rates(
    rates: Mapping[str, Sequence[Mapping[str, float]]], concurrent: Sequence[int]
) -> runtime.Picture:
    """Hit rate by the number of concurrent requests."""
    figure, axes = pictures.begin(height=3.2)
    at = np.arange(len(concurrent))
    for mode, colour in MODES.items():
        lines = dict(zip(concurrent, rates[mode], strict=True))
        draw_spreads(axes, at, lines, label=mode, color=colour, marker="o", ms=3)
    axes.plot(at, [rate["median"] for rate in rates["formula"]], color=pictures.INK, lw=1.2,
              ls="dotted", zorder=3, label="rekey, formula")  # fmt: skip
    axes.set_xticks(at, concurrent)
    axes.set(xlabel="concurrent requests", ylabel="hit rate (% of blocks)", ylim=(-2, 102))
    pictures.legend(figure, 4)
    return runtime.picture(
        figure, "one prompt of 15 tokens for all, blocks of 16; bars: minimum to maximum"
    )


def draw_capacity(rates: Sequence[float], shares: Sequence[float], caption: str) -> runtime.Picture:
    """Hit rate by the capacity of an index."""
    figure, axes = pictures.begin(height=3.0)
    axes.plot(100 * np.array(shares), rates, "o-", ms=3, color=COLOURS["streaming"])
    axes.set(xlabel="capacity (% of distinct blocks)", ylabel="hit rate (% of blocks)",
             xlim=(0, None), ylim=(0, None))  # fmt: skip
    return runtime.picture(figure, caption)


def draw_first_token_by_turn(
    served: Mapping[str, Mapping[str, Served]], turns: int, caption: str
) -> runtime.Picture:
    """Milliseconds to the first token by turn, medians over users; minimum to maximum round."""
    figure, axes = pictures.begin()
    at = np.arange(turns) + 1
    for policy, pair in served.items():
        name = policy.split(":")[0]
        for label, line in ((RECOMPUTED, "dashed"), (CACHED, "solid")):
            by_turn = pair[label].first.reshape(len(pair[label].rounds), turns, -1)
            lines = dict(enumerate(map(spread, np.median(by_turn, axis=2).T)))
            draw_spreads(axes, at, lines, marker="o", ms=3, color=COLOURS[name], linestyle=line,
                         label=f"{name}, {label}")  # fmt: skip
    axes.set(xlabel="turn of a conversation", ylabel="time to the first token (ms)", ylim=(0, None))
    axes.set_xticks(at)
    pictures.legend(figure, 2)
    return runtime.picture(figure, caption)


def reuse_table(served: Mapping[str, Mapping[str, Served]]) -> str:
    """Prompt tokens, cached tokens, and the memory of the prefix cache."""
    lines = [f"{'':12}{'prompt tokens':>18}{'cached':>12}{'hit rate':>10}{'memory':>14}"]
    for policy, pair in served.items():
        kept = pair[CACHED]
        total, cached = kept.prompts.sum(), kept.cached.sum()
        lines.append(f"{policy.split(':')[0]:12}{total:18,}{cached:12,}{cached / total:10.0%}"
                     f"{show(kept.bytes):>14}")  # fmt: skip
    return "\n".join(lines)
