"""What every policy computes on two models, to compare the code with the code before a change.

`python -m jaxkv.evals.correctness.numerics` compares with the record and fails if a token differs,
or a number by more than 1e-5 of the largest beside it; `--write` writes the record. It has losses
of a text of three times the cache, greedy and sampled tokens, states after a prompt in chunks of
three sizes, and the engine's answers without and with a hit in the prefix cache. Numbers of
another machine differ in their last bits; equality to the bit is counted for the same one.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib import memory_maps
from jaxkv.evals.lib.record import (
    RESULTS,
    ROOT,
    Record,
    make_parser,
    plain,
    read,
    run_command,
)
from jaxkv.models.generation.serving import make_engine
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import PrefixConfig, Request, answer

STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K"
PROMPT, ANSWER, TEXT = 96, 24, 160
CHUNKS = (7, 32, 96)  # tokens of a prompt that are read at a time
ENDS, COMPRESSED = "sinks=2,window=6", "start=128"
SAMPLE = f"{ENDS},sample=8"
TREE = f"{ENDS},levels=2,block=8"
CASES = {  # policies whose caches are full long before the end of the prompt
    "full": "full:max=256",
    "full int8": "full:max=256,storage=int8",
    "window": "window:window=16",
    "streaming": "streaming:sinks=2,window=14",
    "streaming absolute": "streaming:sinks=2,window=14,positions=absolute",
    "streaming int8": "streaming:sinks=2,window=14,storage=int8",
    "h2o": "h2o:heavy=8,window=8",
    "reservoir": f"reservoir:{SAMPLE}",
    "reservoir weighted": f"reservoir:{SAMPLE},weighted=true",
    "stratified": f"stratified:{SAMPLE}",
    "balance-stream": f"balance-stream:{TREE}",
    "balance-stream walk": f"balance-stream:{TREE},mode=walk",
    "balance": f"balance:{ENDS},rounds=2,block=16,{COMPRESSED}",
    "uniform": f"uniform:{ENDS},rounds=2,{COMPRESSED}",
    "snapkv": f"snapkv:capacity=32,window=8,{COMPRESSED}",
    "pyramidkv": f"pyramidkv:capacity=32,window=8,{COMPRESSED}",
    "expected-attention": f"expected-attention:capacity=32,{COMPRESSED}",
    "keydiff": f"keydiff:capacity=32,{COMPRESSED}",
    "keydiff every": "keydiff:capacity=24,every=8",
    "retrieval": f"retrieval:capacity=32,window=8,{COMPRESSED}",
    "retrieval every": "retrieval:capacity=24,window=8,every=8",
    "tova": "tova:capacity=24",
    "rkv": "rkv:capacity=24,window=6,every=8",
    "vase": "vase:capacity=24,window=6,sinks=2,every=8",
    "triattention": "triattention:capacity=24,every=8",
    "magicpig": f"magicpig:K=4,L=16,{ENDS},{COMPRESSED}",
    "topk": f"topk:share=0.2,{ENDS},{COMPRESSED}",
    "topp": f"topp:mass=0.8,{ENDS},{COMPRESSED}",
    "oracle": f"oracle:share=0.2,{ENDS},{COMPRESSED}",
    "loki": f"loki:share=0.2,{ENDS},{COMPRESSED}",
    "quest": f"quest:share=0.2,page=4,{ENDS},{COMPRESSED}",
    "vattention": f"vattention:top=0.1,base=0.1,{ENDS},{COMPRESSED}",
}


def main() -> None:
    parser = make_parser("jaxkv.evals.correctness.numerics", __doc__)
    parser.add_argument("--write", action="store_true", help="write the record")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES], metavar="CASE")
    options = parser.parse_args()
    llms = {"default": models.load(), "stories260K": models.load(STORIES)}
    files = [path for llm in llms.values() for path in llm.files]
    record = Record("numerics", files, seeds=[3]) if options.write else None
    if not options.write and not (RESULTS / "numerics.json").exists():
        raise UserError("there are no recorded numbers to compare with; run it with --write first")
    recorded = {} if options.write else read("numerics")["results"]
    results = {model: {} for model in llms}
    for model, llm in llms.items():
        for case in options.cases:
            results[model][case] = plain(measure(llm, CASES[case]))
            memory_maps.release()
            print(f"{model}, {case}", file=sys.stderr)
    if record is not None:
        record.finish(results)
        return
    counts = Counter[str]()
    for model, by_case in results.items():
        for case, numbers in by_case.items():
            expected = recorded[model].get(case)
            if expected is None:
                counts["not recorded"] += 1
                print(f"not recorded: {model}, {case}")
                continue
            for path, same in compare(numbers, expected):
                counts[same] += 1
                if same == "different":
                    print(f"different: {model}, {case}, {path}")
    print(", ".join(f"{count} {same}" for same, count in sorted(counts.items())))
    if counts["different"] or counts["not recorded"]:
        raise SystemExit(1)


def measure(llm: Llm, policy: str) -> dict[str, Any]:
    """Losses, tokens, states and answers of one policy."""
    ids = np.random.default_rng(0).integers(3, llm.config.vocab, TEXT).tolist()
    prompt = ids[:PROMPT]
    compresses = any(x.min_prompt is not None for x in llm.policies(policy))
    losses = np.concatenate([*models.losses(llm, ids, policy, prompt=PROMPT * compresses)])
    states = {}
    for chunk in CHUNKS:
        stream = Stream(llm, policy, tokens=PROMPT + ANSWER)
        stream.prefill([prompt], chunk=chunk)
        states[str(chunk)] = [digest(leaf) for leaf in jax.tree.leaves(stream.decoding.states)]
    return {
        "losses": digest(losses) | {"values": losses[:: len(losses) // 16]},
        "tokens": {
            name: models.generate(
                llm, prompt, policy, ANSWER, sampling=sampling, seed=3, ignore_eos=True
            ).tokens
            for name, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0)))
        },
        "states": states,
        "engine": engine_answers(llm, policy, prompt),
    }


def engine_answers(llm: Llm, policy: str, prompt: list[int]) -> dict[str, Any]:
    """The tokens of an answer, of the same request again, and of one with half its prompt."""
    engine = make_engine(
        llm, policy, max_batch=2, max_len=160, chunk=16, prefix_cache=PrefixConfig(), seed=3
    )
    warm = Sampling(temperature=1.0)
    answers = {}
    for name, tokens in (
        ("first", prompt),
        ("again", prompt),
        ("half", prompt[:48] + prompt[:24]),
    ):
        (collected,) = answer(engine, [Request((*tokens,), ANSWER, warm, seed=3)])
        answers[name] = collected.tokens
    return answers


def digest(leaf: Any) -> dict[str, Any]:
    """The sums of an array, which small differences hardly change, and a hash of its bits."""
    array = np.asarray(leaf)
    numbers = np.nan_to_num(np.asarray(array, np.float64))
    return {
        "shape": f"{array.dtype}{list(array.shape)}",
        "sum": float(numbers.sum()),
        "absolute": float(np.abs(numbers).sum()),
        "hash": hashlib.sha256(array.tobytes()).hexdigest()[:12],
    }


def compare(numbers: Any, expected: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each list of tokens and each digest with "equal to the bit", "close" or "different"."""
    if isinstance(expected, dict) and "hash" not in expected:
        for name in expected:
            yield from compare(numbers[name], expected[name], f"{path}/{name}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        if len(numbers) != len(expected):
            yield path, "different"
        for number, pair in enumerate(zip(numbers, expected, strict=False)):
            yield from compare(*pair, f"{path}/{number}")
    elif numbers == expected:
        yield path, "equal to the bit"
    elif isinstance(expected, list):
        yield path, "different"
    else:
        scale = 1e-5 * max(expected["absolute"], 1e-30)
        close = numbers["shape"] == expected["shape"] and all(
            abs(numbers[name] - expected[name]) <= scale for name in ("sum", "absolute")
        )
        yield path, "close" if close else "different"


if __name__ == "__main__":
    run_command(main)
