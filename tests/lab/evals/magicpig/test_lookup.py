"""The variants that evals.magicpig.lookup times compute attention."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv.evals.magicpig import lookup
from jaxkv.policies import MagicPIG

pytestmark = pytest.mark.slow


def test_tables_index_the_prompt_and_later_all_keys():
    results = lookup.measure_size(1024, 1)
    prompt = 1024 - lookup.POLICY.sinks - lookup.POLICY.window
    assert results["keys_in_tables"][0] == prompt
    assert results["keys_in_tables"][1] >= prompt + lookup.POLICY.tail
    assert results["share_read"] == sum(results["bytes_read"].values()) / results["dense_bytes"]


def test_with_every_key_selected_the_output_is_dense_attention(monkeypatch):
    monkeypatch.setattr(lookup, "POLICY", MagicPIG(K=1, L=200, window=8))
    prompt, queries = lookup.draw(300)
    state = lookup.POLICY.reserve(lookup.SPEC, lookup.begin(), 300)
    state = lookup.POLICY.update(lookup.SPEC, state, prompt)[1]
    state = jax.jit(lookup.POLICY.finish_prefill, static_argnums=0)(lookup.SPEC, state)
    actual = lookup.attend(state, queries[0], 300)
    for name, form in lookup.dense_forms(prompt).items():
        expected = form.attend(queries[0], *form.arrays)
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)
