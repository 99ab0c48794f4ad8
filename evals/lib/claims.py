"""Writes CLAIMS.md, BARS.md and the list of records, from evals/results.

Run `python -m jaxkv.evals.lib.claims` after an experiment; `--check` fails if the page is stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxkv.evals.benchmarks import past_records
from jaxkv.evals.lib.experiments import SECTIONS
from jaxkv.evals.lib.measured_on import measured_on
from jaxkv.evals.lib.record import RESULTS, ROOT, make_parser, read, run_command
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.verdict import OPEN, Claim, decide, summary

CLAIMS, BARS = ROOT / "evals" / "CLAIMS.md", ROOT / "evals" / "BARS.md"
RECORDS = RESULTS / "README.md"
MISCOMPILES = "0.10.2"  # the version of jax

HEAD = """\
# Claims

This page lists the claims of the papers, and what records under `evals/results` say of them.
`python -m jaxkv.evals.lib.claims` writes it from claims that each experiment lists as data; edit
those, not this page. [Results](../docs/results/README.md) has the tables,
[the records](results/README.md) have commands, data and spread, and [BARS.md](BARS.md) has the
bounds on speed and correctness.

A claim holds if every comparison holds with its whole interval, or with its median or average where
the claim names one, and in part if some do. `±` gives two standard errors, parentheses the range of
rounds or seeds. Losses are in nats per token; a loss without a second side is over that of four
first tokens in a cache of equal size. `s+w` is a cache of s sinks and a window of w tokens. Errors
of attention are relative to the norm of exact attention.

The column `model` names what was measured. SmolLM2-135M is the published SmolLM2-135M-Instruct
with a context of 8,192 tokens. The small ones are the default model (3.2 million weights, trained
here on novels), stories260K (trained on TinyStories), and models trained here for one experiment.
Random weights serve for times, bytes and agreement only.
"""
BARS_HEAD = """\
# Bars for correctness and speed

A bar is a bound that a measurement should meet. Times are medians with the range over the rounds;
the median decides. The variants of a bar alternate in one process. A row has the policy string of
its record's commit: `cache=int8` is `storage=int8` today.
`python -m jaxkv.evals.lib.claims` writes this page.
"""
RECORDS_HEAD = """\
# Records

Each record contains commit, machine, versions, command, data and spread. The commands have the
current name of their module; a command "at its commit" has no program in the present code.
`python -m jaxkv.evals.lib.claims` writes this page.

"""


def table(
    heading: str, introduction: str, claims: Sequence[Claim], records: dict[str, Any]
) -> Iterable[str]:
    """A section of the page."""
    yield from (heading, "", *((introduction, "") if introduction else ()))
    yield from table_head("claim", "paper", "model", "measured here", "verdict", "record")
    yield from (row(claim, records) for claim in claims)
    yield ""


def pages() -> dict[Path, str]:
    """The text of each page from the current records, by its file."""
    records = {path.stem: read(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    sections = [table(*section, records) for section in SECTIONS]
    runs = [*miscompiled(records)]
    runs += [f"- [{name}]({name}.json): {provenance(name, x)}" for name, x in records.items()]
    return {
        CLAIMS: HEAD + "\n" + "\n".join(line for section in sections for line in section),
        BARS: BARS_HEAD
        + "\n"
        + page_table(
            [
                *table_head("bar", "model", "measured", "asked", "met", "record"),
                *(line for name, record in records.items() for line in bars(name, record)),
            ]
        ),
        RECORDS: RECORDS_HEAD + "".join(f"{line}\n" for line in runs),
    }


def row(claim: Claim, records: dict[str, Any]) -> str:
    names = [name for name in (claim.record, claim.beside) if name]
    model = measured = where = ""
    if claim.needs:
        verdict = f"{OPEN}: needs {claim.needs}"
    else:
        results = records[claim.record]["results"]
        if claim.beside:
            results = results | {"beside": records[claim.beside]["results"]}
        cases, verdict = decide(claim, results)
        measured = summary(cases, claim.unit)
        model = measured_on(claim.record, records[claim.record], claim.model)
        where = ", ".join(map(link, names))
    return table_row(claim.says, claim.paper, model, measured, verdict, where)


def bars(name: str, record: dict[str, Any]) -> list[str]:
    """One line per bar of an experiment."""
    lines = []
    for bar in record["results"].get("bars", []):
        value = bar["value"]
        if isinstance(value, dict):
            value = f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"
        else:
            value = f"{value:.3g}"
        met = "yes" if bar["met"] else "**no**"
        device = record["device"]
        place = "" if device.startswith("cpu") else f", {device}"
        model = measured_on(name, record)
        lines.append(table_row(bar["bar"] + place, model, value, bar["ask"], met, link(name)))
    return lines


def provenance(name: str, record: dict[str, Any]) -> str:
    """The command of a record, with the current module name, and where and when it ran."""
    cpu, device = record["cpu"], record["device"]
    changed = " with changes" if record["dirty"] else ""
    by_text = record["results"].get("by_text", {})  # a record that grows: its parts have commits
    commits = sorted(
        {c["commit"][:7] for entry in by_text.values() for c in entry["bins"].values()}
    )
    changed += f", measured at {', '.join(commits)}" if commits else ""
    changed += f" ({record['incomplete']})" if "incomplete" in record else ""
    if device.startswith("cpu"):
        device = f"{cpu['cores']} cores of {cpu['model']}, load {cpu['load']:.1f} at the start"
    return (
        f"{past_records.command(name, record['command'])}; "
        f"{record['date'][:10]}, commit {record['commit'][:7]}{changed}, "
        f"jax {record['versions']['jax']}, {device}"
    )


def miscompiled(records: dict[str, Any]) -> list[str]:
    """A paragraph on records of a jax that is known to be wrong on CPUs, if there are any."""
    wrong = [f"[{name}]({name}.json)" for name, x in records.items()
             if x["versions"]["jax"] == MISCOMPILES]  # fmt: skip
    if not wrong:
        return []
    return [
        f"jax {MISCOMPILES} gives wrong sums on CPUs for some shapes (jax issue 39103), and new "
        f"records are not made with it. These are older and have not been made again: "
        f"{', '.join(wrong)}.",
        "",
    ]


def link(name: str) -> str:
    return f"[{name}](results/{name}.json)"


def main() -> None:
    parser = make_parser("jaxkv.evals.lib.claims", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if stale")
    check = parser.parse_args().check
    for page, text in pages().items():
        if check and (not page.exists() or page.read_text("utf-8") != text):
            raise SystemExit(f"{page.name} is stale; run python -m jaxkv.evals.lib.claims")
        if not check:
            page.write_text(text, "utf-8")
            print("wrote", page.relative_to(ROOT))


if __name__ == "__main__":
    run_command(main)
