"""Tables of all policies at equal budgets, and what docs/which_cache.md says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, within
from jaxkv.state.memory import show


def predicted() -> str:
    """The loss of the next token by policy."""
    results = read("side_by_side")["results"]
    caption = (
        f"{results['stretches']} stretches of {results['prompt']} tokens of prompt and "
        f"{results['scored']} scored ones; {results['tokens']:,} tokens of endless text in blocks "
        f"of {results['block']}; {results['seeds']} seeds."
    )
    heads = ("policy", "KV budget (tokens)", "after a prompt: loss minus full's",
             "endless text: loss minus streaming's")  # fmt: skip
    cells = []
    for name, row in results["rows"].items():
        first, last = (row["tokens"][at]["mean"] for at in ("first", "last"))
        grows = f"{first:.0f}" if round(first) == round(last) else f"{first:.0f} to {last:.0f}"
        after = "0" if name == "full" else over(row["after_prompt"])
        endless = "0" if name == "streaming" else over(row.get("endless"))
        cells.append((f"`{name}`", grows, after, endless))
    return table(heads, cells, caption)


def over(difference: Mapping[str, Any] | None) -> str:
    """A difference with two standard errors."""
    if difference is None:
        return "needs a prompt"
    return f"{difference['mean']:+.3f} ± {difference['two_errors']['stretches']:.3f}"


def cost() -> str:
    """What a token costs after a long prompt, by policy."""
    results = read("side_by_side")["results"]
    time = results["rows"]["full"]["long"]["microseconds"]
    caption = (
        f"After {results['long']:,} tokens; medians of {time['n']} rounds with their range. A "
        f"token of `full` takes {time['median'] / 1000:.1f} ms on two cores."
    )
    heads = ("policy", "KV budget (tokens)", "memory during prefill", "memory during decode",
             "time per token over full's", "compiling (seconds)")  # fmt: skip
    rows = {f"`{name}`": row["long"] for name, row in results["rows"].items()}
    rows |= {f"`{row['policy']}`": row for row in results["other_costs"].values()}
    return table(heads, (
        (name, ranged(long["tokens"], "mean", ",.0f"), show(long["reading_bytes"]),
         show(long["state_bytes"]),
         "1" if name == "`full`" else ranged(long["times_as_long"], "median", ".2f"),
         f"{long['compile_seconds']:.1f}")
        for name, long in rows.items()
    ), caption)  # fmt: skip


TABLES = {"predicted": predicted, "cost": cost}


def scores(task: str, baseline: str, *policies: str) -> Derived:
    """Of a record of tasks: right answers of policies from a quarter of the context, minus those
    of another policy."""

    def differences(results: Results) -> dict[str, float]:
        rows = results["tasks"][task]["1024"]["ratios"]["0.25"]
        return {name: rows[name]["score"] - rows[baseline]["score"] for name in policies}

    return differences


def blocks_mean(policy: str, first: int, end: int | None) -> Derived:
    """The loss on endless text minus streaming's, over these blocks."""

    def mean_of_blocks(results: Results) -> dict[str, float]:
        blocks = results["rows"][policy]["endless"]["each"][first:end]
        return {policy: sum(blocks) / len(blocks)}

    return mean_of_blocks


PAGE = "docs/which_cache.md"
SAMPLES = ("reservoir", "stratified", "balance-stream")
OTHER_COMPRESSION = ("balance", "uniform", "snapkv", "pyramidkv", "expected-attention")


def of_forms(name: str, *, repeated: bool, over: str = "full") -> Derived:
    """A cost of the forms that compress again and again, or of calibrated budgets compressed once,
    over that of another policy."""

    def ratios(results: Results) -> dict[str, float]:
        value = lambda row: row[name]["median"] if isinstance(row[name], dict) else row[name]
        base = value(results["rows"][over]["long"])
        return {
            form: value(row) / base
            for form, row in results["other_costs"].items()
            if form.endswith("repeated") == repeated
        }

    return ratios


