"""Every experiment runs at small size and writes a record; wrong words are one line."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest

from jaxkv.evals.lib.run import run
from jaxkv.evals.streaming import tables
from jaxkv.policies import POLICIES
from tests.seldom import seldom
from tests.tiny import write_tiny

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}:"
CONTEXT = 2_048
NO_TOKENS = lambda caches: dict.fromkeys(caches, 1.0)
# By module: constants that make it small.
SMALLER = {
    "streaming.tables": {
        "COUNTS": (0, 1, 4), "SIZES": (256,), "CACHES": (256,),
        "RINGS": {name: tables.RINGS[name] for name in ("0+256", "1+255", "4+252")},
        "TABLE_6": {"4+252": tables.TABLE_6["4+252"]},
        "OTHERS": {name: tables.OTHERS[name] for name in ("re-computation", "full")},
        "LARGER": {tables.LARGE_BASE: tables.LARGER[tables.LARGE_BASE]},
    },
    "reservoir.stream_losses": {"cached_tokens": NO_TOKENS, "H2O": 800, "VARIANTS": {}},
    "reservoir.sampled": {"CACHES": {"balance-stream": "balance-stream"}},
    "comparison.side_by_side": {
        "POLICIES": {name: POLICIES[name] for name in ("full", "streaming", "retrieval")}
    },
    "balancekv.single_layer": {"METHODS": {"uniform": "uniform:weighted=true"}, "BLOCK": 32,
                               "saturated": lambda *_: 0.5},
    "streaming.attention_maps": {"LONG": 80, "METRICS": 4},
}  # fmt: skip
# Words that each experiment runs with, besides --quick. {text} and {more} are files, {model} is
# a model with a chat template.
MODEL = "--model {model}"
TEXTS = f"{MODEL} --texts {{text}} {{more}}"
TEXT = f"{MODEL} --text {{text}} --stretches 2 --layers 0"
WORDS = {
    "streaming.attention_maps": f"{TEXTS} --stretches 1",
    "streaming.endless": f"{MODEL} --texts {{text}} --tokens 80 --block 40 --chunk 20",
    "streaming.tables": f"{TEXTS} --tokens 4000",
    "reservoir.stream_losses": f"{TEXTS} --tokens 900",
    "reservoir.sampled": f"{MODEL} --written 4 --prompt 300 --rounds 1",
    "balancekv.single_layer": f"{TEXT} --tokens 300 --rounds 1 --seeds 1",
    "magicpig.tune_lsh": f"{TEXT} --tokens 300 --seeds 1 --bits 4 --tables 10 20",
    "magicpig.sparse_losses": f"{TEXTS} --prompt 64 --scored 32 --shares 0.5",
    "magicpig.sparse_tokens": "--sizes 256 --written 2 --rounds 1",
    "prefix_caching.agents": f"{MODEL} --trace {{turns}}",
    "training.sinks_in_front": f"{TEXTS} --variants zero --tokens 40 --windows 12 --starts 1",
    "training.mfu": "--preset backcopy --rows 1 --rounds 1",
    "tasks.__main__": f"{MODEL} --tasks passkey --lengths 512 --samples 2 --policies streaming",
    "tasks.endless_needle": f"{MODEL} --lengths 600 --samples 1 --budget 256 --every 32",
    "comparison.side_by_side": "",
    "benchmarks.schemas": "valid --models {model}",
    "comparison.endless_losses": f"{TEXTS} --tokens 600 --budget 64 --every 16",
}
SLOW = ("reservoir.sampled",)  # over ten seconds


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the words name."""
    folder = tmp_path_factory.mktemp("measures")
    model = write_tiny(folder / "model", max_position_embeddings=CONTEXT)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    turns = [{"role": role, "content": role * 600} for role in ("user", "assistant") * 2]
    (folder / "turns").write_text(json.dumps({"messages": turns}))
    random = np.random.default_rng(0)
    for name in ("text", "more"):
        (folder / name).write_text("".join(map(chr, random.integers(97, 122, 9_000))))
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.usefixtures("optax_promotes_dtypes")
@pytest.mark.parametrize("name", [seldom(name) if name in SLOW else name for name in WORDS])
def test_an_experiment_writes_its_record(name, files, trials, monkeypatch):
    module = importlib.import_module(f"jaxkv.evals.{name}")
    for constant, value in SMALLER.get(name, {}).items():
        monkeypatch.setattr(f"{module.__name__}.{constant}", value)
    run(module.MEASURE, [*WORDS[name].format(**files).split(), "--quick"])
    (file,) = trials.glob("*.json")
    about = json.loads(file.read_text())
    assert about["results"] and about["name"] == file.stem


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("streaming.tables", "--texts {text} other/text.md", "names of their own, got text, text"),
        ("magicpig.sparse_losses", "--texts {text}", "at least 2 files"),
        ("streaming.endless", f"{MODEL} --texts {{text}} --tokens 300 --block 100 --chunk 30",
         "--block must be a multiple of --chunk"),
        ("streaming.endless", f"{MODEL} --texts {{text}} --tokens 200 --block 200 "
         "--policy streaminn:sinks=4", "did you mean"),
        ("magicpig.sparse_tokens", "--written 400", "must be at most 1024 tokens, got 2800"),
        ("comparison.endless_losses", f"{TEXTS} --budget 64 --every 64",
         "at least 14 tokens of the budget, got every=64 and budget=64; give a smaller every"),
        ("comparison.endless_losses", f"{TEXTS} --budget 64 --every 16 --policies "
         "retrieval-half-window-calibrated", "needs head shares in the package"),
        ("comparison.endless_losses", f"{TEXTS} --budget 64 --every 50",
         "streaming with --budget 64, which --every 50 exceeds; give a smaller --every"),
        ("tasks.__main__", "--policies windw", "got windw; did you mean 'window'?"),
        ("tasks.__main__", "--polices window", "did you mean --policies?"),
        ("tasks.__main__", "--tasks needle --tasks passkey",
         "--tasks is given twice; remove the duplicate"),
        ("tasks.__main__", "--name=", "--name must name a record, got ''; give a name"),
        ("tasks.__main__", f"{MODEL} --gates --ratios 0.5",
         "--gates measures full attention alone, got --ratios; leave one out"),
        ("tasks.__main__", f"{MODEL} --policies h2o kvzip --query-aware",
         "kvzip score a context before its question is known, got --query-aware; leave one out"),
        ("tasks.__main__", f"{MODEL} --policies retrieval-calibrated",
         "those of default and smollm2-135m, got model; name other --policies"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(name, words, message, files, trials, capsys):
    measure = importlib.import_module(f"jaxkv.evals.{name}").MEASURE
    with pytest.raises(SystemExit) as stopped:
        run(measure, [*words.format(**files).split(), "--quick"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ") and message in line
    assert not trials.exists()
