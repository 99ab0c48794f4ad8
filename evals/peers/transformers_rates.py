"""Tokens a second of transformers and of jaxkv, on the same float32 weights of a published model.

transformers runs eager, with sdpa attention and a DynamicCache, and with its forward compiled by
torch.compile over a StaticCache. Where that does not compile, `compile` has the error. Compiled is
the step of one token; the prompt is read eagerly, as in `generate`. jaxkv runs `full` and
`streaming`. The group `peers` installs transformers and torch.

Each case is a process that loads its model once, so its memory is its own. All cases take turns,
round after round, on all cores. Decoding begins after the prompt and is greedy, and all cases must
generate equal tokens. `first_token` is the seconds to read a prompt, where all programs are
compiled. `memory` is that of a process after each measurement; the peak only grows, in the order
of the measurements. That of the compiled case includes torch's compiler. That of jaxkv includes
copies of its cache: each round of decoding starts from one, where transformers crops its cache.

Run it on an idle machine. torch's threads wait for each other after every operation, so another
program on these cores slows it much more than jaxkv (not recorded).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv import models
from jaxkv.evals.lib.record import Record, make_parser, read, run_command, spread
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.text import PASSAGE
from jaxkv.evals.lib.timing import bar, rate, time_rounds
from jaxkv.evals.lib.verdict import Statement, above
from jaxkv.evals.peers.peer_process import PeerProcess, prompts_of, ratios
from jaxkv.evals.peers.weights import as_folder
from jaxkv.models.loading.llm import Llm, without_weights
from jaxkv.models.loading.published import open_published
from jaxkv.state.memory import show

OURS = [sys.executable, "-m", "jaxkv.evals.peers.our_rates"]
THEIRS = [sys.executable, "-m", "jaxkv.evals.peers.torch_rates"]
POLICIES = {"jaxkv, full": "full", "jaxkv, streaming": "streaming:sinks=4,window=1020"}
EAGER, COMPILED = "transformers, eager", "transformers, compiled"
FIRST = "first token"
ASKED = {"decode, batch 1": 1.5, "decode, batch 8": 1.6, "prefill, 4096": 1.0}  # times EAGER


@dataclass(frozen=True)
class RateSizes:
    """The sizes of a run, with rounds by measurement."""

    decode: dict[int, int]  # rounds by batch size, 1 first
    prefill: dict[int, int]  # rounds by the tokens of the prompt
    first: int  # rounds of the first token
    prompt: int = 256  # tokens before decoding
    new: int = 64  # tokens to decode


FULL = RateSizes({1: 7, 8: 3}, {1024: 5, 4096: 3, 8000: 2}, 5)
QUICK = RateSizes({1: 1, 8: 1}, {1024: 1}, 1)
Cases = dict[str, PeerProcess]


class RateRequest(NamedTuple):
    """One measurement: its title and rounds, the tokens it reads or makes, and the request."""

    title: str
    rounds: int
    tokens: int
    request: dict[str, Any]


def main() -> None:
    parser = make_parser("jaxkv.evals.peers.transformers_rates", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a model folder or GGUF file")
    parser.add_argument("--quick", action="store_true", help="few rounds, short prompts, into out/")
    options = parser.parse_args()
    llm = without_weights(open_published(options.model))
    record = Record("transformers_rates", [*llm.files, PASSAGE], quick=options.quick)
    record.finish(run(llm, QUICK if options.quick else FULL))


def run(llm: Llm, sizes: RateSizes) -> dict[str, Any]:
    """Start all cases and measure them. llm: its weights are loaded from its path."""
    text, prompts = prompts_of(llm, max(sizes.decode), sizes.prompt, max(sizes.prefill))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = as_folder(models.load(llm.path, "float32"), scratch)
        cases, about = start_cases(stack, llm.path, folder, prompts, sizes.new)
        compiled = cases[COMPILED].ask(
            "compile", batches=list(sizes.decode), folder=str(scratch / "compiled")
        )
        if "failed" in compiled:
            print(f"{COMPILED} is left out: {compiled['failed']}")
            del cases[COMPILED]
        peer = cases[EAGER].ask("about")
        measured = measure(cases, requests_of(text, sizes))
    results = {
        "model": llm.name, "sizes": asdict(sizes), "policies": POLICIES, "peer": peer,
        "threads": about[EAGER]["cores"], "compile": compiled,
        "weight_bytes": {name: about[name]["weight_bytes"] for name in cases},
        **measured, "bars": bars(measured["ratio"]),
    }  # fmt: skip
    print(rates_table(results))
    return results


def start_cases(
    stack: ExitStack, path: Path, folder: Path, prompts: Sequence[Sequence[int]], new: int
) -> tuple[Cases, dict[str, dict[str, Any]]]:
    """The processes by name, with their models loaded, and what they say about these.

    path: file of the model; folder: the same weights for transformers.
    """
    cases: Cases = {}
    about: dict[str, dict[str, Any]] = {}
    for name, policy in POLICIES.items():
        cases[name] = stack.enter_context(PeerProcess(name, OURS))
        about[name] = cases[name].ask(
            "load", model=str(path), weights=None, policy=policy, prompts=prompts
        )
    threads = len(os.sched_getaffinity(0))
    for name in (EAGER, COMPILED):
        cases[name] = stack.enter_context(PeerProcess(name, THEIRS))
        about[name] = cases[name].ask(
            "load", model=str(folder), threads=threads, prompts=prompts, new=new
        )
    return cases, about


def requests_of(text: Sequence[int], sizes: RateSizes) -> list[RateRequest]:
    """What is measured, in this order.

    Decoding of more than one sequence comes last: it needs memory that a single user does not.
    """
    single, *batched = [
        RateRequest(f"decode, batch {batch}", rounds, batch * sizes.new,
                    {"do": "decode", "batch": batch, "new": sizes.new})
        for batch, rounds in sizes.decode.items()
    ]  # fmt: skip
    lengths = [(FIRST, sizes.prompt, sizes.first)]
    lengths += [(f"prefill, {count}", count, rounds) for count, rounds in sizes.prefill.items()]
    prefills = [
        RateRequest(title, rounds, count, {"do": "prefill", "tokens": text[:count]})
        for title, count, rounds in lengths
    ]
    return [single, *prefills, *batched]


def measure(cases: Cases, requests: Sequence[RateRequest]) -> dict[str, Any]:
    """Rates, seconds to the first token and memory by case, and ratios by measurement."""
    by_case: dict[str, dict[str, Any]] = {
        name: {"tokens_per_second": {}, "memory": {}} for name in cases
    }
    ratio_of = {}
    for title, rounds, tokens, request in requests:
        used = dict(cases)
        if request["do"] == "decode":
            check_tokens(cases, request["batch"], request["new"])
        else:
            used.pop(COMPILED, None)  # it reads prompts as the eager case does
        variants = {name: case.seconds(**request) for name, case in used.items()}
        seconds = time_rounds(variants, rounds, title)
        ratio_of[title] = ratios(seconds, "transformers")
        for name, case in used.items():
            by_case[name]["memory"][title] = case.ask("memory")
            if title == FIRST:
                by_case[name]["first_token"] = spread(seconds[name])
            else:
                by_case[name]["tokens_per_second"][title] = rate(tokens, seconds[name])
    return {"cases": by_case, "ratio": ratio_of}


def check_tokens(cases: Cases, batch: int, new: int) -> None:
    """SystemExit where the greedy tokens of the cases differ: then they do not do the same work."""
    tokens = {
        name: case.ask("greedy", batch=batch, new=new)["tokens"] for name, case in cases.items()
    }
    wrong = [name for name, answers in tokens.items() if answers != tokens[EAGER]]
    if wrong:
        raise SystemExit(
            f"{' and '.join(wrong)} and {EAGER} generate different tokens at batch {batch}; their "
            "times are not comparable"
        )


def bars(ratio_of: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """The bars of speed of both policies, for what was measured."""
    return [
        bar(f"{title}: {name} over {EAGER}", over[EAGER], ">=", bound)
        for title, bound in ASKED.items()
        for name, over in ratio_of.get(title, {}).items()
    ]


def rates_table(results: dict[str, Any]) -> str:
    """The setting, and a row per case: tokens per second, seconds and bytes."""
    peer, sizes, compiled = results["peer"], results["sizes"], results["compile"]
    cases = [case for title in results["ratio"].values() for case in title.values()]
    rounds = [ratio["n"] for case in cases for ratio in case.values()]
    caption = (
        f"transformers {peer['transformers']} with {peer['attention']} attention on torch "
        f"{peer['torch']}, float32, {results['threads']} threads each, {sizes['prompt']:,} tokens "
        f"before decoding of {sizes['new']:,} and to the first token, {min(rounds)} to "
        f"{max(rounds)} rounds. "
    )
    if "failed" in compiled:
        caption += f"The compiled case is not measured: `{compiled['failed']}`"
    else:
        caption += f"torch.compile took {compiled['seconds']:.0f} seconds."
    titles = [title for title in results["ratio"] if title != FIRST]
    lines = table_head("case", *titles, "first token (s)", "peak memory")
    for name, case in results["cases"].items():
        rates = (rate_cell(case["tokens_per_second"].get(title), ",.0f") for title in titles)
        first = rate_cell(case.get("first_token"), ".2f")
        peak = max(size["peak"] for size in case["memory"].values())
        lines.append(table_row(name, *rates, first, show(peak)))
    return page_table(lines, caption)


def rate_cell(measured: dict[str, float] | None, form: str) -> str:
    """A median with its range, or a dash where the case has no such measurement."""
    return ranged(measured, "median", form) if measured else "–"


TABLES = {"transformers_rates": lambda: rates_table(read("transformers_rates")["results"])}
PAGE = "docs/results/speed.md"
LONG = [f"ratio/prefill, {tokens}" for tokens in (4096, 8000)]
STATEMENTS = (
    Statement(PAGE, "jaxkv decodes more than twice as fast as transformers with one sequence, and "
              "more than 1.5 times with eight", "transformers_rates",
              [above("ratio/decode, batch 1/{case}/{peer}", 2),
               above("ratio/decode, batch 8/{case}/{peer}", 1.5)]),
    Statement(PAGE, "From 4,096 tokens on, prefill is faster too, under `streaming` more than "
              "under `full`", "transformers_rates",
              [*(above(f"{path}/jaxkv, full/{{peer}}", 1) for path in LONG),
               *(above(f"{path}/jaxkv, streaming/{{peer}}", f"{path}/jaxkv, full/{{peer}}")
                 for path in LONG)]),
    Statement("evals/NEGATIVE.md", "On SmolLM2-135M it is met under `full` and under `streaming`",
              "transformers_rates", [above("ratio/prefill, 4096/{case}/{peer}", 1)]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
