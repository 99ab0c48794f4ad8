"""The table of sparse attention on a real model, for docs/results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxkv.evals.lib.record import read
from jaxkv.state.memory import show


def table(name: str) -> str:
    """One row per share and method; name: of the record."""
    return rows(read(name)["results"]["perplexity"])


def rows(by_model: dict[str, Any]) -> str:
    """The table of one model."""
    ((name, found),) = by_model.items()
    full = found["full"]
    lines = [
        f"{name}, {found['stretches']} texts, a prompt of {found['prompt']:,} tokens, the next "
        f"{found['scored']:,} scored; full attention has a loss of {full['loss']:.3f}:",
        "",
        "| share asked | method | share read | loss over full (nats) | KL from full (nats) "
        "| same top token | caches | seconds per token |",
        "|---|---|---|---|---|---|---|---|",
        f"| all | `full` | 100% | 0 | 0 | 100% {_cost(full)} |",
        _row("0%", "the ends alone", found["ends alone"]),
        *(
            _row(f"{float(share):.0%}", f"`{method}`", line)
            for share, methods in found["shares"].items()
            for method, line in methods.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(share: str, method: str, line: dict[str, Any]) -> str:
    cells = (share, method, f"{line['share_read']['mean']:.1%}", *map(_mean, _gaps(line)))
    return f"| {' | '.join(cells)} | {line['agreement']:.0%} {_cost(line)} |"


def _gaps(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield line["over_full"] | {"sign": "+"}
    yield line["kl"] | {"sign": ""}


def _mean(found: dict[str, Any]) -> str:
    """A mean with two standard errors over texts."""
    return f"{found['mean']:{found['sign']}.3f} ± {found['two_errors']['stretches']:.3f}"


def _cost(line: dict[str, Any]) -> str:
    seconds = line["seconds"]
    times = " to ".join(f"{seconds[end]:.2f}" for end in ("min", "max"))
    return f"| {show(line['state_bytes'])} | {seconds['median']:.2f} ({times})"
