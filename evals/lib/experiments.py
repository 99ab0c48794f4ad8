"""The experiments that state something: claims of papers, sentences of pages, tables of pages."""

from __future__ import annotations

from collections.abc import Callable

from jaxkv.evals.balancekv import single_layer, tree_slots
from jaxkv.evals.benchmarks import (
    compiled,
    cpu_forms,
    kernels,
    kvpress_parity,
    latency,
    neighbours,
    past_records,
    rates,
    schemas,
    servers,
    serving,
    soak,
    startup,
)
from jaxkv.evals.comparison import endless_losses, side_by_side_tables, which_cache
from jaxkv.evals.correctness import agreement, known_answers
from jaxkv.evals.device import rates as device_rates
from jaxkv.evals.lib import policy_sections
from jaxkv.evals.lib.verdict import Claim, Statement
from jaxkv.evals.magicpig import (
    report,
    sampling,
    sparse_losses,
    sparse_tokens,
)
from jaxkv.evals.prefix_caching import tables as prefix_tables
from jaxkv.evals.reservoir import attention_error, recall, sampled, stream_losses
from jaxkv.evals.streaming import attention_maps, endless, questions, tables
from jaxkv.evals.tasks import endless_needle, ruler_tables, served
from jaxkv.evals.tasks import report as task_report
from jaxkv.evals.training import (
    backcopy,
    long_rollouts,
    mfu,
    rollouts,
    sink_tables,
    sinks_in_front,
)

# Heading of a section of CLAIMS.md, its introduction, and its claims.
SECTIONS: tuple[tuple[str, str, tuple[Claim, ...]], ...] = (
    ("## StreamingLLM (Xiao et al. 2024, arXiv 2309.17453)",
     "The novels may be part of what SmolLM2 was trained on, but every case reads the same ones.",
     (*tables.CLAIMS, *attention_maps.CLAIMS, *endless.CLAIMS, *latency.CLAIMS,
      *questions.CLAIMS)),
    ("### Training with sinks",
     "The variants are plain softmax (none), a zero sink, learned sink logits, one sink token and "
     "two sink tokens, trained with the same recipe. A difference below 0.02 nats per token counts "
     "as no difference.",
     (*sink_tables.CLAIMS, *backcopy.CLAIMS, *sinks_in_front.CLAIMS)),
    ("### Reinforcement learning with bounded rollouts",
     "google-tunix trains a small model by GRPO to continue a repeated word. Long rollouts are "
     "those of a random model.", (*rollouts.CLAIMS, *long_rollouts.CLAIMS)),
    ("### Long-context tasks on a real model",
     "The tasks follow the definitions of RULER (Hsieh et al. 2024) with generators of our own. A "
     "budget is a share of the context. The question follows the end of prefill. A task is scored "
     "only where full attention gives at least 90 % right answers. With 4 to 20 samples "
     "intervals are wide, so in this section the shares decide, not their intervals.",
     tuple(task_report.CLAIMS)),
    ("## Reservoir sampling (Pan et al. 2024)", "",
     (*known_answers.RESERVOIR, *recall.RESERVOIR, *stream_losses.CLAIMS, *sampled.CLAIMS)),
    ("## BalanceKV (Han et al. 2025, arXiv 2502.07861)", "",
     (*single_layer.CLAIMS, *known_answers.BALANCEKV, *tree_slots.CLAIMS, *recall.BALANCEKV)),
    ("## Prompt compression beside kvpress, on SmolLM2-135M-Instruct",
     "Both sides have the same weights in float32, the same prompts and the same number of tokens "
     "per KV head. A prompt is compressed without what follows it; then the following tokens are "
     "scored by teacher forcing.", tuple(kvpress_parity.CLAIMS)),
    ("## MagicPIG (Chen et al. 2024, arXiv 2410.16179)", "",
     (*sampling.CLAIMS, *sparse_losses.CLAIMS, *sparse_tokens.CLAIMS)),
    ("## Hash-table prefix caching (Lin 2024)",
     "The report does not state its engine, model and block size. Its experiment is repeated with "
     "its protocol. Records of jaxkv's engine use the default model.",
     (*prefix_tables.CLAIMS, *soak.CLAIMS)),
)  # fmt: skip
# What states something on pages: sentences in `STATEMENTS`, tables in `TABLES`, or both.
EXPERIMENTS = (
    tables, questions, side_by_side_tables, endless_losses, which_cache,
    known_answers, recall, stream_losses, attention_error, sampled, single_layer, tree_slots,
    agreement, task_report, endless_needle, ruler_tables, served, sink_tables, backcopy,
    sinks_in_front, rollouts, long_rollouts, report, mfu, prefix_tables,
    # Benchmarks.
    compiled, cpu_forms, kernels, kvpress_parity, latency, neighbours, past_records, rates,
    schemas, servers, serving, startup, device_rates,
)  # fmt: skip
STATEMENTS: tuple[Statement, ...] = tuple(
    statement for experiment in EXPERIMENTS for statement in getattr(experiment, "STATEMENTS", ())
)
TABLES: dict[str, Callable[[], str]] = {
    "policies": policy_sections.policies,
}
for experiment in EXPERIMENTS:
    TABLES |= getattr(experiment, "TABLES", {})
