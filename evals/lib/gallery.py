"""The titles of all pictures, and the page that shows them: docs/pictures.md."""

from __future__ import annotations

from jaxkv.evals.lib.record import RESULTS

CHAPTERS: dict[str, dict[str, str]] = {
    "Attention sinks": {
        "streaming_tables": "Sinks keep the loss level beyond the trained context",
        "first_token": "In later layers the first token gets much of the attention",
        "attention_maps": "Attention of the first tokens, by layer",
        "endless_135m": "One cache for a whole text costs no loss (SmolLM2-135M)",
        "endless": "One cache for a whole text costs no loss (small model)",
        "latency": "Streaming decodes in constant time; re-computation does not",
    },
    "Trained sinks": {
        "sinks_in_front": "One sink is enough for SmolLM2, whichever it is",
        "emergence": "Small models grow no attention sink",
        "sink_tables": "Loss in training, by sink variant",
        "backcopy": "A trained sink must stay in the cache",
        "backcopy_curves": "Only trained sink tokens attract attention in this task",
    },
    "Samples of evicted tokens": {
        "stream_losses": "Loss of samples of the past, over streaming",
        "recall": "Bounded caches: which facts are still known",
        "recall_compressed": "Compressed prompts: which facts are still known",
    },
    "Prompt compression": {
        "peers": "jaxkv and kvpress give the same loss",
        "single_layer_135m": "Error of one compressed layer (SmolLM2-135M)",
        "single_layer": "Error of one compressed layer (small model)",
    },
    "Sparse attention": {
        "sparse": "Loss by the share of keys that is read (SmolLM2-135M)",
        "sampling": "Error by the share of keys that is read (SmolLM2-135M)",
        "sampling_budgets": "Where sampling beats top-k: spread-out attention",
        "tune_lsh": "Error of every K and L of the LSH index",
    },
    "Prefix caching": {
        "prefix_report": "Blocks found in the prefix cache",
        "prefix_items": "Throughput with and without the prefix cache",
        "prefix_snapshots": "Where to store states of evicting caches",
        "agents": "Evicting caches share prefixes in a fraction of the memory",
    },
}
TITLES = {name: title for chapter in CHAPTERS.values() for name, title in chapter.items()}


def page() -> str:
    """All pictures with title and caption, as Markdown."""
    from jaxkv.evals.lib.figures import FIGURES, caption_of

    lines = []
    for chapter, titles in CHAPTERS.items():
        lines += ["", f"## {chapter}"]
        for name, title in titles.items():
            record, draw = FIGURES[name]
            if not (RESULTS / f"{record}.json").exists():  # it needs an accelerator
                continue
            lines += [
                f"\n### {title}\n",
                f"![{title}](../evals/results/{name}.png)\n",
                f"{caption_of(draw)} ([record](../evals/results/{record}.json))",
            ]
            maps = sorted(RESULTS.glob(f"{name}_*-*.png")) if name == "sink_tables" else ()
            lines += [f"\n![Attention of {m.stem}](../evals/results/{m.name})" for m in maps]
    return "\n".join(lines) + "\n\n"
