"""Prompt compression here and in kvpress: the same weights, prompts, ratios and metric.

The first tokens of each text are the prompt, and the tokens after it are scored by teacher forcing.
They take no part in the compression. With --needles, prompts with a needle follow, after which the
question and the right answer are scored: it counts as given if each of its tokens is the likeliest.
Of each prompt, the tokens that both sides keep are counted.

kvpress runs in an environment of its own. Its version 0.5.5 needs a package that Python 3.13 cannot
import:

    python3.12 -m venv PEERS && PEERS/bin/pip install torch kvpress==0.5.5
    python -m jaxkv.evals.benchmarks.kvpress_parity --peer-python PEERS/bin/python --texts TEXT ...

Intervals are over texts. Parts are stored under out/, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.evals.benchmarks import kvpress_cases as cases
from jaxkv.evals.benchmarks.weights import add_chat, as_folder
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import read, standard_error
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import UNMEASURED, page_table, table_head, table_row
from jaxkv.evals.lib.table import table as cells_table
from jaxkv.evals.lib.text import first_tokens
from jaxkv.evals.lib.verdict import (
    Comparison,
    Derived,
    Statement,
    above,
    below,
    claim,
    decisions,
    within,
)
from jaxkv.evals.tasks import prompts as tasks
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.palette import COLOURS
from jaxkv.policy_spec import format_policy
from jaxkv.typing import Float, UInt8

SCRIPT = Path(__file__).with_name("kvpress_worker.py")
Key = tuple[str, float]


FLAGS = (
    flag("--peer-python", type=str, required=True, about="the Python that has kvpress"),
    flag("--prompts", (1024,), "tokens of a prompt"),
    flag("--scored", 128, "tokens after a prompt"),
    flag("--needles", 0, "prompts of each length with a needle"),
    flag("--skip", (), "cases", nargs="*", choices=(*cases.PRESSES, *cases.HALVED, cases.KVZAP)),
)


class ScoredPrompt(NamedTuple):
    """A prompt and the tokens after it, of which the last `answer` are a right answer."""

    title: str
    prompt: Sequence[int]
    rest: Sequence[int]
    answer: int = 0


def measure(run: Run) -> dict[str, Any]:
    """The comparison on the beginnings of the texts, and on needles."""
    options, llm = run.options, run.llm
    longest = max(options.prompts) + options.scored + 1
    texts = first_tokens(llm, options.texts, longest)
    parts = Parts(run.record, 2 * (len(texts) + options.needles) * len(options.prompts))
    by_prompt, needles = {}, {}
    for size in options.prompts:
        passages = [
            ScoredPrompt(text, ids[:size], ids[size : size + options.scored + 1])
            for text, ids in texts.items()
        ]
        by_prompt[str(size)] = compare(llm, passages, options, parts)
        if options.needles:
            passages = needle_passages(llm, size, options.needles)
            needles[str(size)] = compare(llm, passages, options, parts)
    return {
        "model": llm.name, "texts": list(texts), "scored": options.scored, "prompts": by_prompt,
        "needles": needles, "peer_versions": versions_of(options.peer_python),
        "commits_of_parts": parts.commits,
    }  # fmt: skip


def needle_passages(llm: Llm, length: int, count: int) -> list[ScoredPrompt]:
    """Prompts of one size: the end of a longer context is not compressed, but read after it."""
    drawn = tasks.prompts(llm, "needle", length, count, seed=0)
    size, passages = min(len(sample.context) for sample in drawn), []
    for number, sample in enumerate(drawn):
        answer = llm.tokenizer.encode(f" {sample.answers[0]}", bos=False, start=False)
        rest = [*sample.context[size:], *sample.rest, *answer]
        passages.append(ScoredPrompt(f"needle {number}", sample.context[:size], rest, len(answer)))
    return passages


def compare(
    llm: Llm, passages: Sequence[ScoredPrompt], options: argparse.Namespace, parts: Parts
) -> dict[str, Any]:
    """All cases on passages whose prompts have the same size."""
    size, python = len(passages[0].prompt), options.peer_python
    keys = cases.keys(size, llm.config.layers, options.skip)
    chosen = {ratio: cases.policies(size, ratio, llm.config.layers) for _, ratio in keys}
    pressed = cases.with_press(keys)
    settings = repr([(key, chosen[key[1]][key[0]]) for key in keys])
    settings += repr([cases.press_fields(*key) for key in pressed])
    sides: dict[str, list[np.ndarray]] = {"theirs": [], "ours": []}
    for passage in passages:
        hash_ = zlib.crc32(f"{settings} {list(passage.prompt)} {list(passage.rest)}".encode())
        title = f"{llm.name}, {passage.title}, {size}, {len(passage.rest) - 1}, {hash_:x}"
        of_sides = {
            "theirs": ("kvpress", partial(of_kvpress, llm, passage, pressed, python)),
            "ours": ("jaxkv", partial(of_jaxkv, llm, passage, keys)),
        }
        for side, (name, rows) in of_sides.items():
            sides[side].append(parts.part(f"{name}, {title}", rows))
    compared = table(keys, sides["ours"], sides["theirs"], [passage.answer for passage in passages])
    for name, ratio in keys:
        row = compared["cases"][name][f"{ratio:g}"]
        row["policy"] = format_policy(chosen[ratio][name]) if name != cases.ENDS else name
    return compared | {"prompt": size}


def of_jaxkv(llm: Llm, passage: ScoredPrompt, keys: Sequence[Key]) -> np.ndarray:
    """A row per case, and one for full attention at the end."""
    prompt, layers = passage.prompt, llm.config.layers
    named = [(name, cases.policies(len(prompt), ratio, layers)[name]) for name, ratio in keys]
    return cases.stored(cases.rows_of(llm, [*named, ("full", "full")], prompt, passage.rest))


def of_kvpress(llm: Llm, passage: ScoredPrompt, keys: Sequence[Key], python: str) -> np.ndarray:
    """The same of kvpress."""
    prompt = len(passage.prompt)
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "model": str(folder_of(llm, Path(folder))), "prompt": prompt,
            "tokens": list(map(int, [*passage.prompt, *passage.rest])),
            "cases": [cases.press_fields(*key) for key in keys],
        }  # fmt: skip
        answer = json.loads(called(python, str(SCRIPT), stdin=json.dumps(request)))
    shape = llm.config.layers, llm.spec.kv_heads, -(-prompt // 8)
    return cases.stored([
        cases.CaseRow(cached, np.array(losses), np.array(hits),
                      np.frombuffer(bytes.fromhex(kept), np.uint8).reshape(shape))
        for cached, losses, hits, kept in answer
    ])  # fmt: skip


def folder_of(llm: Llm, folder: Path) -> Path:
    """A folder with the model, and the tokenizer that KVzip asks for a repetition with."""
    model = as_folder(llm, folder)
    if model == folder:  # a new one, without a tokenizer
        add_chat(llm, folder)
    return model


def called(python: str, *words: str, stdin: str = "") -> str:
    """The standard output of a command of the other environment; SystemExit where it fails."""
    done = subprocess.run([python, *words], input=stdin, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{python} failed, as above; nothing is written")
    return done.stdout


def versions_of(python: str) -> dict[str, str]:
    """The versions of the packages of the other environment."""
    code = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in ('kvpress', 'transformers', 'torch')}))"
    )
    return json.loads(called(python, "-c", code))


def table(
    keys: Sequence[Key], jaxkv_rows: Sequence[np.ndarray], kvpress_rows: Sequence[np.ndarray],
    answers: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Losses by case and ratio, their difference, kept tokens and right answers.

    keys: cases of jaxkv; the arrays: of one text each. answers: tokens of the answer of each text.
    """
    pressed = [*cases.with_press(keys), "full"]
    rows: dict[Any, dict[str, list[np.void]]] = {}
    for number, key in enumerate([*keys, "full"]):
        rows[key] = {"ours": [text_rows[number] for text_rows in jaxkv_rows]}
        if key in pressed:
            at = pressed.index(key)
            rows[key]["theirs"] = [text_rows[at] for text_rows in kvpress_rows]
    losses = {
        key: {side: [text["losses"].mean() for text in texts] for side, texts in sides.items()}
        for key, sides in rows.items()
    }
    full = losses.pop("full")
    compared: dict[str, Any] = {
        "full": row(full, full) | right(rows.pop("full"), answers), "cases": {}
    }  # fmt: skip
    for key, sides in rows.items():
        line = row(losses[key], full) | right(sides, answers)
        line["cached"] = {side: sides[side][0]["cached"] for side in sides}
        if "theirs" in sides:
            pairs = list(zip(sides["ours"], sides["theirs"], strict=True))
            line["largest_difference_of_a_token"] = max(
                np.abs(a["losses"] - b["losses"]).max() for a, b in pairs
            )
            line["overlap"] = [overlap(a["kept"], b["kept"]) for a, b in pairs]
        name, ratio = key
        compared["cases"].setdefault(name, {})[f"{ratio:g}"] = line
    return compared


