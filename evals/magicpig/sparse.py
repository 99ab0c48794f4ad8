"""Sparse attention end to end: loss, recall, bytes and speed at matched budgets.

A prompt is read exactly. Later queries attend to both ends of it and to an equal share of the keys
between, selected by each method. Experiments:
  perplexity  books after a prompt of three quarters of the context: the loss over full attention
  protocol    MagicPIG with the prompt's last tokens read after prefill, and with a dense layer
  bytes       bytes of a prompt under each method, hash tables included
  recall      the questions of evals.reservoir.recall; the name is the one token after prefill
  tokens      MagicPIG's tokens per second after long prompts (evals/magicpig/sparse_tokens.py)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv import models
from jaxkv.contract import Policy, Spec
from jaxkv.evals.lib.baseline import LARGE
from jaxkv.evals.lib.record import Record
from jaxkv.evals.lib.state_sizes import prefilled_bytes
from jaxkv.evals.lib.text import HELD_BACK, tokens_of
from jaxkv.evals.magicpig import matched_budgets, sparse_tokens
from jaxkv.evals.magicpig.heads import Item
from jaxkv.evals.magicpig.matched_budgets import DRAWING, EndsOnly
from jaxkv.models.device import cores
from jaxkv.models.llm import Llm
from jaxkv.policies import Balance, Full, MagicPIG, SnapKV, Uniform
from jaxkv.policy_spec import by_layer, format_policy
from jaxkv.rotary import NoPosition

SHARES = (0.02, 0.05, 0.1, 0.2)
SINKS, WINDOW = 4, 16
FLOOR, FLOORED = 1e-4, 0.05  # u_floor of the published code, and the share at which it is tried
QUESTION = 32  # last tokens of a prompt that are read after prefill in `protocol`
ANGLES = 4  # stretches on which K and L are chosen
LONG = (32_768, 131_072)  # prompt lengths in `bytes`


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.magicpig.sparse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument("--texts", required=True, type=Path, help="a folder with manifest.json")
    ask.add_argument("--also", nargs=2, type=Path, metavar=("FOLDER", "TEXT"),
                     help="a second model, and a text of it")  # fmt: skip
    ask.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    ask.add_argument("--stretches", type=int, default=16, help="of a text")
    ask.add_argument("--seeds", type=int, default=3, help="of methods that draw")
    ask.add_argument("--apart", type=int, default=20_000, help="tokens between two stretches")
    ask.add_argument("--training", type=int, nargs="+", default=[0, 1, 2],
                     help="seeds of the models of recall")  # fmt: skip
    ask.add_argument("--runs", type=Path, help="keep those models there, or find them")
    ask.add_argument("--questions", type=int, default=50, help="at each distance")
    ask.add_argument("--sizes", type=int, nargs="+", default=list(sparse_tokens.SIZES),
                     help="lengths of the prompts of `tokens`")  # fmt: skip
    ask.add_argument("--written", type=int, default=16, help="tokens that are timed")
    ask.add_argument("--rounds", type=int, default=5, help="of each time")
    ask.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    ask.add_argument("--quick", action="store_true", help="small sizes, into out/")
    given = smaller(ask.parse_args())
    if not all(0 < share <= 1 for share in given.shares):
        ask.error(f"--shares must be above 0 and at most 1, got {given.shares}")
    if min(given.sizes) < 256:
        ask.error(f"--sizes must be at least 256 tokens, got {given.sizes}")
    for name, least in (("stretches", 2), ("seeds", 1), ("questions", 1), ("rounds", 1),
                        ("written", 1), ("apart", 1024)):  # fmt: skip
        if getattr(given, name) < least:
            ask.error(f"--{name} must be at least {least}, got {getattr(given, name)}")
    if (given.rounds + 2) * given.written > sparse_tokens.ROOM:
        ask.error(f"--rounds and --written leave no room: {sparse_tokens.ROOM} tokens in all")

    try:
        texts = [ScoredText.of(models.load(), given.texts, given)]
        texts += (
            [ScoredText.of(models.load(given.also[0]), given.also[1], given)] if given.also else []
        )
    except ValueError as error:
        ask.error(str(error))
    data = [path for text in texts for path in (*text.llm.files, *text.files)]
    quick = given.quick or set(given.only) != set(PARTS)  # a part is not the record
    record = Record("sparse", data, list(range(given.seeds)), quick)
    results: dict[str, Any] = {"seconds": {}}
    for part in given.only:
        begun = perf_counter()
        results[part] = PARTS[part](texts, given)
        results["seconds"][part] = perf_counter() - begun
        print(f"{part}: {results['seconds'][part]:.0f} s", file=sys.stderr)
    record.finish(results)


def smaller(given: argparse.Namespace) -> argparse.Namespace:
    """Reduce all sizes if --quick is given."""
    if given.quick:
        for name, most in (("stretches", 3), ("seeds", 2), ("questions", 10), ("rounds", 2)):
            setattr(given, name, min(most, getattr(given, name)))
        given.shares = middle(given.shares)
        given.training, given.sizes = given.training[:1], [4096]
    return given


def middle(wanted: Sequence[float]) -> Sequence[float]:
    return wanted[1:3] if len(wanted) > 2 else wanted


class ScoredText(NamedTuple):
    """A model, stretches of text to score, and others between them to choose K and L on.

    first: tokens of a prompt; 0: three quarters of a stretch.
    """

    llm: Llm
    files: Sequence[Path]
    stretches: list[list[int]]
    between: list[list[int]]
    first: int = 0

    @classmethod
    def of(cls, llm: Llm, texts: Path, given: argparse.Namespace) -> ScoredText:
        """Stretches as long as the context. Raises ValueError if the text is too short."""
        front = llm.tokenizer.front
        wanted = given.stretches * given.apart
        ids, files = tokens_of(llm, texts, wanted, HELD_BACK)
        # With less text, the stretches are closer together.
        apart, size = len(ids) // given.stretches, llm.config.context - len(front)
        if apart < 2 * size:
            raise ValueError(f"{texts} holds only {len(ids):,} tokens; ask for fewer stretches")

        def cut(at: int) -> list[list[int]]:
            firsts = range(at, len(ids) - size + 1, apart)
            return [[*front, *ids[first : first + size]] for first in firsts][: given.stretches]

        return cls(llm, files, cut(0), cut(apart // 2))

    @property
    def prompt(self) -> int:
        return self.first or 3 * len(self.stretches[0]) // 4

    def tables(self, wanted: Sequence[float]) -> dict[float, tuple[int, int]]:
        """K and L for each share, from the angles in other stretches."""
        each = matched_budgets.captured(self.llm, self.between[:ANGLES])
        found = matched_budgets.angles(self.llm.spec, each, self.prompt, SINKS, WINDOW)
        return {share: matched_budgets.tables(found, share) for share in wanted}


def perplexity(texts: Sequence[ScoredText], given: argparse.Namespace) -> dict[str, Any]:
    """By model and method, the loss after prompts minus that of full attention; for the second
    model only at the middle shares and without evicting policies."""
    found = {}
    for text in texts:
        first = text is texts[0]
        wanted = given.shares if first else middle(given.shares)
        evicting = compressed(text.prompt) if first else {}
        found[text.llm.name] = of_text(text, wanted, evicting, given.seeds)
    return found


def of_text(
    text: ScoredText, wanted: Sequence[float], evicting: dict[str, Policy], seeds: int
) -> dict[str, Any]:
    """Every method at the wanted shares; evicting: evicting policies."""
    llm, size = text.llm, len(text.stretches[0])
    base = losses(text, Full(max=size), 1, "full")
    found: dict[str, Any] = {
        "prompt": text.prompt, "scored": size - text.prompt - 1,
        "sinks": SINKS, "window": WINDOW, "stretches": len(text.stretches), "seeds": seeds,
        "full": {"loss": float(base.mean()), "each": base[0].tolist()},
        "shares": {}, "evicting": {},
    }  # fmt: skip

    def line(chosen: Policy, name: str, drawing: bool) -> dict[str, Any]:
        each = losses(text, chosen, seeds if drawing else 1, name)
        return {"policy": format_policy(chosen), "over_full": excess_loss(each, base)}

    found["ends alone"] = line(EndsOnly(sinks=SINKS, window=WINDOW), "ends alone", False)
    each = matched_budgets.captured(llm, text.stretches[:ANGLES])
    for share, tables in text.tables(wanted).items():
        chosen = matched_budgets.methods(share, tables, SINKS, WINDOW)
        if share == FLOORED:
            chosen["magicpig, u_floor"] = replace(chosen["magicpig"], u_floor=FLOOR)
        found["shares"][f"{share:g}"] = {
            name: line(one, f"{name} {share:.0%}", name.split(",")[0] in DRAWING)
            | {"share_read": matched_budgets.read(llm, one, each, text.prompt)}
            for name, one in chosen.items()
        }
    for name, one in evicting.items():
        found["evicting"][name] = line(one, name, not isinstance(one, SnapKV)) | {
            "state_bytes": llm.config.layers * prefilled_bytes(one, llm.spec, text.prompt)
        }
    return found


def compressed(prompt: int) -> dict[str, Policy]:
    """Policies that cache a half, a quarter or an eighth of the keys between the ends."""
    found: dict[str, Policy] = {}
    for times in (1, 2, 3):
        ends = {"sinks": SINKS, "window": WINDOW, "rounds": times, "start": prompt}
        left = SINKS + WINDOW + (prompt - SINKS - WINDOW) // 2**times
        found |= {
            f"uniform, 1/{2**times}": Uniform(**ends),
            f"balance, 1/{2**times}": Balance(**ends),
            f"snapkv, 1/{2**times}": SnapKV(left, WINDOW, start=prompt),
        }
    return found


def losses(
    text: ScoredText, chosen: Policy | Sequence[Policy], seeds: int, title: str, question: int = 0
) -> np.ndarray:
    """The mean loss after the prompt of each stretch, by seed and stretch."""
    count = len(text.stretches)
    one = partial(after_prompt, text, chosen, question=question)

    def mean(number: int) -> float:
        seed, stretch = divmod(number, count)
        return one(stretch, seed + seeds * stretch)  # every stretch has its own seeds

    found = [mean(0)]  # compiles
    with ThreadPoolExecutor(cores()) as pool:
        found += with_progress(pool.map(mean, range(1, seeds * count)), seeds * count - 1, title)
    jax.clear_caches()  # a process can map only this many compiled programs
    return np.reshape(found, (seeds, count))


def after_prompt(
    text: ScoredText, chosen: Policy | Sequence[Policy], stretch: int, seed: int, question: int = 0
) -> float:
    """The mean loss of a stretch after its prompt; question: this many of its last tokens are read
    after the end of prefill."""
    tokens, prompt = text.stretches[stretch], text.prompt
    stream = models.Stream(text.llm, chosen, seed=seed, tokens=len(tokens))
    stream.prefill([tokens[: prompt - question]], prompt)
    stream.finish_prefill()
    if question:
        stream.prefill([tokens[prompt - question : prompt]], question)
    rest = tokens[prompt:]
    found = np.concatenate(list(models.losses(text.llm, rest, chunk=len(rest), stream=stream)))
    if not np.isfinite(found).all():
        raise SystemExit(f"{chosen} gives losses that are not finite; nothing is written")
    return float(found.mean(dtype=np.float64))


def with_progress(items: Iterator[Item], count: int, title: str) -> list[Item]:
    """All items as a list, with rate and remaining time on stderr."""
    found, begun = [], perf_counter()
    for number, item in enumerate(items, 1):
        found.append(item)
        rate = number / (perf_counter() - begun)
        if sys.stderr.isatty() or number == count:
            print(f"\r{title}: {number} of {count}, {rate:.2f} a second, "
                  f"{(count - number) / rate:.0f} s left ", end="\n" if number == count else "",
                  file=sys.stderr, flush=True)  # fmt: skip
    return found


def excess_loss(each: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """Losses [seeds,stretches] minus the base: the mean, two standard errors over stretches and
    over seeds, and the difference by stretch."""
    more = each - base
    errors = {
        name: 2 * means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else None
        for name, means in (("stretches", more.mean(axis=0)), ("seeds", more.mean(axis=1)))
    }
    return {"mean": more.mean(), "two_errors": errors, "each": more.mean(axis=0).tolist()}


def protocol(texts: Sequence[ScoredText], given: argparse.Namespace) -> dict[str, Any]:
    """MagicPIG at the smaller shares, with dense or sparse questions and with a dense layer."""
    text, found = texts[0], {}
    layers = text.llm.config.layers
    base = losses(text, Full(max=text.llm.config.context), 1, "full")
    for share, (bits, tables) in text.tables(given.shares[:2]).items():
        chosen = MagicPIG(bits, tables, SINKS, WINDOW, tail=matched_budgets.ROOM)
        first = by_layer(f"0=full:max={text.llm.config.context};*={format_policy(chosen)}", layers)
        variants = {f"question {read}, {of}": (policies, question)
                for of, policies in (("all layers sampled", (chosen,) * layers),
                                     ("first layer dense", first))
                for read, question in (("dense", 0), ("sparse", QUESTION))}  # fmt: skip
        found[f"{share:g}"] = {
            name: {
                "policy": format_policy(policies), "question": question,
                "over_full": excess_loss(
                    losses(text, policies, given.seeds, f"{name}, {share:.0%}", question), base),
            }
            for name, (policies, question) in variants.items()
        }  # fmt: skip
    return {"question": QUESTION, "shares": found}


def bytes_by_method(texts: Sequence[ScoredText], given: argparse.Namespace) -> dict[str, Any]:
    """Bytes of the state after prefill, by method."""
    text = texts[0]
    own = {f"magicpig, {share:.0%}": MagicPIG(*tables, SINKS, WINDOW, start=text.prompt, tail=1)
           for share, tables in text.tables(given.shares).items()}  # fmt: skip
    own |= {
        "topk, oracle, quest, vattention": EndsOnly(start=text.prompt),
        **compressed(text.prompt),
    }
    found = {str(text.prompt): of_prompt(own, text.llm.spec, text.llm.config.layers, text.prompt)}
    heads = LARGE["heads"]
    dim = LARGE["width"] // heads
    spec = Spec(heads, dim, dim**-0.5, NoPosition(), group=1)
    for size in LONG:
        long = {"magicpig": MagicPIG(start=size, tail=1), **compressed(size)}
        found[str(size)] = of_prompt(long, spec, LARGE["layers"], size)
    return found


def of_prompt(
    policies: dict[str, Policy], spec: Spec, layers: int, prompt: int
) -> dict[str, dict[str, Any]]:
    """Bytes of each policy, and the number of tokens that a full cache of these bytes has."""
    whole = layers * prefilled_bytes(Full(max=prompt, start=prompt), spec, prompt)
    found = {"full": {"state_bytes": whole, "over_full": 1.0, "tokens_of_full": prompt}}
    for name, one in policies.items():
        count = layers * prefilled_bytes(one, spec, prompt)
        found[name] = {
            "policy": format_policy(one), "state_bytes": count, "over_full": count / whole,
            "tokens_of_full": count * prompt / whole,
        }  # fmt: skip
    return found


def recalled(_: Sequence[ScoredText], given: argparse.Namespace) -> dict[str, Any]:
    """evals/magicpig/sparse_recall.py; it trains models, so it needs the extra `train`."""
    from jaxkv.evals.magicpig import sparse_recall

    return sparse_recall.recall(given)


PARTS: dict[str, Callable[[Sequence[ScoredText], argparse.Namespace], dict[str, Any]]] = {
    "perplexity": perplexity,
    "protocol": protocol,
    "bytes": bytes_by_method,
    "recall": recalled,
    "tokens": lambda _, given: sparse_tokens.tokens(given),
}


if __name__ == "__main__":
    main()