STATEMENTS = (
    *(Statement(page, "With `every=16` a token takes longer than under `streaming`, and less than "
                "half as long as under `full`", "side_by_side",
                [below(of_forms("times_as_long", repeated=True), 0.5),
                 above(of_forms("times_as_long", repeated=True, over="streaming"), 1)])
      for page in ("docs/results/policies.md", "docs/which_cache.md")),
    Statement("docs/results/policies.md", "With calibrated budgets, `retrieval` compiles over "
              "twice as long as with adaptive ones", "side_by_side",
              [above(of_forms("compile_seconds", repeated=False, over="retrieval"), 2)]),
    Statement("docs/results/policies.md",
              "after a prompt only `expected-attention` loses more than 0.02 nats", "side_by_side",
              [above("rows/expected-attention/after_prompt", 0.02),
               *(below(f"rows/{name}/after_prompt", 0.02, sure=False)
                 for name in read("side_by_side")["results"]["rows"]
                 if name != "expected-attention")]),
    Statement("docs/results/policies.md", "On endless text `snapkv`, `pyramidkv` and `rkv` lose a "
              "little less than `streaming`", "side_by_side",
              [below(f"rows/{name}/endless", 0) for name in ("snapkv", "pyramidkv", "rkv")]),
    Statement("docs/results/policies.md", "and `retrieval` about as much", "side_by_side",
              [within("rows/retrieval/endless", 0, by=0.05)]),
    Statement("docs/results/policies.md", "`tova`, `vase` and `expected-attention` lose over 0.1 "
              "nats more", "side_by_side",
              [above(f"rows/{name}/endless", 0.1)
               for name in ("tova", "vase", "expected-attention")]),
    Statement("docs/results/policies.md", "`tova` and `vase` lose hardly more in the first half of "
              "the text", "side_by_side",
              [within(blocks_mean(name, 0, 14), 0, by=0.03) for name in ("tova", "vase")]),
    Statement("docs/results/policies.md", "they lose over 0.5 nats more on average",
              "side_by_side",
              [above(blocks_mean(name, 16, None), 0.5) for name in ("tova", "vase")]),
    Statement(PAGE, "Under `window`, SmolLM2-135M, which has attention sinks, loses over 0.4 nats "
              "more per token", "streaming_tables", [above("tables/256/rows/0+256", 0.4)]),
    Statement(PAGE, "On SmolLM2-135M, from a quarter of 1,024 tokens, a sample finds fewer "
              "needles than `streaming`", "tasks",
              [below(scores("needle", "streaming", *SAMPLES))]),
    Statement(PAGE, "`keydiff` answers half of the needles and all pass keys", "tasks",
              [within("tasks/needle/1024/ratios/0.25/keydiff/score", 0.5),
               above("tasks/passkey/1024/ratios/0.25/keydiff/score", 0.99)]),
    Statement(PAGE, "`balance`, `uniform`, `snapkv`, `pyramidkv` and `expected-attention` answer "
              "no more needles than `streaming`", "tasks",
              [below(scores("needle", "streaming", *OTHER_COMPRESSION), 0.001)]),
    Statement(PAGE, "`balance` and `uniform` answer more pass keys", "tasks",
              [above(scores("passkey", "streaming", "balance", "uniform"))]),
    Statement(PAGE, "Beyond the trained context it loses over 0.3 nats more than `streaming`",
              "side_by_side",
              [above(f"rows/{name}/endless", 0.3) for name in ("full", "h2o")]),
    Statement(PAGE, "It needs more memory than `full`", "side_by_side",
              [above("rows/magicpig/long/state_bytes", "rows/full/long/state_bytes")]),
    Statement(PAGE, "so they save neither memory nor time", "side_by_side",
              [comparison for name in ("topk", "topp", "oracle", "quest", "vattention")
               for comparison in (
                   above(f"rows/{name}/long/times_as_long", 1),
                   above(f"rows/{name}/long/state_bytes", "rows/full/long/state_bytes"))]),
    Statement(PAGE, "From a quarter of 1,024 tokens, `snapkv` and `pyramidkv` answer no needle "
              "even if the question is part of the prompt", "tasks_query_aware",
              [below(f"tasks/needle/1024/ratios/0.25/{name}/score", 0.001)
               for name in ("snapkv", "pyramidkv")]),
    Statement(PAGE, "the loss after the prompt is lower under `expected-attention` than under "
              "`keydiff`", "peers",
              [below(f"prompts/{tokens}/cases/expected-attention/{removed}/over_full/ours/by_text",
                     f"prompts/{tokens}/cases/keydiff/{removed}/over_full/ours/by_text")
               for tokens in (1024, 2048) for removed in (0.5, 0.75)]),
    Statement(PAGE, "decodes up to 1.6 times as fast as `full` after 131,072 tokens and hardly "
              "faster after 32,768", "sparse_tokens",
              [above("131072/times_faster", 1.6, sure=False), below("32768/times_faster", 1.2)]),
)  # fmt: skip
