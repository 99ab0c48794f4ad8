"""Forms for XLA:CPU are measured: their plain forms replace them and compute the same."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import cpu_forms
from jaxkv.evals.benchmarks.cpu_forms import FORMS, PROGRAMS, ProgramSizes
from jaxkv.models.training.recipes import PRESETS
from jaxkv.pallas_kernels.sampled_attention import reference
from jaxkv.platform import cpu as xla_cpu

RECIPE = replace(
    PRESETS["tiny"], layers=1, width=32, heads=2, kv_heads=1, mlp=64, context=32, batch_size=2
)
SIZES = ProgramSizes(small=32, large=128, steps=2, keys=512, bits=4, tables=8, sequences=2,
              recipe=RECIPE, vocab=256)  # fmt: skip
RESULTS = {  # of a program besides its caches, whose form may differ
    "engine": lambda results: results[1],
    "forward": lambda results: results[1],
    "decode": lambda results: (results[0].logits, results[1:]),
    "training": lambda results: results[1],
}


@pytest.fixture(scope="module")
def load(shared):
    """Two layers of a tiny model, so that layers can share leaves."""
    folder = shared / "models" / "stories260K"
    llms = {"float32": models.load(folder), "int8": models.load(folder, weights="int8")}
    return {
        name: replace(llm, config=replace(llm.config, layers=2, windows=(None, None)))
        for name, llm in llms.items()
    }.__getitem__


@pytest.fixture
def low_thresholds(monkeypatch):
    """ProgramSizes from which forms apply, so that they apply to tiny programs."""
    monkeypatch.setattr(xla_cpu, "CACHED_LOGITS", 0)
    monkeypatch.setattr(xla_cpu, "WIDENED", 2**9)
    monkeypatch.setattr(xla_cpu, "PART_SLOTS", 8)
    monkeypatch.setattr(xla_cpu, "LARGE", 1)
    monkeypatch.setattr(xla_cpu, "LOGITS_AT_ONCE", {"cpu": 2**10})
    monkeypatch.setattr(xla_cpu, "query_block", lambda: 8)
    monkeypatch.setattr(reference, "GATHERED_SLOTS", 4)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_plain_form_is_another_program_and_computes_the_same(program, load, low_thresholds):
    built = PROGRAMS[program](load, SIZES)

    def lowered(plain):
        """The text of a program, and what it computes."""
        lowered_form, args = cpu_forms.lower(built, plain)
        results_of = RESULTS.get(program.partition(",")[0], lambda results: results)
        results = lowered_form.compile()(*cpu_forms.to_donate(built, args))
        return lowered_form.as_text(), jax.tree.leaves(results_of(results))

    original, expected = lowered({})
    assert cpu_forms.lower(built, {})[0].as_text() == original
    forms = {name: form for name, form in FORMS.items() if form.program == program}
    assert forms
    for name, form in forms.items():
        text, actual = lowered(form.plain)
        is_equal = name == "decode_compiler_options"  # options are no part of the text
        is_equal |= name == "product_with_int8" and jax.__version_info__ < (0, 12)
        assert (text == original) == is_equal, name
        for array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_allclose(array, expected_array, rtol=2e-5, atol=2e-5, err_msg=name)


def test_rows_are_measured_and_shown(load):
    names = ["argmax", "carry"]
    results = cpu_forms.rows_of(load, SIZES, names, rounds=2)
    rows = results["rows"]
    assert list(rows) == names and set(results["programs"]) == {"argmax", "engine"}
    assert rows["argmax"]["ratio"]["n"] == 2 and rows["argmax"]["copies"]["with"] is None
    assert rows["carry"]["copies"]["with"] == 0 and not rows["carry"]["same_program"]
    assert cpu_forms.table_of(results).count("\n| `") == len(rows)
