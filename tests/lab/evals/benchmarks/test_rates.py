"""Rates beside peers: requests and answers with fakes on both sides, and the adapters."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import (
    kvpress_parity,
    rates,
    rates_jaxkv,
    rates_llama_cpp,
    rates_openvino,
    rates_transformers,
)
from jaxkv.evals.benchmarks.rates import COMPILED, EAGER, FIRST, RateSizes
from jaxkv.evals.lib.baseline import Baseline
from tests.tiny import write_tiny

# Answers of a case: jaxkv takes twice the time of a peer per byte of its weights, and all cases
# generate the tokens 7, 8, 9, except the F16 file.
FAKE = """
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from shared import serve

class Worker:
    peak, time = 0, 1
    def quantise(self, source, target, form, threads):
        open(target, "w").write(form)
        return {}
    def load(self, model, prompts, threads, room, new, weights=None, policy=None, **_):
        assert threads == 1 and new in (3, 16) and room >= 11
        form = open(model).read() if model.endswith(("Q8_0.gguf", "F16.gguf")) else ""
        self.bytes = {"Q8_0": 2000, "F16": 4000}.get(form, 1000) if policy is None else 8000
        self.tokens = [7, 1, 2] if form == "F16" else [7, 8, 9]
        about = {"cache": {"prompt": 2048, "decoding": 1024}, "losses": [3.5, 3.25, 3, 3]}
        return about | {"weight_bytes": self.bytes}
    def about(self):
        names = "ggml", "llama_cpp_python", "transformers", "torch", "attention", "openvino_genai"
        precisions = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8"}
        return dict.fromkeys(names, "1") | {"settings": precisions}
    def compile(self, batches, folder):
        return {"seconds": 30.0}
    def prefill(self, tokens):
        return {"seconds": len(tokens) * self.bytes / 1000}
    def decode(self, batch, new):
        return {"seconds": batch * new * self.bytes / 1000}
    def greedy(self, batch, new):
        return {"tokens": [(self.tokens * new)[:new]] * batch}
    def memory(self):
        self.peak += 2**20
        return {"resident": self.peak, "peak": self.peak}
    def bandwidth(self, side):
        return {"seconds": 4 * side * side / 16000}

