"""The logits and greedy tokens of transformers, for every supported family."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxkv import models
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.llm import Llm, placement
from jaxkv.models.loading.source import open_source
from jaxkv.models.network import quantised
from jaxkv.models.network.decoder import Decoder
from jaxkv.sampling import Sampling
from jaxkv.state.sharding import mesh_of
from tests.models.folders import FAMILIES, write_model

LIMIT = 1e-4  # largest difference of a float32 logit
NEW = 200  # greedy tokens
CHUNKS = (48, 1, 31, 7, 48, 15)  # tokens per call: less and more than windows of 24
FULL = "full:max=512,start=256"  # doubles once


def untokenized(folder: Path, mesh: Mesh | None = None) -> Llm:
    """The model in a folder that has no tokenizer."""
    source = open_source(folder)
    config = source.config
    weights = source.weights("float32", None if mesh is None else placement(mesh))
    return Llm(config, weights, None, Chat(None), folder, "float32", mesh)


def reference(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # more threads are slower for models this small
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def reference_logits(model, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def reference_greedy(model, ids: list[int], tokens: int) -> list[int]:
    import torch

    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(ids) :].tolist()


# This level halves the compile time. The greedy tokens come from the usual programs.
@partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})
def _logits(config, policies, weights, states, tokens, positions, valid):
    decoder = Decoder(config, weights)
    hidden, states = decoder(tokens, positions, valid, policies, states)
    return decoder.logits(hidden), states


def prefill(stream: Stream, sequences: list[list[int]], chunks=CHUNKS) -> list[np.ndarray]:
    """The logits [T,V] at every position of each sequence, prefilled in chunks of these sizes.

    Afterwards the stream is as after `Stream.prefill`. Chunks are padded to one width, so that
    there is one compilation.
    """
    llm, width, starts = stream.llm, max(chunks), np.cumsum([0, *chunks])
    assert starts[-1] >= max(map(len, sequences))
    logits_of_rows = [[] for _ in sequences]
    stream.reserve(max(map(len, sequences)))
    states, last = stream.decoding.states, np.zeros((len(sequences), llm.config.vocab), np.float32)
    for start, size in zip(starts, chunks, strict=False):
        tokens, valid = (
            np.zeros((len(sequences), width), np.int32),
            np.zeros((len(sequences), width), bool),
        )
        for row, ids in enumerate(sequences):
            part = ids[start : start + size]
            tokens[row, : len(part)], valid[row, : len(part)] = part, True
        positions = (start + np.broadcast_to(np.arange(width), tokens.shape)).astype(np.uint32)
        logits, states = _logits(
            llm.config, stream.policies, llm.weights, states, tokens, positions, valid
        )
        for row, n in enumerate(valid.sum(axis=1)):
            logits_of_rows[row].append(np.asarray(logits[row, :n]))
            last[row] = logits_of_rows[row][-1][-1] if n else last[row]
    lengths = jnp.asarray([len(ids) for ids in sequences], jnp.uint32)
    stream.decoding = stream.decoding._replace(
        states=states, logits=jnp.asarray(last), position=lengths, done=lengths == 0
    )
    return [np.concatenate(parts) for parts in logits_of_rows]


def greedy(stream: Stream, tokens: int) -> list[list[int]]:
    stream.limit = tokens
    blocks = list(stream.decode_blocks(Sampling(), tokens, eos=()))
    return np.concatenate(blocks, axis=1).tolist()


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(family, tmp_path, record_property):
    folder = write_model(tmp_path, family)
    llm, reference_model = untokenized(folder), reference(folder)
    random = np.random.default_rng(7)
    sequences = [random.integers(0, llm.config.vocab, n).tolist() for n in (150, 61)]
    stream = Stream(llm, FULL, batch=2)
    actual = prefill(stream, sequences)
    worst = 0.0
    for row, ids in enumerate(sequences):
        expected = reference_logits(reference_model, ids)
        assert actual[row].shape == expected.shape
        worst = max(worst, float(np.abs(actual[row] - expected).max()))
    record_property("family", json.dumps(llm.config.family))
    record_property("largest_logit_difference", worst)
    record_property("logit_standard_deviation", float(expected.std()))
    assert worst < LIMIT
    for ids, tokens in zip(sequences, greedy(stream, NEW), strict=True):
        assert tokens == reference_greedy(reference_model, ids, NEW)
    record_property("equal_greedy_tokens", NEW * len(sequences))


@pytest.mark.record
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_and_eight_devices(family, tmp_path, record_property):
    """int8 equals its own matrices in floats; eight devices equal one."""
    folder = write_model(tmp_path, family)
    llm = untokenized(folder)
    ids = np.random.default_rng(7).integers(0, llm.config.vocab, 70).tolist()
    logits = prefill(Stream(llm, FULL, batch=8), [ids] * 8)

    rounded = {
        name: jax.tree.map(jnp.asarray, quantised.quantise(name, np.asarray(weight), "int8"))
        if quantised.is_matrix(name)
        else weight
        for name, weight in llm.weights.items()
    }
    floats = {name: as_floats(weight) for name, weight in rounded.items()}
    both = [prefill(Stream(replace(llm, weights=w), FULL), [ids])[0] for w in (rounded, floats)]
    int8 = float(np.abs(both[0] - both[1]).max())

    mesh = mesh_of("data=4,model=2" if llm.config.kv_heads % 2 == 0 else "data=8")
    split = untokenized(folder, mesh)
    over_devices = prefill(Stream(split, FULL, batch=8), [ids] * 8)
    devices = float(np.abs(np.array(over_devices) - np.array(logits)).max())
    record_property("family", json.dumps(llm.config.family))
    record_property("int8_difference", int8)
    record_property("devices_difference", devices)
    assert int8 < LIMIT and devices < LIMIT


def as_floats(weight):
    """A matrix, or those of experts, in float32."""
    if not isinstance(weight, quantised.Quantised):
        return weight
    dense = jax.vmap(quantised.dense) if len(weight.shape) == 3 else quantised.dense
    return dense(weight)


@pytest.mark.parity
def test_stories(stories, shared, record_property):
    llm, reference_model = models.load(stories), reference(stories)
    text = (shared / "text/tinystories/valid.txt").read_text(encoding="utf-8")[:1500]
    ids = llm.tokenizer.encode(text)[:430]
    stream = Stream(llm, FULL)
    actual = prefill(stream, [ids], chunks=(48, 1, 31, 7, *[48] * 8))[0]
    worst = float(np.abs(actual - reference_logits(reference_model, ids)).max())
    record_property("largest_logit_difference", worst)
    assert worst < LIMIT
    prompts = [ids[:n] for n in (210, 5, 77)]
    stream = Stream(llm, FULL, batch=3)
    stream.prefill(prompts, chunk=64)
    for prompt, tokens in zip(prompts, greedy(stream, NEW), strict=True):
        assert tokens == reference_greedy(reference_model, prompt, NEW)
    record_property("equal_greedy_tokens", NEW * len(prompts))


def test_recorded_reference(stories):
    """Against recorded results of transformers, without torch."""
    llm = models.load(stories)
    for case in json.loads((stories / "reference.json").read_text(encoding="utf-8"))["prompts"]:
        assert llm.tokenizer.encode(case["prompt"]) == case["ids"]
        stream = Stream(llm, FULL)
        logits = prefill(stream, [case["ids"]])[0][-1]
        np.testing.assert_allclose(logits[:16], case["logits_first16"], rtol=0, atol=LIMIT)
        assert abs(logits.astype(np.float64).sum() - case["logits_sum"]) < len(logits) * LIMIT / 10
        assert logits.argmax() == case["logits_argmax"]
        tokens = greedy(stream, len(case["greedy_ids"]))[0]
        assert tokens == case["greedy_ids"]
        assert llm.tokenizer.decode(case["ids"] + tokens) == case["greedy_text"]
