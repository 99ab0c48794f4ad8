"""The comparison with transformers: requests and tables with fakes, and torch on a small model."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxkv.evals.lib import claims
from jaxkv.evals.lib.baseline import Baseline
from jaxkv.evals.peers import (
    llama_cpp_rates,
    our_rates,
    peer_process,
    torch_rates,
    transformers_rates,
)
from jaxkv.evals.peers.transformers_rates import COMPILED, EAGER, RateSizes
from jaxkv.models.loading.llm import without_weights
from jaxkv.models.loading.published import open_published

# Answers of a case: transformers takes twice the time of jaxkv, and half of that if compiled.
FAKE = """
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from shared import serve

class Worker:
    peak = 0
    def load(self, model, prompts, weights=None, policy=None, threads=0, new=0):
        self.time, self.tokens = (1 if policy else 2), [7, 8, 9]
        assert policy or (threads > 0 and new == 3)
        return {"weight_bytes": 100, "cores": 2}
    def about(self):
        return {"transformers": "5", "torch": "2", "attention": "sdpa"}
    def compile(self, batches, folder):
        assert batches == [1, 8]
        self.time = 1
        return {"seconds": 30.0}
    def prefill(self, tokens):
        return {"seconds": len(tokens) * self.time}
    def decode(self, batch, new):
        return {"seconds": batch * new * self.time}
    def greedy(self, batch, new):
        return {"tokens": [self.tokens] * batch}
    def memory(self):
        self.peak += 2**20
        return {"resident": 1, "peak": self.peak}

