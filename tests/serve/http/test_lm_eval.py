"""Scoring by lm-eval's `local-completions`, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.generation.serving import Language, make_engine
from jaxkv.models.loading.llm import Llm
from jaxkv.serve.engine import PrefixConfig
from tests.models.test_parity import reference, reference_logits
from tests.serve.http.conftest import serving

# A context and its choices.
QUESTIONS = [
    ("The sky is", [" blue", " of no interest", " ✓"]),
    ("Two and two", [" make four", " is"]),
    ("Once", [" upon a time", " ", " more"]),
]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_of_the_default_model(monkeypatch):
    """With a prefix cache, its scores equal those of transformers."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    llm = models.load()
    engine = make_engine(
        llm,
        "streaming:sinks=4,window=252",
        max_batch=2,
        max_len=256,
        chunk=16,
        prefix_cache=PrefixConfig(num_blocks=8),
    )
    reference_model = reference(llm.path)
    with serving(engine, Language(llm, "default")) as served:
        for _ in range(2):
            right, samples = evaluate(served.port, "default", llm.path)
    expected_scores = [
        [choice_score(reference_model, llm, context, choice) for choice in choices]
        for context, choices in QUESTIONS
    ]
    for sample, values in zip(samples, expected_scores, strict=True):
        scores = [value for ((value, _),) in sample["resps"]]
        np.testing.assert_allclose(scores, values, atol=1e-3)
    assert right == sum(values[0] == max(values) for values in expected_scores) / len(QUESTIONS)


def choice_score(reference_model, llm: Llm, context: str, choice: str) -> float:
    """The score of a choice after its context by transformers. lm-eval sends both without a BOS."""
    begin = len(llm.tokenizer.encode(context, bos=False))
    ids = llm.tokenizer.encode(context + choice, bos=False)
    logits = jnp.asarray(reference_logits(reference_model, ids))
    return float(sum(jax.nn.log_softmax(logits[n - 1])[ids[n]] for n in range(begin, len(ids))))


def evaluate(port: int, name: str, tokenizer: Path) -> tuple[float, list[dict]]:
    """Accuracy and samples of QUESTIONS by lm-eval."""
    import datasets

    docs = [{"context": context, "choices": choices, "best": 0} for context, choices in QUESTIONS]
    task = {
        "task": "tiny",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "best",
        "target_delimiter": "",
    }
    evaluation = lm_eval_of(port, name, tokenizer, task)
    return evaluation["results"]["tiny"]["acc,none"], evaluation["samples"]["tiny"]


def lm_eval_of(port: int, name: str, tokenizer: Path, task: str | dict, **options: Any) -> dict:
    """What lm-eval says of a task. options: of `simple_evaluate`."""
    from lm_eval import simple_evaluate

    return simple_evaluate(
        model="local-completions",
        model_args={
            "model": name,
            "base_url": f"http://127.0.0.1:{port}/v1/completions",
            "tokenizer": str(tokenizer),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=[task],
        batch_size=2,
        bootstrap_iters=0,
        **options,
    )


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_asks_for_needles(monkeypatch):
    """RULER's task in noise, whose texts are drawn with the tokenizer and not downloaded."""
    for package in ("lm_eval", "wonderwords"):
        pytest.importorskip(package)
    import nltk

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(nltk, "download", lambda _: False)  # of sentences, for other tasks
    llm = models.load()
    engine = make_engine(llm, "streaming:sinks=4,window=252", max_batch=2, max_len=512, chunk=16)
    with serving(engine, Language(llm, "default")) as served:
        evaluation = lm_eval_of(
            served.port, "default", llm.path, "niah_single_1", limit=2,
            metadata={"max_seq_lengths": [512]},
        )  # fmt: skip
    samples = evaluation["samples"]["niah_single_1"]
    scores = [sample["512"] for sample in samples]
    right = [sample["doc"]["outputs"][0] in sample["resps"][0][0] for sample in samples]
    assert scores == right and len(scores) == 2
    assert evaluation["results"]["niah_single_1"]["512,none"] == sum(scores) / 2
    assert all(sample["resps"][0][0] for sample in samples)
