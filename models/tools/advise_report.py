"""The results of `jaxkv advise` as a table, as sentences, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv import defaults
from jaxkv.models.tools import choices, palette, pictures
from jaxkv.models.tools.advise import FULL, REPEAT
from jaxkv.models.tools.measurement import show
from jaxkv.state import memory

Row = Mapping[str, Any]
DASH = "-"
DEFAULT = defaults.POLICY.partition(":")[0]


def table(results: Mapping[str, Any]) -> str:
    """Full attention, then the policies within the budget by their loss, then those beyond it."""
    heads = [
        "",
        "loss",
        "over full",
        "KL to full",
        "same top-1",
        "over best",
        "far repeats",
        "ms/token",
        "state",
        "prompt",
        "policy",
    ]
    lines, rank = [heads], 0
    for row in results["policies"]:
        ranked, is_full = is_ranked(row), row["policy"] == FULL
        rank += ranked
        lines.append(
            [
                str(rank) if ranked else DASH,
                f"{row['loss']:.4f}",
                *([DASH] * 3 if is_full else _beside_full(row)),
                show(None if ranked and rank == 1 else row["over_best"]),
                show(None if is_full else row["far_recall"]),
                _milliseconds(row),
                memory.show(row["state_bytes"]),
                memory.show(row["prompt_bytes"]),
                row["policy"],
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([*map(str.rjust, line[:-1], widths), line[-1]]) for line in lines)


def is_ranked(row: Row) -> bool:
    """Whether a policy is compared at equal bytes: full attention and oracle baselines are not."""
    return row["policy"] != FULL and row["within_budget"]


def _beside_full(row: Row) -> list[str]:
    """Loss, KL and agreement against full attention."""
    return [show(row["over_full"]), show(row["kl"], sign=""), f"{row['agreement']:.0%}"]


def _milliseconds(row: Row) -> str:
    times = row["milliseconds_per_token"]
    return DASH if times is None else f"{times['median']:.1f}"


def sentences(results: Mapping[str, Any], command: str = "jaxkv chat") -> list[str]:
    """What the table means: how it counts, what is noise, and which policy to take.

    command: the one that runs this model, such as "jaxkv chat --model DIR".
    """
    names = ("stretches", "prompt", "scored", "block", "counted")
    stretches, prompt, scored, block, count = (results[name] for name in names)
    blocks = "stretches" if block == scored else f"blocks of {block} tokens"
    rows = [row for row in results["policies"] if is_ranked(row)]
    told = [
        f"Means over {count:,} tokens: {scored} after each of {stretches} prompts of {prompt:,} "
        f"tokens. ± is two standard errors over {blocks}. Losses and KL are in nats.",
    ]
    if not rows:
        return told
    told += [
        f"state is what a policy caches after these tokens, at most "
        f"{memory.show(results['budget'])}; prompt is what it caches while the prompt is read.",
        f"Far repeats: the loss over full at {rows[0]['far_recall']['count']:,} tokens that end "
        f"{REPEAT} tokens which occurred before, the latest time at least {results['near']} tokens "
        "back.",
    ]
    if any(not row["within_budget"] for row in results["policies"] if row["policy"] != FULL):
        told.append(
            "Policies without a rank cache every token: they show how good a selection of keys is, "
            "and save no memory."
        )
    by_name = {row["policy"]: row for row in rows}
    for number, (name, *ties) in enumerate(results["levels"]):
        line = f"{name} has the lowest loss"
        if number:
            line = f"Then {name}, which is worse by {show(by_name[name]['over_best'])}"
        if ties:
            line += f"; these are within noise of it: {'; '.join(ties)}"
        elif not number and len(rows) > 1:
            line += ", and no other is within noise of it"
        told.append(f"{line}.")
    levels = [[by_name[name] for name in names] for names in results["levels"]]
    return [*told, *choices.facts_lines(results["split"]), *_choices(levels, command)]


def _choices(levels: Sequence[Sequence[Row]], command: str) -> list[str]:
    """Which policy to take, and another for endless text if the first one is not for it.

    Within noise of the lowest loss, one for endless text is preferred: a chat has no length.
    """
    level = levels[0]
    endless = [row for row in level if row["endless"]] or level
    choice, reason = _choice(endless)
    policy, use = choice["policy"], " for endless text" if len(endless) < len(level) else ""
    told = [f'Take {policy}{use} ({reason}): {command} --policy "{policy}"']
    if choice is not level[0] and choice["over_best"]["two_errors"] is not None:
        told.append(
            f"Its loss may be up to {_upper_end(choice['over_best']):+.3f} above that of "
            f"{level[0]['policy']} (the mean and two standard errors)."
        )
    if choice["acts_on_prompt"]:
        told.append(
            f"It caches the whole prompt, {memory.show(choice['prompt_bytes'])}, until it is read, "
            "and every token after it; both must fit the trained context."
        )
    elif not choice["endless"]:
        told.append("Its positions are absolute, so it fails beyond the trained context.")
    later = [row for lower in levels[1:] for row in lower if row["endless"]]
    if not choice["endless"] and later:
        row = later[0]
        told.append(
            f"For endless text take {row['policy']}, which is worse by {show(row['over_best'])}."
        )
    return told


def _choice(level: Sequence[Row]) -> tuple[Row, str]:
    """The fastest policy, and why; of policies whose times overlap, the default or the lowest loss.

    Neither losses nor times tell these apart, so another run should not recommend another one.
    Without times, and where a difference has no error, it is the one with the lowest loss.
    """
    times = [row["milliseconds_per_token"] for row in level]
    have_errors = all(row["over_best"]["two_errors"] is not None for row in level)
    if len(level) == 1 or not have_errors or not all(times):
        return level[0], "by its loss"
    fastest = min(times, key=lambda time: time["median"])
    equal = [row for row, time in zip(level, times, strict=True) if time["min"] <= fastest["max"]]
    if len(equal) == 1:
        return equal[0], "the fastest of these"
    default = [row for row in equal if row["policy"].partition(":")[0] == DEFAULT]
    default.sort(key=lambda row: "storage=" in row["policy"])  # False, the default, comes first
    chosen = default[0] if default else equal[0]
    reason = "the default" if default else "the lowest loss"
    return chosen, f"{reason} of the {len(equal)} fastest, whose times overlap"


def _upper_end(difference: Mapping[str, Any]) -> float:
    """The upper end of an interval."""
    return difference["mean"] + difference["two_errors"]


def draw(results: Mapping[str, Any], caption: str, dpi: int = 150) -> bytes:
    """Losses with their intervals, and the loss at repeats by their distance, as a PNG."""
    rows = [row for row in results["policies"] if row["policy"] != FULL]
    looks = palette.styles([row["policy"] for row in rows])
    figure, (loss_axes, repeat_axes) = pictures.begin(9.5, 3.4 + 0.22 * len(rows), columns=2)
    counted = [at for at, span in enumerate(rows[0]["recall"] if rows else ()) if span["count"]]
    for number, (row, look) in enumerate(zip(rows, looks, strict=True)):
        _point(loss_axes, row["over_full"], -number, look["color"])
        bins = [row["recall"][at] for at in counted]
        centres = [_label(span, results["near"]) for span in bins]
        values = [(at, span) for at, span in enumerate(bins) if span["two_errors"]]
        shift = 0.06 * (number - (len(rows) - 1) / 2)
        repeat_axes.errorbar(
            [at + shift for at, _ in values],
            [span["mean"] for _, span in values],
            [span["two_errors"] for _, span in values],
            marker="o",
            ms=3,
            lw=1.2,
            elinewidth=0.8,
            color=look["color"],
            ls=look["linestyle"],
            label=f"{number + 1}  {row['policy']}",
        )
        repeat_axes.set_xticks(range(len(centres)), centres, fontsize=7)
    _label_axes(loss_axes, repeat_axes, rows)
    figure.legend(
        loc="outside upper left",
        frameon=False,
        fontsize=8,
        alignment="left",
        title_fontsize=8,
        title="Loss after a prompt: lower is better, bars are two standard errors.\n"
        "Right: a cache that evicted the earlier occurrence is higher, beyond its size.",
    )
    return pictures.finish(figure, caption, dpi)


def _point(axes: Any, difference: Mapping[str, Any], at: float, colour: str) -> None:
    axes.errorbar(
        difference["mean"],
        at,
        xerr=difference["two_errors"] or 0,
        fmt="o",
        ms=5,
        color=colour,
        capsize=3,
    )


def _label_axes(loss_axes: Any, repeat_axes: Any, rows: Sequence[Row]) -> None:
    loss_axes.set_yticks(
        [-number for number in range(len(rows))], [f"{number + 1}" for number in range(len(rows))]
    )
    loss_axes.axvline(0, color=pictures.INK, lw=0.8)
    loss_axes.locator_params(axis="x", nbins=5)
    loss_axes.margins(x=0.1)
    loss_axes.grid(False)
    loss_axes.grid(axis="x", color=pictures.RULE, lw=0.6)
    loss_axes.set(xlabel="loss over full attention (nats)", ylabel="number in the legend")
    loss_axes.set_title("all tokens", fontsize=9, loc="left")
    repeat_axes.axhline(0, color=pictures.INK, lw=0.8)
    repeat_axes.set(
        xlabel="distance to the earlier occurrence (tokens)",
        ylabel="loss over full attention (nats)",
    )
    repeat_axes.set_title("tokens that repeat earlier text", fontsize=9, loc="left")


def _label(span: Mapping[str, Any], near: int) -> str:
    """Distances of a bin, and its number of tokens."""
    end = f"< {span['to']:,}" if span["from"] < near else f"{span['from']:,} to {span['to'] - 1:,}"
    return f"{end}\nn = {span['count']:,}"
