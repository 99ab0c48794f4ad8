"""Tokens a second of llama.cpp and of jaxkv, on the same GGUF file of SmolLM2-135M-Instruct.

llama.cpp runs the file as it is (Q4_1), and forms that its own quantiser makes from it. These add
the error of two quantisations, so only their speed means something. jaxkv dequantises the file to
float32, or quantises it again to int8. llama.cpp runs in an environment of its own, built from
its source package for this CPU:

    python -m venv PEERS
    PEERS/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
    python -m jaxkv.evals.peers.llama_cpp --peer-python PEERS/bin/python

Each case is a process that loads its model once. All cases take turns, round after round, on the
same cores. `bytes_per_second` is what decoding of one sequence reads of the weights, and
`bandwidth` is that of a float32 product of a matrix with a vector, measured in the same rounds.

Run it on an idle machine. The threads of llama.cpp spin until all of them have finished an
operation, so another program on these cores slows it much more than jaxkv (not recorded).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.evals.lib.record import Record, make_parser, read, run_command, spread
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.timing import rate, time_rounds
from jaxkv.evals.lib.verdict import Statement, above, below, within
from jaxkv.evals.peers.peer_process import PeerProcess, prompts_of, ratios
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import without_weights
from jaxkv.models.loading.published import open_published
from jaxkv.state.memory import show

SCRIPT = Path(__file__).with_name("llama_cpp_rates.py")
OURS = [sys.executable, "-m", "jaxkv.evals.peers.our_rates"]
POLICIES = {"full": "full", "streaming": "streaming:sinks=4,window=252"}
WEIGHTS = {"float32": None, "int8": "int8"}
FILE, MADE = "Q4_1", ("Q8_0", "F16")  # the form of the file, and those made from it
REFERENCE = "jaxkv float32, full"  # whose greedy tokens the others are compared with
SIDE = 8192  # of the matrix that measures the bandwidth: larger than caches of processors


def main() -> None:
    parser = make_parser("jaxkv.evals.peers.llama_cpp", __doc__)
    parser.add_argument("--peer-python", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument("--prefill", type=int, nargs="+", default=[1024], help="tokens of a prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="begin with 1")
    parser.add_argument("--prompt", type=int, default=300, help="tokens before decoding")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small numbers, into out/")
    options = parser.parse_args()
    if options.batches[0] != 1:
        parser.error(
            f"--batches must begin with 1, got {options.batches[0]}; bytes a second need it"
        )
    if options.quick:
        options.prefill, options.prompt, options.new, options.rounds = [256], 64, 16, 2
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < options.threads:
        parser.error(
            f"--threads {options.threads} needs as many cores, got {len(cores)}; give fewer"
        )
    os.sched_setaffinity(0, cores[: options.threads])  # processes started from here inherit it
    record = Record("llama_cpp", [smollm2.fetch()], quick=options.quick)
    record.finish(run(smollm2.fetch(), options))


def run(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start all cases and measure them."""
    llm = without_weights(open_published(file))
    text, prompts = prompts_of(llm, max(options.batches), options.prompt, max(options.prefill))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases, about = start_cases(stack, file, folder, prompts, options)
        peer = next(case for case in cases.values() if case.name.startswith("llama.cpp"))
        fixed = {
            "model": llm.name, "prompt": options.prompt, "new": options.new,
            "threads": options.threads, "rounds": options.rounds, "policies": POLICIES,
            "llama_cpp": peer.ask("about"),
        }  # fmt: skip
        for name, case in cases.items():
            about[name]["memory"] = memory_of_one(case, text[: max(options.prefill)], options.new)
        greedy = compare_tokens(cases, max(options.batches), options.new)
        meter = stack.enter_context(PeerProcess("bandwidth", OURS))
        results = fixed | measure(cases, about, meter, text, options) | {"greedy": greedy}
    print(rates_table(results))
    return results


