"""RULER's own tasks (Hsieh et al. 2024): the generators and the scorer of nvidia-long-context-eval.

The package is the extra `ruler`. Each run generates its texts, which are never stored. A
prompt is that of the package for the same seed: `length` counts the prompt and the answer, without
the chat template. The beginning of the answer, which the package appends to the prompt, begins the
model's answer here, as in RULER's own templates.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module, metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.errors import UserError
from jaxkv.evals.tasks.generators import TaskSample
from jaxkv.evals.tasks.ruler_generator import LEAD, SPLIT, UNFIT
from jaxkv.evals.tasks.score import Match
from jaxkv.models.loading.llm import Llm

PACKAGE, VERSION = "nvidia-long-context-eval", "26.3"
NAMES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
         "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1",
         "qa_2")  # fmt: skip
GENERATOR = Path(__file__).with_name("ruler_generator.py")
ATTEMPTS = 200  # draws per sample, after which a task has none of that length
CONTROL = re.compile(r"[\x00-\x1f]")


class RulerTask(NamedTuple):
    """script, arguments: of the package. tokens: maximal number of tokens of an answer.

    match: the package's score of one answer.
    """

    script: str
    arguments: dict[str, Any]
    tokens: int
    match: Match


def check_package() -> None:
    """Raise UserError where the package, or that version of it, is not installed."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "none"
    if version != VERSION:
        raise UserError(
            f"RULER's tasks need {PACKAGE} {VERSION}, got {version}; install it with "
            f"pip install {PACKAGE}=={VERSION}"
        )


@cache
def task(name: str) -> RulerTask:
    """A task of the package; raises UserError where the package is not installed."""
    check_package()
    import yaml

    text = (resources.files("long_context_eval") / "synthetic.yaml").read_text("utf-8")
    entry = yaml.safe_load(text)[name]
    script = entry["task"]
    prompt, scorer = (
        import_module(f"long_context_eval.{part}.synthetic.constants").TASKS[script]
        for part in ("data", "eval")
    )
    scored = partial(match, scorer["metric_fn_per_sample"])
    return RulerTask(script, entry["args"], prompt["tokens_to_generate"], scored)


def match(metric: Any, text: str, answers: Sequence[str]) -> float:
    """The package's score of an answer, 0 to 1, after what its `evaluate.py` does to a text."""
    (percent,) = metric([CONTROL.sub("\n", text.strip()).strip()], [list(answers)])
    return percent / 100


def samples(llm: Llm, name: str, length: int, count: int, seed: int) -> list[TaskSample]:
    """The first samples of a task; none where the package has no context as short as that."""
    if llm.tokenizer.backend is None:
        raise UserError(
            f"RULER's generators need a tokenizer.json, got the SentencePiece file of {llm.name}; "
            "use another model"
        )
    chosen = task(name)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(Path(folder) / "tokenizer.json")
        llm.tokenizer.backend.save(tokenizer)
        settings = {
            "save_dir": folder, "save_name": name, "tokenizer_path": tokenizer,
            "max_seq_length": length, "tokens_to_generate": chosen.tokens, "num_samples": count,
            "random_seed": seed, **chosen.arguments,
        }  # fmt: skip
        request = {
            "script": chosen.script,
            "words": [f"--{key}={value}" for key, value in settings.items()],
            "tokenizer": tokenizer,
            "attempts": ATTEMPTS * (count + 1),
        }
        done = subprocess.run(
            [sys.executable, "-P", str(GENERATOR)],
            input=json.dumps(request),
            text=True,
            capture_output=True,
        )
        if done.returncode == UNFIT:
            return []
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"{PACKAGE} must generate {name}, got: {last}; install it again")
        lines = (Path(folder) / name / "validation.jsonl").read_text("utf-8").splitlines()
    return [sample_of(json.loads(line)) for line in lines]


def sample_of(entry: dict[str, Any]) -> TaskSample:
    """A sample of the package. The last marks split it: examples before it have marks too."""
    prompt, _, lead = entry["input"].rpartition(LEAD)
    context, _, question = prompt.rpartition(SPLIT)
    plain = context.replace(LEAD, "").replace(SPLIT, "")
    return TaskSample(plain, question, lead, tuple(entry["outputs"]))
