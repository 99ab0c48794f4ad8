"""Tokens per second of jaxkv and of a peer on one model: llama.cpp, transformers or OpenVINO GenAI.

Each case is a process that loads its model once, so its memory is its own. All cases take turns,
round after round, on the same cores. Decoding is greedy, from the end of a prompt. `first_token` is
the seconds to read that prompt, where all programs are compiled. `memory` is that of a process
after each measurement; the peak only grows, in the order of the measurements. That of jaxkv
includes copies of its cache: each round of decoding starts from one. `bytes_per_second` is what
decoding of one sequence reads of the weights, and `bandwidth` is that of a float32 product of a
matrix with a vector, measured in the same rounds.

llama.cpp runs the GGUF file of SmolLM2-135M-Instruct as it is (Q4_1), and forms that its own
quantiser makes from it. These add the error of two quantisations, so only their speed means
something. jaxkv dequantises the file to float32, or quantises it again to int8. llama.cpp runs in
an environment of its own, built from its source package for this CPU:

    python -m venv PEERS
    PEERS/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
    python -m jaxkv.evals.benchmarks.rates llama.cpp --peer-python PEERS/bin/python

transformers runs the same float32 weights eager, with sdpa attention and a DynamicCache, and with
its forward compiled by torch.compile over a StaticCache; where that does not compile, `compile` has
the error. Compiled is the step of one token; the prompt is read eagerly, as in `generate`. All
cases must generate equal tokens. The group `peers` installs transformers and torch.

OpenVINO GenAI reads the same GGUF file. Its bounded cache drops blocks of 32 tokens that got least
attention, once the prompt is read. It also runs in an environment of its own:

    PEERS/bin/pip install openvino-genai==2026.4.1.0
    python -m jaxkv.evals.benchmarks.rates openvino --peer-python PEERS/bin/python

Run it on an idle machine: threads of the peers wait for each other after every operation, so
another program slows them much more than jaxkv (not recorded).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.benchmarks.weights import as_folder
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.timing import Variant, bar, rate, ratio, time_rounds
from jaxkv.evals.lib.verdict import Statement, above, below, within
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import without_weights
from jaxkv.models.loading.source import open_source
from jaxkv.models.tools.passage import PASSAGE, passage
from jaxkv.state.memory import show

HERE = Path(__file__).parent
OURS = [sys.executable, "-m", "jaxkv.evals.benchmarks.rates_jaxkv"]
TRANSFORMERS = [sys.executable, "-m", "jaxkv.evals.benchmarks.rates_transformers"]
LLAMA_CPP, OPENVINO = HERE / "rates_llama_cpp.py", HERE / "rates_openvino.py"
PAUSE = 0.2  # seconds before a measurement, in which the threads of the last case go to sleep
SIDE = 8192  # of the matrix that measures the bandwidth: larger than caches of processors
FIRST = "first token"
FILE, MADE = "Q4_1", ("Q8_0", "F16")  # the form of the GGUF file, and those made from it
EAGER, COMPILED = "transformers, eager", "transformers, compiled"
BOUNDED, BLOCK = 256, 32  # tokens of a bounded cache beside OpenVINO, and of its blocks


class PeerProcess:
    """A process that answers requests: a peer with one model, or jaxkv with one policy."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenPipeError):  # it has ended
            self.process.stdin.close()  # its loop ends
        self.process.stdout.close()
        self.process.wait()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request; SystemExit where the process has failed."""
        with suppress(BrokenPipeError):  # reading finds the end, too
            self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name}: {do} failed, as above; nothing is written")
        return json.loads(answer)

    def seconds(self, do: str, **arguments: Any) -> Variant:
        """A variant that asks for one measurement."""

        def run() -> float:
            time.sleep(PAUSE)
            return self.ask(do, **arguments)["seconds"]

        return run


@dataclass(frozen=True)
class RateSizes:
    """The sizes of a run, with rounds by measurement.

    decode: rounds by batch size, 1 first. prefill: rounds by the tokens of the prompt. first:
    rounds of the first token. prompt, new: tokens before decoding, and to decode.
    """

    decode: dict[int, int]
    prefill: dict[int, int]
    first: int
    prompt: int
    new: int


class Setup(NamedTuple):
    """What the cases of a peer are made of.

    model: a file or folder. python: the Python that has the peer. scratch: a folder for files.
    """

    model: Path
    python: str
    scratch: Path
    sizes: RateSizes
    threads: int


class RateCase(NamedTuple):
    """One process.

    fields: of its request `load`, which also has prompts and sizes. compiles: fields of its request
    `compile`; where that fails, the case is left out. Compiled is decoding alone.
    """

    command: Sequence[str]
    fields: dict[str, Any]
    compiles: dict[str, Any] | None = None


class Peer(NamedTuple):
    """A program that jaxkv is compared with.

    record: its name. reference: the case whose greedy tokens the others are compared with; `equal`:
    they must be the same, None: they may differ under bounded caches. asked: bars by measurement,
    in times the reference. caption, columns: of the table, besides the rates.
    """

    record: str
    sizes: RateSizes
    policies: dict[str, str]
    cases: Callable[[Setup], dict[str, RateCase]]
    reference: str
    equal: bool | None
    asked: dict[str, float]
    caption: Callable[[dict[str, Any]], str]
    columns: dict[str, Callable[[dict[str, Any]], str]]


RATE_FLAGS = (
    flag("peer", choices=("llama.cpp", "transformers", "openvino")),
    flag("--model", smollm2.NAME, "a model folder or GGUF file"),
    flag("--peer-python", sys.executable, "the Python of llama.cpp or OpenVINO"),
    flag("--threads", type=int, about="default: one per core", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """All cases of a peer, on some cores."""
    options = run.options
    cores = sorted(os.sched_getaffinity(0))
    threads = options.threads or len(cores)
    if threads > len(cores):
        raise UserError(f"--threads must be at most {len(cores)}, got {threads}; give fewer")
    os.sched_setaffinity(0, cores[:threads])  # processes started from here inherit it
    sizes = PEERS[options.peer].sizes
    if options.quick:
        sizes = RateSizes(dict.fromkeys(sizes.decode, 1), {1024: 1}, 1, min(sizes.prompt, 320), 16)
    return measure_peer(options.peer, options.model, options.peer_python, sizes, threads)


def measure_peer(
    name: str, model: str | Path, python: str, sizes: RateSizes, threads: int
) -> dict[str, Any]:
    """Start all cases of a peer and measure them."""
    peer, llm = PEERS[name], without_weights(open_source(model))
    text, prompts = prompts_of(llm, max(sizes.decode), sizes.prompt, max(sizes.prefill))
    common = {"prompts": prompts, "threads": threads, "new": sizes.new,
              "room": max(*sizes.prefill, sizes.prompt + sizes.new)}  # fmt: skip
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = peer.cases(Setup(llm.path, python, scratch, sizes, threads))
        processes: dict[str, PeerProcess] = {}
        about: dict[str, Any] = {}
        compiled: dict[str, Any] = {}
        for title, case in cases.items():
            process = stack.enter_context(PeerProcess(title, case.command))
            about[title] = process.ask("load", **case.fields, **common)
            if case.compiles is not None:
                compiled = process.ask("compile", **case.compiles)
                if "failed" in compiled:
                    print(f"{title} is left out: {compiled['failed']}")
                    continue
            processes[title] = process
        peer_process = next(x for title, x in processes.items() if title.startswith(name))
        results = {
            "model": llm.name, "sizes": asdict(sizes), "prompt": sizes.prompt, "new": sizes.new,
            "threads": threads, "rounds": max(sizes.decode.values()), "policies": peer.policies,
            "peer": peer_process.ask("about"), "compile": compiled,
        }  # fmt: skip
        meter = stack.enter_context(PeerProcess("bandwidth", OURS))
        decodes_only = {title for title, case in cases.items() if case.compiles is not None}
        results |= measure_cases(
            name, processes, about, requests_of(text, sizes), decodes_only, meter
        )
    results["bars"] = bars(peer, results["ratio"])
    print(rates_table(name, results))
    return results


def prompts_of(llm: Any, batch: int, size: int, longest: int) -> tuple[list[int], list[list[int]]]:
    """The beginning of the passage, and as many prompts of `size` tokens cut from it.

    longest: tokens of the longest prompt that is read alone. SystemExit where the passage is too
    short.
    """
    needed = max(longest, size * batch)
    text = passage(llm, needed)
    if len(text) < needed:
        raise SystemExit(
            f"prompts need {needed:,} tokens, the passage has {len(text):,}; give shorter ones"
        )
    return text, [text[start : start + size] for start in range(0, size * batch, size)]


class RateRequest(NamedTuple):
    """One measurement: its title and rounds, the tokens it reads or makes, and the request."""

    title: str
    rounds: int
    tokens: int
    request: dict[str, Any]


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


def measure_cases(
    name: str,
    processes: Mapping[str, PeerProcess],
    about: Mapping[str, dict[str, Any]],
    requests: Sequence[RateRequest],
    decodes_only: set[str],
    meter: PeerProcess,
) -> dict[str, Any]:
    """Rates, seconds to the first token and memory by case, and ratios by measurement.

    about: what each case says of its model. meter: the process that measures the bandwidth.
    """
    by_case = {title: about[title] | {"tokens_per_second": {}, "memory": {}} for title in processes}
    results: dict[str, Any] = {"cases": by_case, "ratio": {}}
    for title, rounds, tokens, request in requests:
        used = dict(processes)
        if request["do"] == "decode":
            batch, new = request["batch"], request["new"]
            results["greedy"] = compare_tokens(PEERS[name], processes, batch, new)
        else:
            used = {case: x for case, x in processes.items() if case not in decodes_only}
        variants = {case: process.seconds(**request) for case, process in used.items()}
        if is_single := request.get("batch") == 1:
            variants["bandwidth"] = meter.seconds("bandwidth", side=SIDE)
        seconds = time_rounds(variants, rounds, title)
        if is_single:
            bandwidth = 4 * SIDE**2 / np.array(seconds.pop("bandwidth"))
            results["bandwidth"] = spread(bandwidth)
        results["ratio"][title] = ratios(seconds, name)
        for case, taken in seconds.items():
            row = by_case[case]
            row["memory"][title] = processes[case].ask("memory")
            if title == FIRST:
                row["first_token"] = spread(taken)
            else:
                row["tokens_per_second"][title] = rate(tokens, taken)
            if is_single:
                read_bytes = row["weight_bytes"] * new / np.array(taken)
                row["bytes_per_second"] = spread(read_bytes)
                row["share_of_bandwidth"] = spread(read_bytes / bandwidth)
    return results


def compare_tokens(
    peer: Peer, processes: Mapping[str, PeerProcess], batch: int, new: int
) -> dict[str, Any]:
    """Greedy tokens that each case has in common with the reference before the first difference.

    SystemExit where any token differs if they must be equal, or where most first tokens differ and
    may not: the cases then do not run the same model.
    """
    tokens = {
        name: process.ask("greedy", batch=batch, new=new)["tokens"]
        for name, process in processes.items()
    }
    common = {
        name: [int(np.argmin([*np.equal(*pair), False]))
               for pair in zip(answers, tokens[peer.reference], strict=True)]
        for name, answers in tokens.items()
    }  # fmt: skip
    wrong = [
        name for name, counts in common.items()
        if (min(counts) < new if peer.equal else np.mean(np.equal(counts, 0)) > 0.5)
        and (peer.equal is not None or name.endswith(", full"))
    ]  # fmt: skip
    if wrong:
        raise SystemExit(
            f"{' and '.join(wrong)} and {peer.reference} generate different tokens at batch "
            f"{batch}; their times are not comparable"
        )
    return {name: {"common": counts, "of": new} for name, counts in common.items()}


def ratios(
    seconds: Mapping[str, Sequence[float]], peer: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens per second of each case of jaxkv over each of the peer's, round by round."""
    jaxkv_cases, peer_cases = (
        [name for name in seconds if name.startswith(side)] for side in ("jaxkv", peer)
    )
    return {
        case: {peer_case: ratio(seconds[peer_case], seconds[case]) for peer_case in peer_cases}
        for case in jaxkv_cases
    }