def start_cases(
    stack: ExitStack,
    file: Path,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> tuple[dict[str, PeerProcess], dict[str, dict[str, Any]]]:
    """The processes by name, with their models loaded, and what they say about these.

    folder: place of the files that llama.cpp's quantiser makes.
    """
    peer, files = [options.peer_python, "-P", str(SCRIPT)], {FILE: str(file)}
    with PeerProcess("llama.cpp's quantiser", peer) as quantiser:
        for form in MADE:
            files[form] = str(folder / f"{form}.gguf")
            quantiser.ask("quantise", source=str(file), target=files[form], form=form,
                          threads=options.threads)  # fmt: skip
    room = max(*options.prefill, options.prompt + options.new)
    cases: dict[str, PeerProcess] = {}
    about: dict[str, dict[str, Any]] = {}
    for form, path in files.items():
        case = stack.enter_context(PeerProcess(f"llama.cpp {form}", peer))
        about[case.name] = case.ask(
            "load", model=path, threads=options.threads, prompts=prompts, room=room
        )
        cases[case.name] = case
    for weights, asked in WEIGHTS.items():
        for name, policy in POLICIES.items():
            case = stack.enter_context(PeerProcess(f"jaxkv {weights}, {name}", OURS))
            about[case.name] = case.ask(
                "load", model=str(file), weights=asked, policy=policy, prompts=prompts
            )
            cases[case.name] = case
    return cases, about


def memory_of_one(case: PeerProcess, tokens: Sequence[int], new: int) -> dict[str, int]:
    """Memory of a process that has read one prompt and decoded from another.

    It is called before any batch is decoded.
    """
    case.ask("prefill", tokens=tokens)
    case.ask("decode", batch=1, new=new)
    return case.ask("memory")


def compare_tokens(cases: Mapping[str, PeerProcess], batch: int, new: int) -> dict[str, Any]:
    """Greedy tokens that each case has in common with the reference before the first difference.

    SystemExit where most first tokens differ: the cases then do not run the same model.
    """
    tokens = {
        name: case.ask("greedy", batch=batch, new=new)["tokens"] for name, case in cases.items()
    }
    by_case = {}
    for name, answers in tokens.items():
        common = [int(np.argmin([*np.equal(*pair), False]))
                  for pair in zip(answers, tokens[REFERENCE], strict=True)]  # fmt: skip
        if np.mean(np.equal(common, 0)) > 0.5:
            raise SystemExit(
                f"{name} and {REFERENCE} predict different tokens; their times are not comparable"
            )
        by_case[name] = {"common": common, "of": new}
    return by_case


def measure(
    cases: Mapping[str, PeerProcess],
    about: Mapping[str, dict[str, Any]],
    meter: PeerProcess,
    text: Sequence[int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The times of all cases in turn. about: what each says about its model and memory."""
    asked: dict[str, tuple[int, dict[str, Any]]] = (
        {  # tokens, and the request
            f"prefill, {count}": (count, {"do": "prefill", "tokens": text[:count]})
            for count in options.prefill
        }
        | {
            f"decode, batch {batch}": (
                batch * options.new,
                {"do": "decode", "batch": batch, "new": options.new},
            )
            for batch in options.batches
        }
    )
    seconds: dict[str, dict[str, list[float]]] = {}
    for title, (_, request) in asked.items():
        variants = {name: case.seconds(**request) for name, case in cases.items()}
        if title == "decode, batch 1":
            variants["bandwidth"] = meter.seconds("bandwidth", side=SIDE)
        seconds[title] = time_rounds(variants, options.rounds, title)
    bandwidth = 4 * SIDE**2 / np.array(seconds["decode, batch 1"].pop("bandwidth"))
    by_case = {}
    for name in cases:
        read = (
            about[name]["weight_bytes"] * options.new / np.array(seconds["decode, batch 1"][name])
        )
        by_case[name] = about[name] | {
            "tokens_per_second": {
                title: rate(tokens, seconds[title][name]) for title, (tokens, _) in asked.items()
            },
            "bytes_per_second": spread(read),
            "share_of_bandwidth": spread(read / bandwidth),
        }
    ratio_of = {title: ratios(by_case, "llama.cpp") for title, by_case in seconds.items()}
    return {"bandwidth": spread(bandwidth), "cases": by_case, "ratio": ratio_of}


def rates_table(results: dict[str, Any]) -> str:
    """The setting, and a row per case: tokens per second, and what decoding reads."""
    peer, cases = results["llama_cpp"], results["cases"]
    caption = (
        f"llama-cpp-python {peer['llama_cpp_python']} (ggml {peer['ggml']}), {results['threads']} "
        f"threads each, {results['prompt']:,} tokens before decoding of {results['new']:,}, "
        f"{results['rounds']} rounds, memory bandwidth {results['bandwidth']['median'] / 1e9:.1f} "
        "GB/s:"
    )
    titles = list(next(iter(cases.values()))["tokens_per_second"])
    lines = table_head("case", *titles, "bytes of weights", "of the bandwidth", "memory")
    for name, case in cases.items():
        rates = (ranged(case["tokens_per_second"][title], "median", ",.0f") for title in titles)
        share = f"{case['share_of_bandwidth']['median']:.0%}"
        memory = show(case["memory"]["resident"])
        lines.append(table_row(name, *rates, show(case["weight_bytes"]), share, memory))
    return page_table(lines, caption)


TABLES = {"llama_cpp": lambda: rates_table(read("llama_cpp")["results"])}
PAGE = "docs/results/speed.md"
STATEMENTS = (
    Statement(PAGE, "llama.cpp is faster in every form", "llama_cpp",
              [below("ratio/decode, batch 1/{case}/{form}", 1)]),
    Statement(PAGE, "jaxkv in int8 under `streaming` is then as fast as Q8_0, and faster than the "
              "file as it is", "llama_cpp",
              [within("ratio/decode, batch 8/jaxkv int8, streaming/llama.cpp Q8_0", 1, by=0.05,
                      sure=False),
               above("ratio/decode, batch 8/jaxkv int8, streaming/llama.cpp Q4_1", 1, sure=False)]),
    Statement(PAGE, "under `full`, Q8_0 and F16 are faster than jaxkv", "llama_cpp",
              [below(f"ratio/prefill, 1024/jaxkv {weights}, full/llama.cpp {form}", 1)
               for weights in WEIGHTS for form in MADE]),
    Statement(PAGE, "Under `streaming` jaxkv is as fast as they are", "llama_cpp",
              [within(f"ratio/prefill, 1024/jaxkv {weights}, streaming/llama.cpp {form}", 1,
                      by=0.06, sure=False) for weights in WEIGHTS for form in MADE]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
