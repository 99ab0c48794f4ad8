"""The comparison with llama.cpp: requests and answers, with a peer and a jaxkv that are fakes."""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.peers import llama_cpp, llama_cpp_rates, our_rates, peer_process

# Answers of a peer: a form with twice the bytes takes twice the time. All cases generate the tokens
# 7, 8, 9 after every prompt, except that the F16 file differs from the second token on.
FAKE = """
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from shared import serve

class Worker:
    def quantise(self, source, target, form, threads):
        open(target, "w").write(form)
        return {}
    def load(self, model, prompts, threads=0, room=0, weights=None, policy=None):
        quantised = open(model).read() if model.endswith(("Q8_0.gguf", "F16.gguf")) else ""
        self.bytes = {"Q8_0": 2000, "F16": 4000}.get(quantised, 1000) if policy is None else 8000
        self.quantised, self.prompts, self.room = quantised, prompts, room
        return {"weight_bytes": self.bytes}
    def about(self):
        return {"ggml": "0", "llama_cpp_python": "1"}
    def prefill(self, tokens):
        return {"seconds": len(tokens) * self.bytes / 1000}
    def decode(self, batch, new):
        assert len(self.prompts) >= batch
        return {"seconds": batch * new * self.bytes / 1000}
    def greedy(self, batch, new):
        tokens = [7, 1, 2] if self.quantised == "F16" else [7, 8, 9]
        return {"tokens": [tokens] * batch}
    def memory(self):
        return {"resident": 2**20, "peak": 2**21}
    def bandwidth(self, side):
        return {"seconds": 4 * side * side / 16000}

serve(Worker())
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Both sides answer from a script; returns its path."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    (tmp_path / "shared.py").write_text(Path(llama_cpp.SCRIPT).read_text("utf-8"))
    monkeypatch.setattr(llama_cpp, "SCRIPT", script)
    monkeypatch.setattr(llama_cpp, "OURS", [sys.executable, "-P", str(script)])
    monkeypatch.setattr(peer_process, "PAUSE", 0)
    return script


def sizes(**fields):
    settings = {
        "prefill": [32],
        "batches": [1, 2],
        "prompt": 8,
        "new": 3,
        "threads": 1,
        "rounds": 2,
    }
    return argparse.Namespace(**settings | fields, peer_python=sys.executable)


def test_all_cases_are_measured(fakes, model, capsys):
    results = llama_cpp.run(model, sizes())
    assert list(results["cases"]) == [
        "llama.cpp Q4_1", "llama.cpp Q8_0", "llama.cpp F16", "jaxkv float32, full",
        "jaxkv float32, streaming", "jaxkv int8, full", "jaxkv int8, streaming",
    ]  # fmt: skip
    q8 = results["cases"]["llama.cpp Q8_0"]
    rates = {title: rate["median"] for title, rate in q8["tokens_per_second"].items()}
    assert rates == {"prefill, 32": 0.5, "decode, batch 1": 0.5, "decode, batch 2": 0.5}
    assert q8["bytes_per_second"]["median"] == 1000 and q8["bytes_per_second"]["n"] == 2
    assert q8["share_of_bandwidth"]["median"] == pytest.approx(1000 / 16000)
    assert results["bandwidth"]["median"] == pytest.approx(16000)
    ratios = results["ratio"]["decode, batch 2"]["jaxkv int8, full"]
    assert {name: ratio["median"] for name, ratio in ratios.items()} == {
        "llama.cpp Q4_1": 1 / 8, "llama.cpp Q8_0": 1 / 4, "llama.cpp F16": 1 / 2,
    }  # fmt: skip
    assert results["greedy"]["llama.cpp F16"] == {"common": [1, 1], "of": 3}
    assert results["greedy"]["jaxkv int8, full"]["common"] == [3, 3]
    assert llama_cpp.rates_table(results) in capsys.readouterr().out


def test_another_model_is_refused(fakes, model):
    fakes.write_text(FAKE.replace("[7, 1, 2]", "[6, 8, 9]"))
    with pytest.raises(SystemExit, match=r"llama.cpp F16 .* different tokens"):
        llama_cpp.run(model, sizes())


def test_prompts_longer_than_the_passage_are_refused(fakes, model):
    with pytest.raises(SystemExit, match="the passage has"):
        llama_cpp.run(model, sizes(prefill=[10**6]))


def test_a_failing_peer_ends_the_run(fakes, model):
    fakes.write_text("raise ValueError")
    with pytest.raises(SystemExit, match=r"quantiser: quantise failed.*nothing is written"):
        llama_cpp.run(model, sizes())


AT = {"median": 1234.4, "min": 1200.0, "max": 1300.0}
CASE = {"tokens_per_second": {"decode, batch 1": AT}, "weight_bytes": 2**20,
        "share_of_bandwidth": {"median": 0.5}, "memory": {"resident": 3 * 2**20}}  # fmt: skip


def test_a_row_of_the_table():
    results = {
        "cases": {"llama.cpp Q4_1": CASE}, "bandwidth": {"median": 2e9}, "threads": 2,
        "prompt": 300, "new": 64, "rounds": 9,
        "llama_cpp": {"llama_cpp_python": "0.3", "ggml": "0.25"},
    }  # fmt: skip
    setting, _, head, _, row = llama_cpp.rates_table(results).splitlines()
    assert setting.startswith("llama-cpp-python 0.3 (ggml 0.25), 2 threads each, 300 tokens")
    assert row == "| llama.cpp Q4_1 | 1,234 (1,200 to 1,300) | 1.0 MiB | 50% | 3.0 MiB |"
    assert head.count("|") == row.count("|")


def test_our_worker_decodes_what_the_model_generates(model, tmp_path):
    model = shutil.copytree(model, tmp_path / "sampled")
    (model / "generation_config.json").write_text('{"temperature": 3.0}')
    ids = np.random.default_rng(0).integers(2, 250, (2, 24)).tolist()
    worker = our_rates.JaxkvWorker()
    loaded = worker.load(str(model), "int8", "streaming:sinks=4,window=12", ids)
    float_bytes = sum(leaf.nbytes for leaf in models.load(model, "float32").weights.values())
    assert loaded["weight_bytes"] < 0.4 * float_bytes
    assert worker.prefill(ids[0])["seconds"] > 0
    assert worker.decode(2, 3)["seconds"] > 0
    llm = models.load(model, "float32", weights="int8")
    answer = models.generate(llm, ids[1], worker.policy, 3, temperature=0, ignore_eos=True)
    assert worker.greedy(2, 3)["tokens"][1] == list(answer.tokens)
    memory = worker.memory()
    assert memory["peak"] >= memory["resident"] > 2**20
    assert worker.bandwidth(64)["bytes"] == 4 * 64**2


def test_the_peer_script_imports_nothing_of_jaxkv():
    tree = ast.parse(Path(llama_cpp_rates.__file__).read_text("utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert "llama_cpp" in names and not {n for n in names if n.startswith(("jax", "torch"))}