serve(Worker())
"""
SIZES = RateSizes({1: 2, 8: 1}, {32: 1, 4096: 1}, first=3, prompt=8, new=3)
OVER = {"median": 2.0, "min": 2.0, "max": 2.0, "n": 5}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Both sides answer from a script; returns its path."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    (tmp_path / "shared.py").write_text(Path(llama_cpp_rates.__file__).read_text("utf-8"))
    for side in ("OURS", "THEIRS"):
        monkeypatch.setattr(transformers_rates, side, [sys.executable, "-P", str(script)])
    monkeypatch.setattr(peer_process, "PAUSE", 0)
    return script


def run(model):
    return transformers_rates.run(without_weights(open_published(model)), SIZES)


def test_all_cases_are_measured(fakes, model, capsys):
    results = run(model)
    titles = ["decode, batch 1", "first token", "prefill, 32", "prefill, 4096", "decode, batch 8"]
    assert list(results["ratio"]) == titles
    assert list(results["cases"]) == ["jaxkv, full", "jaxkv, streaming", EAGER, COMPILED]
    full, eager, compiled = (results["cases"][name] for name in ("jaxkv, full", EAGER, COMPILED))
    assert full["tokens_per_second"]["decode, batch 8"]["median"] == 1
    assert eager["tokens_per_second"]["prefill, 4096"]["median"] == 0.5
    assert (full["first_token"]["median"], eager["first_token"]["median"]) == (8, 16)
    assert full["first_token"]["n"] == 3 and "first token" not in full["tokens_per_second"]
    assert [full["memory"][title]["peak"] / 2**20 for title in titles] == [1, 2, 3, 4, 5]
    assert list(compiled["memory"]) == [titles[0], titles[-1]] and "first_token" not in compiled
    over = results["ratio"]["decode, batch 8"]["jaxkv, streaming"]
    assert (over[EAGER]["median"], over[COMPILED]["median"]) == (2, 1)
    assert transformers_rates.rates_table(results) in capsys.readouterr().out


def test_both_policies_have_the_bars_that_are_asked(fakes, model):
    bars = run(model)["bars"]
    assert {bar["bar"]: (bar["ask"], bar["value"]["median"]) for bar in bars} == {
        f"{title}: {name} over {EAGER}": (f">= {bound}", 2.0)
        for title, bound in
        {"decode, batch 1": "1.5", "decode, batch 8": "1.6", "prefill, 4096": "1"}.items()
        for name in ("jaxkv, full", "jaxkv, streaming")
    }  # fmt: skip
    assert all(bar["met"] for bar in bars)
    assert claims.MODULES["transformers_rates"] == "peers.transformers_rates"


def test_a_failed_compilation_is_recorded(fakes, model):
    fakes.write_text(FAKE.replace('{"seconds": 30.0}', '{"failed": "CppError: no compiler"}'))
    results = run(model)
    assert results["compile"] == {"failed": "CppError: no compiler"}
    assert COMPILED not in results["cases"]
    assert list(results["ratio"]["decode, batch 1"]["jaxkv, full"]) == [EAGER]
    assert "not measured: `CppError: no compiler`" in transformers_rates.rates_table(results)


@pytest.mark.parametrize(
    "old, new, wrong",
    [
        ("self.time = 1", "self.tokens = [7, 8, 1]", COMPILED),
        ("[7, 8, 9]", "[7, 8, 1 if policy else 9]", "jaxkv, full and jaxkv, streaming"),
    ],
)
def test_other_tokens_are_an_error(fakes, model, old, new, wrong):
    fakes.write_text(FAKE.replace(old, new))
    with pytest.raises(SystemExit, match=f"^{wrong} and .* different tokens at batch 1"):
        run(model)


AT = {"median": 1234.44, "min": 1200.0, "max": 1300.0, "n": 9}


def test_the_table_has_a_row_per_case():
    full = {
        "tokens_per_second": {"decode, batch 1": AT},
        "first_token": {"median": 0.5, "min": 0.25, "max": 1.0},
        "memory": {"decode, batch 1": {"peak": 2**20}, "first token": {"peak": 3 * 2**20}},
    }
    compiled = {"tokens_per_second": {"decode, batch 1": OVER},
                "memory": {"decode, batch 1": {"peak": 2**21}}}  # fmt: skip
    results = {
        "peer": {"transformers": "5.23", "torch": "2.13", "attention": "sdpa"}, "threads": 2,
        "sizes": {"prompt": 256, "new": 64}, "compile": {"seconds": 61.6},
        "cases": {"jaxkv, full": full, COMPILED: compiled},
        "ratio": {"decode, batch 1": {"jaxkv, full": {EAGER: AT, COMPILED: OVER}},
                  "first token": {"jaxkv, full": {EAGER: OVER}}},
    }  # fmt: skip
    setting, _, *rates = transformers_rates.rates_table(results).splitlines()
    assert setting.startswith("transformers 5.23 with sdpa attention on torch 2.13, float32, 2 thr")
    assert setting.endswith("to the first token, 5 to 9 rounds. torch.compile took 62 seconds.")
    assert rates == [
        "| case | decode, batch 1 | first token (s) | peak memory |",
        "|---|---|---|---|",
        "| jaxkv, full | 1,234 (1,200 to 1,300) | 0.50 (0.25 to 1.00) | 3.0 MiB |",
        f"| {COMPILED} | 2 | – | 2.0 MiB |",
    ]


PROMPTS = np.random.default_rng(0).integers(2, 250, (2, 24)).tolist()


@pytest.fixture
def worker(model):
    worker = torch_rates.TransformersWorker()
    loaded = worker.load(str(model), 1, PROMPTS, 6)
    assert loaded["weight_bytes"] > 10_000
    return worker


def greedy_of_jaxkv(model, new):
    """Greedy tokens of jaxkv."""
    worker = our_rates.JaxkvWorker()
    worker.load(str(model), None, "full", PROMPTS)
    return worker.greedy(2, new)["tokens"]


@pytest.mark.slow
@pytest.mark.parity
def test_torch_generates_the_tokens_of_jaxkv(worker, model):
    """Also after a measurement, which leaves more tokens in the cache."""
    asked = greedy_of_jaxkv(model, 6)
    assert worker.greedy(2, 6)["tokens"] == asked
    assert worker.decode(2, 6)["seconds"] > 0
    assert worker.greedy(2, 6)["tokens"] == asked
    assert worker.greedy(1, 6)["tokens"] == asked[:1]
    assert worker.prefill(PROMPTS[0])["seconds"] > 0
    assert worker.memory()["peak"] > 2**20
    assert worker.about()["attention"] == "sdpa"


@pytest.mark.slow
@pytest.mark.parity
def test_a_static_cache_gives_the_same_tokens(worker, model):
    from transformers import StaticCache

    worker.stepper = Baseline(worker.baseline.model)
    for _ in range(2):
        assert worker.greedy(2, 6)["tokens"] == greedy_of_jaxkv(model, 6)
    cache = worker.decodings[2].cache
    assert isinstance(cache, StaticCache) and cache.layers[0].keys.shape[2] == 24 + 6


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++")
def test_compiled_decoding_gives_the_same_tokens(worker, model, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.devnull)  # restored at the end
    answer = worker.compile([2], str(tmp_path / "compiled"))
    assert answer.get("seconds", 0) > 0, answer
    assert any((tmp_path / "compiled").iterdir())
    assert worker.greedy(2, 6)["tokens"] == greedy_of_jaxkv(model, 6)


@pytest.mark.slow
@pytest.mark.parity
def test_the_first_line_of_an_error_is_told(worker, monkeypatch, tmp_path):
    def fail(_):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.devnull)
    monkeypatch.setattr(Baseline, "compiled", fail)
    assert worker.compile([2], str(tmp_path)) == {"failed": "RuntimeError: no compiler"}