def bars(peer: Peer, ratio_of: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """The bars of speed of each case of jaxkv, for what was measured."""
    return [
        bar(f"{title}: {name} over {peer.reference}", over[peer.reference], ">=", bound)
        for title, bound in peer.asked.items()
        for name, over in ratio_of.get(title, {}).items()
    ]


def rates_table(name: str, results: dict[str, Any]) -> str:
    """The setting, and a row per case."""
    peer = PEERS[name]
    titles = [title for title in results["ratio"] if title != FIRST]
    lines = table_head("case", *titles, *peer.columns)
    for case_name, case in results["cases"].items():
        rates = (rate_cell(case["tokens_per_second"].get(title), ",.0f") for title in titles)
        cells = (cell(case) for cell in peer.columns.values())
        lines.append(table_row(case_name, *rates, *cells))
    return page_table(lines, peer.caption(results))


def rate_cell(measured: dict[str, float] | None, form: str) -> str:
    """A median with its range, or a dash where the case has no such measurement."""
    return ranged(measured, "median", form) if measured else "–"


def llama_cpp_cases(setup: Setup) -> dict[str, RateCase]:
    """Three forms in llama.cpp, and both forms of jaxkv's weights under both policies."""
    command, files = [setup.python, "-P", str(LLAMA_CPP)], {FILE: str(setup.model)}
    with PeerProcess("llama.cpp's quantiser", command) as quantiser:
        for form in MADE:
            files[form] = str(setup.scratch / f"{form}.gguf")
            quantiser.ask("quantise", source=str(setup.model), target=files[form], form=form,
                          threads=setup.threads)  # fmt: skip
    return {
        f"llama.cpp {form}": RateCase(command, {"model": path}) for form, path in files.items()
    } | {
        f"jaxkv {weights or 'float32'}, {name}": RateCase(
            OURS, {"model": str(setup.model), "weights": weights, "policy": policy}
        )
        for weights in (None, "int8")
        for name, policy in PEERS["llama.cpp"].policies.items()
    }


def llama_cpp_caption(results: dict[str, Any]) -> str:
    peer = results.get("peer") or results["llama_cpp"]
    return (
        f"llama-cpp-python {peer['llama_cpp_python']} (ggml {peer['ggml']}), {results['threads']} "
        f"threads each, {results['prompt']:,} tokens before decoding of {results['new']:,}, "
        f"{results['rounds']} rounds, memory bandwidth {results['bandwidth']['median'] / 1e9:.1f} "
        "GB/s:"
    )


def transformers_cases(setup: Setup) -> dict[str, RateCase]:
    """Both policies of jaxkv, and transformers eager and compiled."""
    folder = str(as_folder(models.load(setup.model, "float32"), setup.scratch))
    compiles = {"batches": list(setup.sizes.decode), "folder": str(setup.scratch / "compiled")}
    return {
        name: RateCase(OURS, {"model": str(setup.model), "weights": None, "policy": policy})
        for name, policy in PEERS["transformers"].policies.items()
    } | {
        EAGER: RateCase(TRANSFORMERS, {"model": folder}),
        COMPILED: RateCase(TRANSFORMERS, {"model": folder}, compiles),
    }


def transformers_caption(results: dict[str, Any]) -> str:
    peer, sizes, compiled = results["peer"], results["sizes"], results["compile"]
    cases = [case for title in results["ratio"].values() for case in title.values()]
    rounds = [over["n"] for case in cases for over in case.values()]
    setting = (
        f"transformers {peer['transformers']} with {peer['attention']} attention on torch "
        f"{peer['torch']}, float32, {results['threads']} threads each, {sizes['prompt']:,} tokens "
        f"before decoding of {sizes['new']:,} and to the first token, {min(rounds)} to "
        f"{max(rounds)} rounds. "
    )
    if "failed" in compiled:
        return setting + f"The compiled case is not measured: `{compiled['failed']}`"
    return setting + f"torch.compile took {compiled['seconds']:.0f} seconds."


def peak_memory(case: dict[str, Any]) -> str:
    """The most memory that the process of a case took."""
    return show(max(x["peak"] for x in case["memory"].values()))


def openvino_cases(setup: Setup) -> dict[str, RateCase]:
    """The file in OpenVINO under both caches, and jaxkv with int8 weights under all policies."""
    command = [setup.python, "-P", str(OPENVINO)]
    parts = {"start_size": BLOCK, "recent_size": BOUNDED // 2, "max_cache_size": BOUNDED}
    model = str(setup.model)
    weights = {f"float32, {name}": None for name in ("full", "streaming")}
    weights |= {f"int8, {name}": "int8" for name in PEERS["openvino"].policies}
    return {
        f"openvino, {name}": RateCase(command, {"model": model, "cache": cache})
        for name, cache in (("full", None), ("eviction", parts))
    } | {
        f"jaxkv {title}": RateCase(
            OURS, {"model": model, "weights": form, "scored": True,
                   "policy": PEERS["openvino"].policies[title.split(", ")[1]]}
        )
        for title, form in weights.items()
    }  # fmt: skip


def openvino_caption(results: dict[str, Any]) -> str:
    peer, sizes = results["peer"], results["sizes"]
    settings = peer["settings"]
    return (
        f"OpenVINO GenAI {peer['openvino_genai'].partition('-')[0]}, products in "
        f"{settings['INFERENCE_PRECISION_HINT']}, cache in {settings['KV_CACHE_PRECISION']}, "
        f"{results['threads']} threads each, bounded caches of at most {BOUNDED} tokens, "
        f"{sizes['prompt']:,} tokens before decoding of {sizes['new']:,}, {results['rounds']} "
        "rounds:"
    )


PEERS = {
    "llama.cpp": Peer(
        record="llama_cpp",
        sizes=RateSizes({1: 9, 8: 9}, {1024: 9}, first=9, prompt=300, new=64),
        policies={"full": "full", "streaming": "streaming:sinks=4,window=252"},
        cases=llama_cpp_cases,
        reference="jaxkv float32, full",
        equal=False,
        asked={},
        caption=llama_cpp_caption,
        columns={
            "bytes of weights": lambda case: show(case["weight_bytes"]),
            "of the bandwidth": lambda case: f"{case['share_of_bandwidth']['median']:.0%}",
            # The record of before has the memory of one sequence alone.
            "memory": lambda case: show(
                case["memory"].get("prefill, 1024", case["memory"])["resident"]
            ),
        },
    ),
    "transformers": Peer(
        record="transformers_rates",
        sizes=RateSizes({1: 7, 8: 3}, {1024: 5, 4096: 3, 8000: 2}, first=5, prompt=256, new=64),
        policies={"jaxkv, full": "full", "jaxkv, streaming": "streaming:sinks=4,window=1020"},
        cases=transformers_cases,
        reference=EAGER,
        equal=True,
        asked={"decode, batch 1": 1.5, "decode, batch 8": 1.6, "prefill, 4096": 1.0},
        caption=transformers_caption,
        columns={
            "first token (s)": lambda case: rate_cell(case.get("first_token"), ".2f"),
            "peak memory": peak_memory,
        },
    ),
    "openvino": Peer(
        record="openvino",
        sizes=RateSizes({1: 9}, {1024: 9}, first=9, prompt=1024, new=256),
        policies={
            "full": "full",
            "streaming": f"streaming:sinks=4,window={BOUNDED - 4}",
            "snapkv": f"snapkv:capacity={BOUNDED - BLOCK},every={BLOCK}",
            "retrieval": f"retrieval:capacity={BOUNDED - BLOCK},every={BLOCK}",
        },
        cases=openvino_cases,
        reference="jaxkv float32, full",
        equal=None,
        asked={},
        caption=openvino_caption,
        columns={
            "loss by quarter of the prompt (OpenVINO's before any eviction)": lambda case: " ".join(
                f"{loss:.2f}" for loss in case["losses"]
            ),
            "cache while decoding": lambda case: show(case["cache"]["decoding"]),
            "cache of the prompt": lambda case: show(case["cache"]["prompt"]),
            "peak memory": peak_memory,
        },
    ),
}


TABLES = {
    peer.record: lambda name=name, record=peer.record: rates_table(name, read(record)["results"])
    for name, peer in PEERS.items()
}
PAGE = "docs/results/speed.md"
LONG = [f"ratio/prefill, {tokens}" for tokens in (4096, 8000)]
LLAMA_PREFILL = [
    f"ratio/prefill, 1024/jaxkv {weights}, {{}}/llama.cpp {form}"
    for weights in ("float32", "int8") for form in MADE
]  # fmt: skip


STREAMED = "jaxkv float32, streaming/openvino, full"
STATEMENTS = (
    Statement(PAGE, "OpenVINO decodes about twice as fast as jaxkv in float32 under `streaming`, "
              "and reads a prompt about twice as fast", "openvino",
              [within(f"ratio/{title}/{STREAMED}", 0.5, by=0.1)
               for title in ("decode, batch 1", "prefill, 1024")]),
    Statement(PAGE, "Its loss is over 0.08 nats higher in each quarter of the prompt than jaxkv's "
              "under `full`", "openvino", [above("cases/openvino, full/losses/{quarter}",
                     "cases/jaxkv float32, full/losses/{quarter}", by=0.08)]),
    Statement(PAGE, "Weights in int8 make jaxkv slower here", "openvino",
              [below(f"cases/jaxkv int8, {policy}/tokens_per_second/{title}",
                     f"cases/jaxkv float32, {policy}/tokens_per_second/{title}")
               for policy in ("full", "streaming")
               for title in ("decode, batch 1", "prefill, 1024")]),
    Statement("docs/compare.md", "On two CPU cores it decodes about twice as fast as jaxkv",
              "openvino", [within(f"ratio/decode, batch 1/{STREAMED}", 0.5, by=0.1)]),
    Statement(PAGE, "llama.cpp is faster in every form", "llama_cpp",
              [below("ratio/decode, batch 1/{case}/{form}", 1)]),
    Statement(PAGE, "jaxkv in int8 under `streaming` is then as fast as Q8_0, and faster than the "
              "file as it is", "llama_cpp",
              [within("ratio/decode, batch 8/jaxkv int8, streaming/llama.cpp Q8_0", 1, by=0.05,
                      sure=False),
               above("ratio/decode, batch 8/jaxkv int8, streaming/llama.cpp Q4_1", 1, sure=False)]),
    Statement(PAGE, "under `full`, Q8_0 and F16 are faster than jaxkv", "llama_cpp",
              [below(path.format("full"), 1) for path in LLAMA_PREFILL]),
    Statement(PAGE, "Under `streaming` jaxkv is as fast as they are", "llama_cpp",
              [within(path.format("streaming"), 1, by=0.06, sure=False) for path in LLAMA_PREFILL]),
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

MEASURE = Measure(
    lambda options: PEERS[options.peer].record, measure, RATE_FLAGS,
    data=lambda options: [*without_weights(open_source(options.model)).files, PASSAGE],
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
