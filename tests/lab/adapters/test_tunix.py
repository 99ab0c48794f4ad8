"""Models of google-tunix with a policy: its sampler, its log probabilities and its GRPO.

The weights are random. Skipped without the extra tunix.
"""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxkv.adapters import tunix as adapter
from jaxkv.adapters.tunix import PolicyModel, with_policy
from jaxkv.errors import UserError
from jaxkv.models.generation.streams import Stream
from jaxkv.models.training.grpo import cache_config, fill_zeros, learner_log_probabilities
from jaxkv.sampling import Sampling
from jaxkv.state import batch as sequences
from tests.models.folders import FAMILIES, write_model
from tests.models.test_parity import untokenized
from tests.pages import blocks

pytest.importorskip("tunix", reason="no google-tunix: pip install -e '.[tunix]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import qwix
    from tunix.generate.sampler import Sampler
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common
    from tunix.rl import rl_cluster as rl
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

pytestmark = pytest.mark.filterwarnings("ignore")


PAD, END, VOCAB, PROMPT = 0, 127, 128, 32
FORBIDDEN = [PAD, END]
SIZES = {"num_layers": 3, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 16,
         "num_kv_heads": 2}  # fmt: skip
QWEN = SIZES | {"vocab_size": VOCAB, "norm_eps": 1e-6, "rope_theta": 1_000_000}
GEMMA3 = SIZES | {"num_layers": 7, "num_embed": VOCAB, "sliding_window_size": 12,
                  "local_base_frequency": 10_000, "global_base_frequency": 1_000_000,
                  "param_dtype": jnp.float32}  # fmt: skip
MODELS = {
    "Llama3": lambda rngs: llama3.Llama3(
        llama3.ModelConfig(**QWEN, weight_tying=True), rngs=rngs
    ),
    "Qwen2": lambda rngs: qwen2.Qwen2(
        qwen2.ModelConfig(**QWEN | {"rope_theta": 10_000}, use_tied_embedding=False), rngs=rngs
    ),
    "Qwen3": lambda rngs: qwen3.Qwen3(
        qwen3.ModelConfig(**QWEN, use_tied_embedding=True), rngs=rngs
    ),
    "Gemma3": lambda rngs: gemma3.Gemma3(gemma3.ModelConfig(**GEMMA3), rngs=rngs),
    "Gemma3 without groups": lambda rngs: gemma3.Gemma3(
        gemma3.ModelConfig(**GEMMA3 | {"num_kv_heads": 4}), rngs=rngs
    ),
}  # fmt: skip
POLICIES = ("streaming:sinks=2,window=14", "reservoir:sinks=2,window=6,sample=18",
            "balance-stream:sinks=2,window=8,levels=2,block=8", "snapkv:capacity=8,window=4",
            "h2o:heavy=8,window=12")  # fmt: skip
TEXTS = ["hello there", "x", "a longer prompt"]


class Tokenizer:
    def encode(self, text, **_):
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return END

    def pad_id(self):
        return PAD


def make(name, seed=0):
    """A model in which no matrix or bias is 0, as those of an MLP are in tunix."""
    rngs = nnx.Rngs(seed)
    model = MODELS[name](rngs)
    fill_zeros(model, rngs)
    return model


def sample(model, tokens, texts=TEXTS, prompt=PROMPT, **settings):
    sampler = Sampler(model, Tokenizer(), cache_config(model, PROMPT + tokens))
    settings = {"return_logprobs": True, "forbidden_tokens": FORBIDDEN} | settings
    return sampler(texts, max_generation_steps=tokens, max_prompt_length=prompt, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_full_attention_is_that_of_tunix(name):
    model = make(name)
    expected, actual = sample(model, 200), sample(with_policy(model, "full"), 200)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_beams_are_those_of_tunix():
    model, beams = make("Qwen3"), {"beam_size": 3, "return_logprobs": False}
    expected = sample(model, 20, **beams)
    actual = sample(with_policy(model, "full"), 20, **beams)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_a_learner_has_the_log_probabilities_of_the_sampler(name, policy):
    """Past three times the cache; with full attention a learner differs."""
    model = make(name)
    bounded = with_policy(model, policy, prompt=PROMPT)
    output = sample(bounded, 200, temperature=1.0, top_p=1.0, seed=3)
    actual = learner_log_probabilities(bounded, output, FORBIDDEN)
    np.testing.assert_allclose(actual, output.logprobs, rtol=0, atol=1e-4)
    full = learner_log_probabilities(model, output, FORBIDDEN)
    difference = np.abs(full - np.asarray(output.logprobs))
    if not policy.startswith("balance"):  # which has not evicted a tenth of the text
        assert difference.max() > 1e-3


def test_a_sequence_gets_the_same_draws_in_any_batch():
    bounded = with_policy(make("Qwen3"), "reservoir:sinks=2,window=6,sample=18", seed=5)
    text = TEXTS[2]
    together, alone = sample(bounded, 100), sample(bounded, 100, [text])
    np.testing.assert_array_equal(together.tokens[2], alone.tokens[0])
    other = with_policy(make("Qwen3"), "reservoir:sinks=2,window=6,sample=18", seed=6)
    assert not np.allclose(sample(other, 100, [text]).logprobs, alone.logprobs, atol=1e-5)


def weights_of_folder(model, llm):
    """Copy the weights of a Qwen3 of this package into one of tunix."""
    weights = llm.weights
    of_tunix = dict(nnx.to_flat_state(nnx.state(model)))

    def put(path, value, shape=None):
        value = np.asarray(value, np.float32)
        of_tunix[path][...] = jnp.asarray(value if shape is None else value.reshape(shape))

    put(("embedder", "input_embedding"), weights["embed"])
    put(("final_norm", "w"), weights["norm"])
    put(("lm_head", "w"), weights["head"].T)
    for layer in range(llm.config.layers):
        ours, theirs = f"layers.{layer}.", ("layers", layer)
        for part in "qkv":
            path = (*theirs, "attn", f"{part}_proj", "w")
            put(path, weights[f"{ours}{part}"].T, of_tunix[path].shape)
        path = (*theirs, "attn", "o_proj", "w")
        put(path, weights[f"{ours}o"].T, of_tunix[path].shape)
        for norm, name in (
            ("attn_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            put((*theirs, name, "w"), weights[f"{ours}{norm}"])
        for norm in ("q_norm", "k_norm"):
            put((*theirs, "attn", norm, "w"), weights[f"{ours}{norm}"])
        for part in ("gate", "up", "down"):
            put((*theirs, "mlp", f"{part}_proj", "kernel"), weights[f"{ours}{part}"].T)


@pytest.mark.parametrize("name", MODELS)
def test_the_group_is_that_of_the_model(name):
    layer = with_policy(make(name), "full").layers[0].attn.policy_layer
    assert layer.spec.group * layer.spec.kv_heads == 4


@pytest.mark.parametrize(
    "policy", [*POLICIES[:2], "snapkv:capacity=8,window=4", "tova:capacity=16"]
)
def test_5000_tokens_are_those_of_this_decoder(policy, tmp_path):
    """In a cache whose bytes do not depend on the tokens, but under snapkv."""
    folder = write_model(tmp_path, FAMILIES["qwen3"] | {"head_dim": 16, "vocab_size": VOCAB})
    llm = untokenized(folder)
    config = qwen3.ModelConfig(**QWEN | {"norm_eps": 1e-5}, use_tied_embedding=False)
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    # The logit of padding lies between those of two tokens, so that no text has padding.
    head = np.asarray(llm.weights["head"]).copy()
    head[PAD] = (head[3] + head[4]) / 2
    llm = dataclasses.replace(llm, weights=llm.weights | {"head": jnp.asarray(head)})
    weights_of_folder(model, llm)
    bounded, ids = with_policy(model, policy, seed=7), [1, *Tokenizer().encode(TEXTS[0])]
    grows = any(layer.attn.policy_layer.policy.grows for layer in bounded.layers)
    count = 200 if grows else 5000
    actual = sample(bounded, count, TEXTS[:1], forbidden_tokens=None, eos_tokens=[VOCAB])
    stream = Stream(llm, policy, seed=7, tokens=len(ids) + count)
    stream.prefill([ids])
    stream.finish_prefill()
    expected = np.concatenate(
        list(stream.decode_blocks(Sampling(temperature=0.0), count, ())), axis=1
    )
    np.testing.assert_array_equal(actual.tokens[0], expected[0])
    sizes = {sequences.nbytes(bounded.init_cache(1, size, jnp.float32)) for size in (64, 8000)}
    assert grows or len(sizes) == 1


@pytest.mark.parametrize("policy", ["snapkv:capacity=8,window=4,start=16", "magicpig:start=16"])
def test_a_prompt_of_one_token_is_a_prompt(policy):
    output = sample(with_policy(make("Qwen3"), policy), 60, ["x"], prompt=1)
    assert np.isfinite(np.asarray(output.logprobs)).all()


def test_gradients_are_those_of_finite_differences():
    model = with_policy(make("Llama3"), "streaming:sinks=1,window=3")
    ids = jnp.asarray(np.random.default_rng(0).integers(1, END, (2, 12)))
    mask = common.make_causal_attn_mask(jnp.ones(ids.shape, bool))
    positions = jnp.arange(12)[None].repeat(2, 0)
    graph, state = nnx.split(model)

    def loss(state):
        logits, _ = nnx.merge(graph, state)(ids, positions, None, mask)
        return jnp.mean(jax.nn.log_softmax(logits)[:, :, 5])

    gradients = jax.jit(jax.grad(loss))(state)
    loss = jax.jit(loss)
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        # The gradient of this matrix alone, so that a missing part of another hides nothing.
        name = f"'{part}'"
        direction = jax.tree_util.tree_map_with_path(
            lambda path, g, name=name: g * (name in jax.tree_util.keystr(path)), gradients
        )
        size = optax.global_norm(direction)
        move = lambda by, d=direction, n=size: jax.tree.map(lambda w, g: w + by * g / n, state, d)
        slope = (loss(move(2e-3)) - loss(move(-2e-3))) / 4e-3
        assert size > 4e-3
        np.testing.assert_allclose(slope, size, rtol=1e-2, atol=4e-4)  # the rounding of a loss


def test_lora_before_and_after():
    model = make("Qwen3")
    provider = qwix.LoraProvider(module_path=".*_proj", rank=4, alpha=2.0)

    def with_lora(model):
        model = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
        rng = np.random.default_rng(0)
        for _, weight in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
            weight[...] = jnp.asarray(0.1 * rng.normal(size=weight[...].shape), weight[...].dtype)
        return model

    before, after = with_policy(with_lora(model), "full"), with_lora(with_policy(model, "full"))
    expected = sample(with_lora(make("Qwen3")), 30).tokens
    assert not np.array_equal(expected, sample(make("Qwen3"), 30).tokens)
    for bounded in (before, after):
        assert isinstance(bounded, PolicyModel)
        assert jax.tree.leaves(nnx.state(bounded, nnx.LoRAParam))
        np.testing.assert_array_equal(sample(bounded, 30).tokens, expected)


def test_grpo_trains_a_bounded_model():
    actor, reference = (
        with_policy(make("Qwen3"), "streaming:sinks=2,window=6", prompt=16) for _ in range(2)
    )
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT
    cluster = rl.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Tokenizer(),
        cluster_config=rl.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3), eval_every_n_steps=100, max_steps=2
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=24, max_prompt_length=16, kv_cache_size=64, temperature=1.0
            ),
        ),
    )
    before = jax.tree.map(jnp.copy, nnx.state(actor, nnx.Param))
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: [text.count("5") for text in completions],
        algo_config=GRPOConfig(num_generations=4),
    )
    learner.train([{"prompts": np.array(["ab", "cdef"])} for _ in range(2)])
    after = nnx.state(cluster.actor_trainer.model, nnx.Param)
    before, after = (dict(nnx.to_flat_state(state)) for state in (before, after))
    changes = {path: np.abs(after[path][...] - before[path][...]).max() for path in before}
    assert not {path: change for path, change in changes.items() if not 0 < change < 1}