def overlap(ours: UInt8[np.ndarray, "L K P"], theirs: UInt8[np.ndarray, "L K P"]) -> float:
    """The share of the tokens kept by jaxkv, over layers and KV heads, that kvpress keeps too."""
    return float(np.bitwise_count(ours & theirs).sum() / np.bitwise_count(ours).sum())


def right(sides: Mapping[str, Sequence[np.void]], answers: Sequence[int]) -> dict[str, Any]:
    """The number of right answers of each side, where the texts end with one."""
    if not all(answers):
        return {}
    return {
        "right": {
            side: sum(bool(text["hits"][-n:].all()) for text, n in zip(texts, answers, strict=True))
            for side, texts in sides.items()
        },
        "samples": len(answers),
    }


def row(
    losses: Mapping[str, Float[np.ndarray, " X"]], full: Mapping[str, Float[np.ndarray, " X"]]
) -> dict[str, Any]:
    """Each side by text, over full attention, and ours minus theirs if kvpress has the case."""
    over = {side: paired(losses[side], full[side]) for side in losses}
    line = {"losses": losses, "over_full": over}
    if "theirs" in losses:
        line["difference"] = paired(losses["ours"], losses["theirs"])
    return line


def paired(losses: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """The mean difference over texts, its standard error, and the difference of each text."""
    by_text = np.subtract(losses, base)
    return {
        "mean": by_text.mean(),
        "standard_error": standard_error(by_text),
        "by_text": by_text.tolist(),
    }


SAME = 0.02  # nats: a smaller difference counts as none
STREAMING = [f"prompts/4096/cases/streaming/{ratio}/difference" for ratio in (0.25, 0.5)]
NO_PRESS = "–"  # where kvpress has no such method
SHOWN_AS = {cases.ENDS: "streaming", cases.ADAPTIVE: "retrieval"}  # the colour of a policy
NEWER = (cases.ADAPTIVE, cases.ADAPTIVE_SNAPKV, "tova", "kvzip", cases.KVZAP)  # than the record
UNPLOTTED = (cases.BUDGETS, *NEWER[1:])  # so that each line has a colour
RIVALS = {  # of a method: those that its paper or its board compares it with
    "expected-attention": ("snapkv", "keydiff", cases.ENDS),
    "balance": ("uniform", "snapkv", "pyramidkv"),
}


def same_loss(name: str) -> Comparison:
    """Ours minus kvpress's, at every prompt length and ratio."""
    return within(f"prompts/{{prompt}}/cases/{name}/{{ratio}}/difference", by=SAME)


def less_loss(name: str) -> list[Comparison]:
    """The loss of a method below that of each rival, text by text."""
    path = "prompts/{{prompt}}/cases/{}/{{ratio}}/over_full/ours/by_text"
    return [below(path.format(name), path.format(rival)) for rival in RIVALS[name]]


CLAIMS = (
    claim("our bar", "`snapkv` has kvpress's loss, within 0.02 nats at every length and ratio",
          "peers", same_loss("snapkv")),
    claim("our bar",
          "`expected-attention`, `keydiff` and the ends of a prompt (kvpress's StreamingLLM) have "
          "kvpress's loss, within 0.02 nats", "peers",
          *map(same_loss, ("expected-attention", "keydiff", cases.ENDS))),
    claim("our bar", "With kvpress's budgets, where they form a pyramid, `pyramidkv` has its loss, "
          "within 0.02 nats", "peers", same_loss(cases.BUDGETS)),
    claim("explains the difference",
          "`streaming` differs from kvpress's StreamingLLM because it evicts while it reads: ends "
          "chosen after full attention have kvpress's loss", "peers", same_loss(cases.ENDS),
          seen=[*map(below, STREAMING)]),
    claim("Expected Attention, kvpress's board",
          "Expected attention loses less than SnapKV, KeyDiff and StreamingLLM at every ratio",
          "peers", *less_loss("expected-attention")),
    claim("LongBench-E, a quarter of Llama-3.1-8B's cache: 44.99, against 44.82, 44.57 and 44.03",
          "`balance` loses less than a uniform sample, SnapKV and PyramidKV",
          "peers", *less_loss("balance")),
    claim("kvpress's board", "AdaKV and KVzap lose less than SnapKV", "",
          needs="a run with adaptive budgets, and KVzap fitted to this model"),
    claim("our bar", "Streaming in llama.cpp and transformers has the same loss", "",
          needs="losses of llama.cpp beyond its context; transformers has no cache with sinks"),
)  # fmt: skip


def losses_table() -> str:
    """Loss over full attention: a row per method, a column per prompt length and ratio."""
    results = read("peers")["results"]
    columns = [(prompt, ratio) for prompt in results["prompts"] for ratio in cases.RATIOS]
    lines = table_head("method", *(f"{int(n):,}: {100 * ratio:g}%" for n, ratio in columns))
    for name in next(iter(results["prompts"].values()))["cases"]:
        rows = (results["prompts"][n]["cases"][name].get(f"{ratio:g}") for n, ratio in columns)
        lines.append(table_row(name, *map(over_full, rows)))
    caption = (
        f"Nats per token over {results['scored']} tokens, means over {len(results['texts'])} "
        "novels; in parentheses where two standard errors reach zero:"
    )
    return page_table(lines, caption)


def over_full(row: Mapping[str, Any] | None) -> str:
    """Our loss minus that of full attention; kvpress has no pyramid at some ratios."""
    if row is None:
        return ""
    over = row["over_full"]["ours"]
    text = f"{over['mean']:+.3f}"
    return text if abs(over["mean"]) > 2 * over["standard_error"] else f"({text})"


def differences_table() -> str:
    """Ours minus kvpress's: a row per method, the largest difference at each prompt length."""
    prompts = read("peers")["results"]["prompts"]
    heads = [f"{int(n):,}" for n in prompts]
    lines = table_head("method", *(f"mean, {n}" for n in heads), *(f"token, {n}" for n in heads),
                       *(f"kept by both, {n}" for n in heads))  # fmt: skip
    for name in cases.PRESSES:
        rows = [[*prompt["cases"].get(name, {}).values()] for prompt in prompts.values()]
        lines.append(table_row(name, *(
            measured(ratios) for measured in (mean_difference, token_difference, kept_by_both)
            for ratios in rows
        )))  # fmt: skip
    return page_table(lines)


def mean_difference(ratios: Sequence[Mapping[str, Any]]) -> str:
    return largest([abs(row["difference"]["mean"]) for row in ratios])


def token_difference(ratios: Sequence[Mapping[str, Any]]) -> str:
    return largest([row["largest_difference_of_a_token"] for row in ratios])


def largest(values: Sequence[float]) -> str:
    return f"{max(values):.4f}" if values else UNMEASURED


def kept_by_both(ratios: Sequence[Mapping[str, Any]]) -> str:
    """The least overlap of any text and ratio."""
    shares = [share for row in ratios for share in row.get("overlap", ())]
    return f"{100 * min(shares):.2f} %" if shares else UNMEASURED


def needles_table() -> str:
    """Right answers of jaxkv and of kvpress: a row per method, a column per length and ratio."""
    needles = read("peers")["results"].get("needles", {})
    columns = [(length, f"{ratio:g}") for length in needles for ratio in cases.RATIOS]
    caption = (
        f"Right answers of jaxkv / kvpress, {NO_PRESS} without such a press, by length and the "
        "share that is removed:"
    )
    if not columns:
        return cells_table(("method", "right answers"), [("all", UNMEASURED)], caption)
    heads = ("method", *(f"{int(n):,}: {100 * float(ratio):g}%" for n, ratio in columns))
    names = dict.fromkeys(name for by_name in needles.values() for name in by_name["cases"])
    rows = (
        (name, *(answers_of(needles[n]["cases"].get(name, {}).get(x)) for n, x in columns))
        for name in names
    )
    return cells_table(heads, rows, caption)


def answers_of(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return UNMEASURED
    return f"{row['right']['ours']} / {row['right'].get('theirs', NO_PRESS)}"


def plot(axes: Any, results: dict[str, Any]) -> None:
    """Loss after a prompt minus full attention's, by the part of the prompt that is removed, with
    two standard errors over texts. Lines: jaxkv. Crosses: kvpress, same weights and prompts;
    it has no balance and no uniform. Other methods stand in the tables alone."""
    at = next(iter(results["prompts"].values()))
    for name, rows in at["cases"].items():
        if name in UNPLOTTED:
            continue
        colour = COLOURS[SHOWN_AS.get(name, name)]
        removed = [100 * float(ratio) for ratio in rows]
        over = [row["over_full"] for row in rows.values()]
        jaxkv_rows, kvpress_rows = (
            [row[side] for row in over if side in row] for side in ("ours", "theirs")
        )
        errors = [2 * (row["standard_error"] or 0) for row in jaxkv_rows]
        axes.errorbar(
            removed, [row["mean"] for row in jaxkv_rows], errors,
            color=colour, capsize=2, label=name, linestyle="dotted" if name == "streaming" else "-",
        )  # fmt: skip
        if kvpress_rows:
            axes.plot(removed, [row["mean"] for row in kvpress_rows], "x", color=colour)
    axes.axhline(0, color=COLOURS["full"], linewidth=0.8)
    axes.set(xlabel="removed, of the prompt (%)", ylabel="loss over full (nats per token)")


def gap_in_errors(results: dict[str, Any]) -> dict[str, float]:
    """The distance of `expected-attention` and `snapkv`, in standard errors of the difference."""
    gaps = {}
    for prompt, at in results["prompts"].items():
        for ratio, row in at["cases"]["snapkv"].items():
            expected_attention = at["cases"]["expected-attention"][ratio]
            gap = paired(*(x["over_full"]["ours"]["by_text"] for x in (row, expected_attention)))
            gaps[f"{prompt}, {ratio}"] = abs(gap["mean"]) / gap["standard_error"]
    return gaps


def sure_cases(name: str, base: str, prompts: Sequence[str] = ("{prompt}",)) -> Derived:
    """In how many cases the loss differs from that of another method by two standard errors.

    prompts: lengths of prompts, all of them by default.
    """
    pairs = [
        [f"prompts/{prompt}/cases/{x}/{{ratio}}/over_full/ours/by_text" for x in (name, base)]
        for prompt in prompts
    ]
    return lambda results: {
        "cases": sum(
            case.holds
            for paths in pairs
            for direction in (above, below)
            for case in decisions(direction(*paths), results)
        )
    }


TABLES = {
    "peers_losses": losses_table,
    "peers_differences": differences_table,
    "peers_needles": needles_table,
}
PAGE = "docs/results/compression.md"
EQUAL = [x for x in cases.PRESSES if x not in ("pyramidkv", "streaming", *NEWER)]
STATEMENTS = (
    Statement(PAGE, "At equal budgets, the loss differs from kvpress's by under 0.001 nats",
              "peers", [within(f"prompts/{{prompt}}/cases/{name}/{{ratio}}/difference", by=1e-3)
                        for name in EQUAL]),
    Statement(PAGE, "Single tokens differ by up to 0.06 nats", "peers",
              [below(f"prompts/{{prompt}}/cases/{name}/{{ratio}}/largest_difference_of_a_token",
                     0.06) for name in EQUAL]),
    Statement(PAGE, "After 4,096 tokens `streaming` loses less with a quarter and with half "
              "removed", "peers", [*map(below, STREAMING)]),
    Statement(PAGE, "At no ratio do `expected-attention` and `snapkv` differ by two standard "
              "errors", "peers", [below(gap_in_errors, 2)]),
    Statement(PAGE, "`balance` loses less than `uniform` only with a quarter of 4,096 tokens "
              "removed", "peers", [below("prompts/4096/cases/balance/0.25/over_full/ours/by_text",
                              "prompts/4096/cases/uniform/0.25/over_full/ours/by_text"),
                        within(sure_cases("balance", "uniform"), 1)]),
    Statement(PAGE, "In the other cases the two do not differ by two standard errors", "peers",
              [within(sure_cases("streaming", cases.ENDS), 2)]),
    Statement(PAGE, "With 87.5 % removed `balance` loses more than `snapkv` after every prompt",
              "peers", [above("prompts/{prompt}/cases/balance/0.875/over_full/ours/by_text",
                              "prompts/{prompt}/cases/snapkv/0.875/over_full/ours/by_text")]),
)  # fmt: skip

MEASURE = Measure("peers", measure, FLAGS, model=SMOLLM2, texts=1)

if __name__ == "__main__":
    run(MEASURE)