serve(Worker())
"""
SIZES = RateSizes({1: 2, 8: 1}, {32: 1, 1024: 1}, first=3, prompt=8, new=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("rates") / "model")


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Both sides answer from a script; returns its path."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    (tmp_path / "shared.py").write_text(Path(rates_llama_cpp.__file__).read_text("utf-8"))
    for side in ("OURS", "TRANSFORMERS"):
        monkeypatch.setattr(rates, side, [sys.executable, "-P", str(script)])
    for peer in ("LLAMA_CPP", "OPENVINO"):
        monkeypatch.setattr(rates, peer, script)
    monkeypatch.setattr(rates, "PAUSE", 0)
    return script


def run(peer, model, sizes=SIZES):
    return rates.measure_peer(peer, model, sys.executable, sizes, 1)


TITLES = ["decode, batch 1", FIRST, "prefill, 32", "prefill, 1024", "decode, batch 8"]


def test_all_cases_of_llama_cpp_are_measured(fakes, model, capsys):
    results = run("llama.cpp", model)
    assert list(results["ratio"]) == TITLES and results["bars"] == []
    assert list(results["cases"]) == [
        "llama.cpp Q4_1", "llama.cpp Q8_0", "llama.cpp F16", "jaxkv float32, full",
        "jaxkv float32, streaming", "jaxkv int8, full", "jaxkv int8, streaming",
    ]  # fmt: skip
    q8 = results["cases"]["llama.cpp Q8_0"]
    medians = {title: value["median"] for title, value in q8["tokens_per_second"].items()}
    assert medians == {title: 0.5 for title in TITLES if title != FIRST}
    assert q8["bytes_per_second"]["median"] == 1000 and q8["bytes_per_second"]["n"] == 2
    assert q8["share_of_bandwidth"]["median"] == pytest.approx(1000 / 16000)
    assert results["bandwidth"]["median"] == pytest.approx(16000)
    over = results["ratio"]["decode, batch 8"]["jaxkv int8, full"]
    assert [value["median"] for value in over.values()] == [1 / 8, 1 / 4, 1 / 2]
    assert results["greedy"]["llama.cpp F16"] == {"common": [1] * 8, "of": 3}
    table = rates.rates_table("llama.cpp", results)
    assert table in capsys.readouterr().out and table.count("\n| ") == 1 + len(results["cases"])


def test_all_cases_of_transformers_are_measured(fakes, model):
    """One that does not compile is left out."""
    results = run("transformers", model)
    assert list(results["ratio"]) == TITLES
    assert list(results["cases"]) == ["jaxkv, full", "jaxkv, streaming", EAGER, COMPILED]
    eager, compiled = (results["cases"][name] for name in (EAGER, COMPILED))
    assert eager["first_token"] == {"median": 8, "min": 8, "max": 8, "n": 3}
    assert [eager["memory"][title]["peak"] / 2**20 for title in TITLES] == [1, 2, 3, 4, 5]
    assert list(compiled["memory"]) == [TITLES[0], TITLES[-1]]  # it reads prompts as eager does
    assert {bar["bar"]: (bar["ask"], bar["met"]) for bar in results["bars"]} == {
        f"decode, batch {batch}: jaxkv, {policy} over {EAGER}": (f">= {bound}", False)
        for batch, bound in ((1, 1.5), (8, 1.6))
        for policy in ("full", "streaming")
    }
    row = rates.rates_table("transformers", results).splitlines()[-1]
    assert row.startswith(f"| {COMPILED} | 1 | – | – | 1 | – |")
    fakes.write_text(FAKE.replace('{"seconds": 30.0}', '{"failed": "CppError: no compiler"}'))
    results = run("transformers", model)
    assert COMPILED not in results["cases"]
    assert "`CppError: no compiler`" in rates.rates_table("transformers", results)


def test_all_cases_of_openvino_are_measured(fakes, model):
    """Their texts may differ: each cache has other tokens."""
    worker = FAKE.replace("[7, 1, 2]", "[6, 8, 9]").replace("**_", "cache=None, **_")
    fakes.write_text(worker.replace('form == "F16"', "cache"))
    results = run("openvino", model, replace(SIZES, decode={1: 2}))
    assert list(results["ratio"]) == TITLES[:-1]
    assert list(results["cases"]) == [
        "openvino, full", "openvino, eviction", "jaxkv float32, full", "jaxkv float32, streaming",
        *(f"jaxkv int8, {name}" for name in ("full", "streaming", "snapkv", "retrieval")),
    ]  # fmt: skip
    assert results["greedy"]["openvino, eviction"] == {"common": [0], "of": 3}
    assert results["greedy"]["openvino, full"] == {"common": [3], "of": 3}
    table = rates.rates_table("openvino", results)
    assert "OpenVINO GenAI 1, products in bf16, cache in u8" in table
    assert "| 3.50 3.25 3.00 3.00 | 1.0 KiB | 2.0 KiB |" in table


@pytest.mark.parametrize(
    "peer, change, match",
    [
        ("llama.cpp", ("[7, 1, 2]", "[6, 8, 9]"), r"llama.cpp F16 .* different tokens"),
        ("llama.cpp", ("import os, sys", "raise ValueError"), "quantise failed.*nothing is writte"),
    ],
)
def test_another_model_or_a_failing_peer_ends_the_run(fakes, model, peer, change, match):
    fakes.write_text(FAKE.replace(*change))
    with pytest.raises(SystemExit, match=match):
        run(peer, model)


SCRIPTS = [rates_llama_cpp.__file__, rates_openvino.__file__, kvpress_parity.SCRIPT]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_peer_imports_nothing_of_jaxkv(script):
    tree = ast.parse(Path(script).read_text("utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert names & {"llama_cpp", "openvino_genai", "kvpress"} and not {
        n for n in names if n.startswith("jax")
    }


PROMPTS = np.random.default_rng(0).integers(2, 250, (2, 24)).tolist()


def test_our_adapter_decodes_what_the_model_generates(model, tmp_path):
    model = shutil.copytree(model, tmp_path / "sampled")
    (model / "generation_config.json").write_text('{"temperature": 3.0}')
    worker = rates_jaxkv.JaxkvWorker()
    policy = "streaming:sinks=4,window=12"
    loaded = worker.load(str(model), "int8", policy, PROMPTS, scored=True)
    float_bytes = sum(leaf.nbytes for leaf in models.load(model, "float32").weights.values())
    assert loaded["weight_bytes"] < 0.4 * float_bytes
    assert loaded["cache"]["prompt"] == loaded["cache"]["decoding"] > 0  # it is always full
    assert len(loaded["losses"]) == 4 and min(loaded["losses"]) > 0
    assert worker.prefill(PROMPTS[0])["seconds"] > 0 < worker.decode(2, 3)["seconds"]
    llm = models.load(model, "float32", weights="int8")
    answer = models.generate(llm, PROMPTS[1], worker.policy, 3, temperature=0, ignore_eos=True)
    assert worker.greedy(2, 3)["tokens"][1] == list(answer.tokens)
    assert worker.memory()["peak"] >= worker.memory()["resident"] > 2**20
    assert worker.bandwidth(64)["bytes"] == 4 * 64**2


@pytest.mark.real_model
def test_openvino_evicts_after_the_prompt(smollm2_file):
    """Blocks of a bounded cache are evicted while it decodes."""
    pytest.importorskip("openvino_genai")
    worker = rates_openvino.OpenvinoWorker()
    prompt = [*range(300, 400)]
    parts = {"start_size": 32, "recent_size": 32, "max_cache_size": 96}
    loads = [worker.load(str(smollm2_file), x, 1, [prompt * 3], 40) for x in (None, parts)]
    assert loads[0]["losses"] == loads[1]["losses"]
    first, *later = loads[0]["losses"]
    assert len(later) == 3 and max(later) < first  # the prompt repeats itself
    full, bounded = (loaded["cache"] for loaded in loads)
    assert 0 < bounded["decoding"] < 0.5 * bounded["prompt"]
    assert bounded["prompt"] == full["prompt"] < full["decoding"]  # of the prompt alone
    tokens, times = worker.generate(prompt, 4)
    assert len(tokens) == len(times) - 1 == 4 and worker.greedy(1, 3)["tokens"][0][:1]
    assert worker.decode(1, 3)["seconds"] > 0 < worker.prefill(prompt)["seconds"]
    assert worker.about()["settings"].keys() == {*rates_openvino.SETTINGS}


@pytest.fixture
def torch_worker(model):
    worker = rates_transformers.TransformersWorker()
    assert worker.load(str(model), 1, PROMPTS, 6)["weight_bytes"] > 10_000
    return worker


def greedy_of_jaxkv(model, new):
    worker = rates_jaxkv.JaxkvWorker()
    worker.load(str(model), None, "full", PROMPTS)
    return worker.greedy(2, new)["tokens"]


@pytest.mark.parity
def test_torch_generates_the_tokens_of_jaxkv(torch_worker, model):
    """With both caches, and after a measurement, which leaves more tokens in the cache."""
    expected = greedy_of_jaxkv(model, 6)
    assert torch_worker.greedy(2, 6)["tokens"] == expected
    assert torch_worker.decode(2, 6)["seconds"] > 0 < torch_worker.prefill(PROMPTS[0])["seconds"]
    assert torch_worker.greedy(2, 6)["tokens"] == expected
    assert torch_worker.greedy(1, 6)["tokens"] == expected[:1]
    assert torch_worker.about()["attention"] == "sdpa"
    torch_worker.decodings.clear()
    torch_worker.stepper = Baseline(torch_worker.baseline.model)  # not the baseline: a StaticCache
    for _ in range(2):
        assert torch_worker.greedy(2, 6)["tokens"] == expected
    assert torch_worker.decodings[2].cache.layers[0].keys.shape[2] == 24 + 6


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++")
def test_compiled_decoding_gives_the_same_tokens(torch_worker, model, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.devnull)  # restored at the end
    answer = torch_worker.compile([2], str(tmp_path / "compiled"))
    assert answer.get("seconds", 0) > 0, answer
    assert any((tmp_path / "compiled").iterdir())
    assert torch_worker.greedy(2, 6)["tokens"] == greedy_of_jaxkv(model, 6)