def test_the_example_of_the_page_runs():
    code = next(code for code in blocks("docs/adapters.md", "python") if "tunix" in code)
    names = {"model": make("Qwen3"), "max_prompt_length": PROMPT}
    exec(compile(code, "adapters", "exec"), names)
    assert isinstance(names["model"], PolicyModel)


def test_bad_input(monkeypatch):
    model = make("Qwen3")
    with pytest.raises(UserError, match="are Llama3, Qwen2, Qwen3, Gemma3, got"):
        with_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "full")
    with pytest.raises(UserError, match="has a policy already"):
        with_policy(with_policy(model, "full"), "full")
    with pytest.raises(UserError, match="prompt must be"):
        with_policy(model, "full", prompt=0)
    with pytest.raises(UserError, match="unknown policy"):
        with_policy(model, "steaming")
    ids = jnp.ones((1, 4), jnp.int32)
    mask = common.make_causal_attn_mask(jnp.ones(ids.shape, bool))
    compressing, bounded = with_policy(model, "snapkv"), with_policy(model, "streaming")
    with pytest.raises(UserError, match="the number of its tokens as prompt="):
        compressing(ids, jnp.arange(4)[None], None, mask)
    with pytest.raises(
        UserError, match=f"prompt=8 was given to with_policy, got a prompt of {PROMPT}"
    ):
        sample(with_policy(model, "snapkv:capacity=8,window=4", prompt=8), 4)
    with pytest.raises(UserError, match="give a causal attention_mask"):
        bounded(ids, jnp.arange(4)[None], None, jnp.ones((1, 4, 4), bool))
    with pytest.raises(UserError, match="give a causal attention_mask"):
        bounded(ids, jnp.arange(4)[None], None, None)
    with pytest.raises(UserError, match="turn packing off"):
        bounded(ids, jnp.arange(4)[None], None, None, segment_ids=ids)
    with pytest.raises(UserError, match="cache is of a model without a policy"):
        bounded(ids, jnp.arange(4)[None], model.init_cache(1, 4, jnp.float32), mask)
    monkeypatch.setattr(adapter, "VERSION", "0.0.9")
    with pytest.raises(UserError, match=r"tried in google-tunix 0\.0\.9, got 0\.1\.7"):
        with_policy(model, "full")


def test_the_memory_of_training_grows_in_proportion_to_the_text():
    """And that of tunix's own attention with its square."""

    def temporary_bytes(model, tokens):
        graph, state = nnx.split(model)

        def loss(state, ids, mask):
            logits, _ = nnx.merge(graph, state)(ids, jnp.arange(tokens)[None], None, mask)
            return jnp.mean(jax.nn.log_softmax(logits)[:, :, 5])

        shapes = (
            jax.ShapeDtypeStruct((1, tokens), jnp.int32),
            jax.ShapeDtypeStruct((1, tokens, tokens), bool),
        )
        compiled = jax.jit(jax.grad(loss)).lower(state, *shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    model = make("Qwen3")
    bounded = with_policy(model, "streaming:sinks=4,window=124")
    growth = {
        name: temporary_bytes(kind, 4096) / temporary_bytes(kind, 2048)
        for name, kind in (("bounded", bounded), ("tunix", model))
    }
    assert growth["bounded"] < 2.4
    assert growth["tunix"] > 3.5
