"""Every policy on one text and one model, and README's two tables of them.

The text and the model come with the package, so anybody can do this again. Policies keep 126 or 128
tokens, or read as many of a prompt of 384, but for `full` and what draws or chooses by a mass
(`magicpig`, `topp`). Two questions: how well is a text predicted without end, by those that need no
prompt, and how well behind a prompt of three quarters of the trained context, by all. Memory and
time are those of one row behind a prompt of 4,000 tokens.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import numpy as np

import models
from evals import growth, runtime, sparse
from evals.record import RESULTS, Record, read
from evals.sparse import Text
from jaxkv.memory import show
from jaxkv.policies import POLICIES
from models.llm import Llm

LONG = 4_000  # tokens of the prompt behind which memory and time are told
SAMPLED = "sinks=4,window=60"
ENDS = "sinks=4,window=36"  # of a prompt of 384: with a quarter of what lies between, 126
SETTINGS = {
    "full": "full",
    "window": "window:window=128",
    "streaming": "streaming:sinks=4,window=124",
    "h2o": "h2o:heavy=64,window=64",
    "reservoir": f"reservoir:{SAMPLED},sample=64",
    "stratified": f"stratified:{SAMPLED},sample=64",
    "balance-stream": f"balance-stream:{SAMPLED},levels=3,block=32",
    "balance": f"balance:{ENDS},rounds=2",
    "uniform": f"uniform:{ENDS},rounds=2",
    "snapkv": "snapkv:capacity=126,window=36",
    "pyramidkv": "pyramidkv:capacity=126,window=36",
    "magicpig": f"magicpig:K=8,L=75,{ENDS}",
    "topk": f"topk:share=0.25,{ENDS}",
    "topp": f"topp:mass=0.9,{ENDS}",
    "oracle": f"oracle:share=0.25,{ENDS}",
    "quest": f"quest:share=0.25,{ENDS}",
    "vattention": f"vattention:top=0.125,base=0.125,{ENDS}",
}
SEEDS = 4  # of those that draw

# Bytes of a row and layer in words, where t is 2 K H itemsize + 4, those of a token; when to take
# a policy, and when not. `jaxkv policies NAME` has the formula to the last byte.
GROWS = "t a token"
THINNED = "t a token of the prompt until it is thinned, then t a token that is left"
USE = {
    "full": (GROWS, "texts shorter than the trained context; the yardstick",
             "longer ones: it falls apart, and its memory grows"),
    "window": ("window t + 4", "models trained with a sliding window",
               "models that have grown sinks: they fail without their first tokens"),
    "streaming": ("(sinks + window) t + 4", "endless text, from any model: the first to try",
                  "questions about what has left the window"),
    "h2o": ("(heavy + window) K (2 H itemsize + 8) + 4",
            "a yardstick for what chooses by attention",
            "speed: every token is scored, chunk by chunk"),
    "reservoir": ("(sinks + window) t, and K sample (2 H itemsize + 4) + 8 K + 8",
                  "something of all that was said stays in view, each token as likely",
                  "the next token alone matters: it costs a little loss"),
    "stratified": ("as reservoir", "the same, spread evenly over the text", "as reservoir"),
    "balance-stream": ("as reservoir, of block/2 (levels + 1) tokens",
                       "the same, of tokens that stand for their like", "as reservoir"),
    "balance": (THINNED, "a long prompt, thinned once, with a short answer",
                "endless text; prompts of which a few tokens matter"),
    "uniform": (THINNED, "the yardstick of `balance`, and often as good", "as balance"),
    "snapkv": (THINNED, "a prompt that ends in its question",
               "several questions to one prompt: it was thinned for the first"),
    "pyramidkv": (THINNED, "as snapkv, where deep layers need less", "as snapkv"),
    "magicpig": ("t a token, and 2 or 4 bytes for each table, token and kv head",
                 "prompts of tens of thousands of tokens, to read fewer of them for a token",
                 "memory: it saves none; prompts that are short"),
    "topk": (GROWS, "a yardstick: the best keys there are", "speed or memory: it reads every key"),
    "topp": (GROWS, "the same, as many as hold a mass", "as topk"),
    "oracle": (GROWS, "a yardstick: the best that sampling can do", "as topk"),
    "quest": (GROWS, "a yardstick of pages of keys", "as topk"),
    "vattention": (GROWS, "a yardstick with a promised error", "as topk"),
}  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m evals.policies", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    ask.add_argument("--quick", action="store_true", help="little of it, into out/")
    given = ask.parse_args()
    llm = models.load()
    record = Record("policies", [runtime.PASSAGE, llm.folder / "model.safetensors"],
                    range(SEEDS), quick=given.quick)  # fmt: skip
    print("wrote", record.save(measure(llm, given.quick)))
    if not given.quick:
        from evals.figures import main as draw

        draw()


def measure(llm: Llm, quick: bool = False) -> dict[str, Any]:
    """All figures, by the name of a policy."""
    size, ids = llm.config.context, runtime.passage(llm, 3_000 if quick else 15_000)
    stretches = [
        [*llm.tokenizer.front, *ids[at : at + size - 1]] for at in range(1, len(ids) - size, size)
    ]
    text, seeds = Text(llm, [runtime.PASSAGE], stretches, []), 2 if quick else SEEDS
    base = sparse.losses(text, SETTINGS["full"], 1, "full")
    rows: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        each = sparse.losses(text, setting, seeds, name)
        rows[name] = {"policy": setting, "behind_a_prompt": sparse.over(each, base)}
        if not hasattr(POLICIES[name], "seal"):
            parts = list(models.losses(llm, ids, setting))
            rows[name]["without_end"] = float(np.concatenate(parts).mean(dtype=np.float64))
    costs = growth.measure(
        llm, ids, list(SETTINGS.values()), [500 if quick else LONG], 32, 3 if quick else 9
    )
    dense = costs[SETTINGS["full"]][0]
    for row in rows.values():
        (cost,) = costs[row["policy"]]
        row["state_bytes"] = cost.state_bytes
        row["times_as_long"] = cost.microseconds / dense.microseconds
    return {
        "tokens": len(ids), "stretches": len(stretches), "prompt": text.prompt,
        "scored": size - text.prompt - 1, "long": LONG, "full_loss": float(base.mean()),
        "full_microseconds": dense.microseconds, "rows": rows,
    }  # fmt: skip


def policies() -> str:
    """README's table of what there is."""
    lines = ["| policy | keeps | bytes for a row and layer | take it for | not for |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, policy in POLICIES.items():
        memory, when, not_when = USE[name]
        keeps = f"{policy.summary} ({linked(policy.source)})"
        lines.append(f"| `{name}` | {keeps} | {memory} | {when} | {not_when} |")
    return "\n".join(lines) + "\n"


def linked(source: str) -> str:
    """A source with its paper's address."""
    return re.sub(r"(.*?),? arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\2)", source)


def measured() -> str:
    """README's table of what was measured."""
    results = read("policies", RESULTS)["results"]
    lines = ["| setting | loss without end | loss behind a prompt, over full's | "
             "memory at 4,000 tokens | time of a token, over full's |",
             "|---|---|---|---|---|"]  # fmt: skip
    for row in results["rows"].values():
        over = row["behind_a_prompt"]
        error = over["two_errors"]["stretches"]
        endless = f"{row['without_end']:.3f}" if "without_end" in row else "(needs a prompt)"
        behind = "0" if row["policy"] == "full" else f"{over['mean']:+.3f} ± {error:.3f}"
        lines.append(
            f"| `{row['policy']}` | {endless} | {behind} | {show(row['state_bytes'])} | "
            f"{row['times_as_long']:.2f} |"
        )
    return "\n".join(lines) + "\n"


TABLES = {"policies": policies, "measured": measured}

if __name__ == "__main__":
    main()
