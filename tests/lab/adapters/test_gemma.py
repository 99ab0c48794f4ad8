"""Models of gemma with a policy: its samplers, chats without an end, and its model in training.

The weights are random. Skipped without the extra gemma.
"""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gemma", reason="no gemma: pip install -e '.[gemma]'")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # gemma imports TensorFlow
from gemma import gm
from gemma.gm.nn import _config, _modules, _transformer
from gemma.gm.text import _tokenizer

from jaxkv.adapters import gemma as adapter
from jaxkv.adapters.gemma import ChatSampler, next_turn, with_policy
from jaxkv.errors import UserError
from jaxkv.models.generation.streams import Stream
from jaxkv.sampling import Sampling
from jaxkv.state import batch as sequences
from tests.models.folders import FAMILIES, write_model
from tests.models.test_parity import untokenized
from tests.pages import blocks

pytestmark = pytest.mark.filterwarnings("ignore")

LOCAL, GLOBAL = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
PAD, EOS, BOS, END, VOCAB = 0, 1, 2, 106, 128
GEMMA3 = _config.TransformerConfig(
    num_embed=VOCAB, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
    final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True,
    attention_types=(LOCAL, GLOBAL, LOCAL, GLOBAL), sliding_window_size=12, use_qk_norm=True,
    global_base_frequency=1_000_000, global_scale_factor=8.0,
)  # fmt: skip
CONFIGS = {
    "Gemma 3": GEMMA3,
    "Gemma 2": dataclasses.replace(
        GEMMA3, use_qk_norm=False, final_logit_softcap=30.0, attn_logits_soft_cap=5.0,
        global_base_frequency=10_000, global_scale_factor=1.0, num_kv_heads=4,
        query_pre_attn_norm=(
            _config.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
        ),
    ),
    "one KV head": dataclasses.replace(GEMMA3, num_kv_heads=1),
}  # fmt: skip
POLICIES = ("streaming:sinks=2,window=14", "reservoir:sinks=2,window=6,sample=18",
            "h2o:heavy=8,window=12")  # fmt: skip
GREEDY, DRAWN = gm.text.Greedy(), gm.text.RandomSampling(temperature=1.0)
ENDS = (EOS, END, 50)
TEXTS = ["hello there", "x", "a longer prompt"]


class Tokens:
    PAD, EOS, BOS, END_OF_TURN, BEGIN_OF_TOOL_RESPONSE = PAD, EOS, BOS, END, 50
    START_OF_IMAGE = IMAGE_PLACEHOLDER = END_OF_IMAGE = VOCAB + 1


class NoEnds(Tokens):
    EOS = END_OF_TURN = BEGIN_OF_TOOL_RESPONSE = VOCAB + 1


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A token for each letter. gemma's own reads a file of vocabulary."""

    special_tokens: type = Tokens
    VERSION, FORBIDDEN_TOKENS = 0, (PAD,)
    FORMAT = _tokenizer.Gemma3Tokenizer.FORMAT

    def encode(self, text, *, add_bos=False):
        return [BOS] * add_bos + [3 + ord(letter) % 100 for letter in text]

    def decode(self, ids):
        return "".join(chr(256 + token) for token in np.atleast_1d(np.asarray(ids)) if token)


class TinyGemma(_transformer.Transformer):
    config: _config.TransformerConfig = GEMMA3


def make(name="Gemma 3", seed=0):
    """A model, and weights with which answers at temperature 1 vary."""
    model = TinyGemma(config=CONFIGS[name], dtype=jnp.float32)
    weights = model.init(jax.random.key(seed), jnp.ones((1, 4), jnp.int32))["params"]
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(weights))))
    return model, jax.tree.map(
        lambda leaf: 0.4 * jax.random.normal(next(keys), leaf.shape), weights
    )


def sampler(model, weights, kind=gm.text.Sampler, **settings):
    defaults = {"cache_length": 512, "max_out_length": 200, "pad_length": 64}
    return kind(model=model, params=weights, **defaults | {"tokenizer": Tokenizer()} | settings)


def answer(model, weights, texts=TEXTS, sampling=DRAWN, forbidden=(), **settings):
    speaker = sampler(model, weights, forbidden_tokens=forbidden)
    return speaker.sample(texts, return_state=True, sampling=sampling, rng=0, **settings)


def by_forward(model, weights, ids, count, sampling=GREEDY, seed=0, ends=ENDS):
    """The tokens that gemma's model without a cache gives after some."""
    forward = jax.jit(lambda tokens: model.apply({"params": weights}, tokens).logits)
    tokens, key = np.zeros((1, 320), np.int32), jax.random.key(seed)
    tokens[0, : len(ids)] = ids
    for place in range(len(ids), len(ids) + count):
        key, rng = jax.random.split(key)
        logits = forward(jnp.asarray(tokens))[:, place - 1].at[:, PAD].set(-jnp.inf)
        tokens[0, place] = sampling.get_next_tokens(logits, rng)[0]
        if tokens[0, place] in ends:
            break
    return tokens[0, len(ids) : place + 1].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_full_attention_is_that_of_gemma(name):
    """In a batch whose sequences end at different tokens."""
    model, weights = make(name)
    expected, actual = answer(model, weights), answer(with_policy(model, "full"), weights)
    lengths = np.count_nonzero(np.asarray(expected.tokens), axis=1)
    assert len(set(lengths.tolist())) > 1
    np.testing.assert_array_equal(actual.tokens, expected.tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_without_a_cache_is_that_of_gemma(name):
    model, weights = make(name)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 40))
    ids[1, 30:] = PAD
    expected, actual = (
        kind.apply({"params": weights}, jnp.asarray(ids)).logits
        for kind in (model, with_policy(model, "full"))
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(actual[1, :30], expected[1, :30], rtol=1e-4, atol=1e-4)


def drawn_by(model, weights, text, start, seed=0):
    """The tokens that DRAWN draws from `start` on, with the logits of a text without a cache."""
    logits = model.apply({"params": weights}, jnp.asarray(text[None])).logits[0]
    logits, key, tokens = logits.at[:, [PAD, *ENDS]].set(-jnp.inf), jax.random.key(seed), []
    for place in range(start, len(text)):
        key, rng = jax.random.split(key)
        tokens.append(int(DRAWN.get_next_tokens(logits[None, place - 1], rng)[0]))
    return tokens


@pytest.mark.parametrize("policy", [*POLICIES, "snapkv:capacity=8,window=4"])
def test_a_text_without_a_cache_is_that_of_the_sampler(policy):
    """Past three times the cache. With full attention, or another prompt, it is another text."""
    model, weights = make()
    ids = [BOS, *Tokenizer().encode(TEXTS[2])]
    compresses = policy.startswith("snapkv")
    adapted = lambda prompt: with_policy(model, policy, prompt=prompt if compresses else None)
    out = answer(adapted(len(ids)), weights, TEXTS[2:], DRAWN, ENDS, max_new_tokens=120)
    text = np.concatenate([ids, np.asarray(out.tokens)[0, :120]])
    expected = text[len(ids) :].tolist()
    assert len(set(expected)) > 10
    assert drawn_by(adapted(len(ids)), weights, text, len(ids)) == expected
    others = [with_policy(model, "full")] + [adapted(len(ids) - 4)] * compresses
    for other in others:
        assert drawn_by(other, weights, text, len(ids)) != expected


def test_a_sequence_gets_the_same_draws_in_any_batch():
    """Of the policy: a sampler of gemma draws the tokens of a batch together."""
    model, weights = make()
    ids = np.random.default_rng(0).integers(3, VOCAB, (3, 90))
    logits = lambda seed, rows: (
        with_policy(model, POLICIES[1], seed=seed)
        .apply({"params": weights}, jnp.asarray(ids[rows]))
        .logits
    )
    together, alone = logits(5, [0, 1, 2])[2], logits(5, [2])[0]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(logits(6, [2])[0] - alone)).max() > 0.1


def test_a_chat_attends_to_every_token_of_its_text():
    """The newest token of a turn too, which gemma's own chat leaves out."""
    model, weights = make()
    turns, ids, expected = ["hello", "why", "well"], [], []
    chat = sampler(with_policy(model, "full"), weights, ChatSampler, multi_turn=True)
    of_gemma = sampler(model, weights, gm.text.ChatSampler, multi_turn=True)
    answers = {"jaxkv": [], "gemma": []}
    for number, turn in enumerate(turns):
        for name, speaker in (("jaxkv", chat), ("gemma", of_gemma)):
            answers[name].append(speaker.chat(turn, max_new_tokens=20, sampling=DRAWN, rng=number))
        prompt = chat.turns[-2].text
        ids += Tokenizer().encode(prompt, add_bos=number == 0)
        expected.append(by_forward(model, weights, ids, 20, DRAWN, number))
        ids += expected[-1]
    texts = [Tokenizer().decode(tokens) for tokens in expected]
    assert answers["jaxkv"] == texts
    assert answers["gemma"][0] == texts[0]
    assert answers["gemma"] != texts


def weights_of_gemma(llm):
    """The weights of a Gemma of this package as gemma's."""
    weights, config = llm.weights, llm.config
    heads = lambda name, count: weights[name].T.reshape(config.width, count, config.head_dim)
    tree = {
        "embedder": {"input_embedding": weights["embed"]},
        "final_norm": {"scale": weights["norm"]},
    }
    norms = {"pre_attention_norm": "attn_norm", "post_attention_norm": "attn_post_norm",
             "pre_ffw_norm": "mlp_norm", "post_ffw_norm": "mlp_post_norm"}  # fmt: skip
    for number in range(config.layers):
        name = f"layers.{number}."
        q, k, v = (
            heads(name + part, count).transpose(1, 0, 2)
            for part, count in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
        )
        out = weights[name + "o"].T.reshape(config.heads, config.head_dim, config.width)
        attn = {"q_einsum": {"w": q}, "kv_einsum": {"w": jnp.stack([k, v])},
                "attn_vec_einsum": {"w": out}}  # fmt: skip
        if config.qk_norm != "none":
            attn["_query_norm"] = {"scale": weights[name + "q_norm"]}
            attn["_key_norm"] = {"scale": weights[name + "k_norm"]}
        gates = jnp.stack([weights[name + "gate"].T, weights[name + "up"].T])
        mlp = {"gating_einsum": gates, "linear": weights[name + "down"].T}
        tree[f"layer_{number}"] = {"attn": attn, "mlp": mlp} | {
            of_gemma: {"scale": weights[name + norm]} for of_gemma, norm in norms.items()
        }
    return tree


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES[:2])
def test_3000_tokens_are_those_of_this_decoder(family, policy, tmp_path):
    """With a cache_length of 64, in a cache whose bytes do not depend on the tokens."""
    fields = {"vocab_size": VOCAB, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-6}
    llm = untokenized(write_model(tmp_path, FAMILIES[family] | fields))
    # The logit of padding lies between those of two tokens, so that no text has padding.
    embed = np.asarray(llm.weights["embed"]).copy()
    embed[PAD] = (embed[3] + embed[4]) / 2
    llm = dataclasses.replace(llm, weights=llm.weights | {"embed": jnp.asarray(embed)})
    config, kinds = llm.config, {True: GLOBAL, False: LOCAL}
    bases = {"gemma2": (10_000, 10_000), "gemma3": (1_000, 100_000)}[family]
    model = TinyGemma(
        dtype=jnp.float32,
        config=dataclasses.replace(
            GEMMA3, embed_dim=config.width, hidden_dim=config.mlp, head_dim=config.head_dim,
            attention_types=tuple(kinds[window is None] for window in config.windows),
            sliding_window_size=24, use_qk_norm=config.qk_norm != "none",
            attn_logits_soft_cap=config.softcap, final_logit_softcap=config.logit_softcap,
            local_base_frequency=bases[0], global_base_frequency=bases[1],
            global_scale_factor=1.0,
        ),
    )  # fmt: skip
    bounded, ids = with_policy(model, policy, seed=7), Tokenizer().encode(TEXTS[0], add_bos=True)
    settings = {"cache_length": 64, "max_out_length": 3000, "tokenizer": Tokenizer(NoEnds)}
    speaker = sampler(bounded, weights_of_gemma(llm), **settings)
    out = speaker.sample(TEXTS[:1], return_state=True)
    actual = np.asarray(out.tokens)[0]
    stream = Stream(llm, policy, seed=7, tokens=len(ids) + 3000)
    stream.prefill([ids])
    expected = np.concatenate(
        list(stream.decode_blocks(Sampling(temperature=0.0), 3000, ())), axis=1
    )[0]
    np.testing.assert_array_equal(actual, expected)
    sizes = [
        sequences.nbytes(bounded.init_cache(batch_size=1, dtype=jnp.float32, cache_length=length))
        for length in (64, 8000)
    ]
    assert sizes[0] == sizes[1]


def test_a_chat_of_20000_tokens_has_a_cache_of_constant_size():
    """With a cache_length of 512; gemma's own ends within it."""
    model, weights = make()
    settings = {"multi_turn": True, "max_out_length": 300}
    chat = sampler(with_policy(model, POLICIES[0]), weights, ChatSampler, **settings)
    sizes, tokens, turns = set(), 0, 0
    while tokens < 20_000:
        chat.chat("and then what " * 10, rng=turns, sampling=DRAWN)
        turns += 1
        caches = chat.last_state.cache
        sizes.add(sequences.nbytes(caches))
        tokens = int(caches["layer_0"]["k"].count[0])
    assert len(sizes) == 1
    of_gemma = sampler(model, weights, gm.text.ChatSampler, **settings)
    with pytest.raises(TypeError, match="incompatible shapes"):
        for number in range(20):
            of_gemma.chat("and then what " * 10, rng=number)


def test_turns_of_a_batch_attend_to_their_own_texts():
    """Sequences end at different tokens; the end of each comes before its next prompt."""
    model, weights = make()
    stop = by_forward(model, weights, [BOS, *Tokenizer().encode(TEXTS[0])], 3)[-1]
    speaker = sampler(with_policy(model, "full"), weights, stop_tokens=[stop])
    texts, state, lengths = [[] for _ in TEXTS], None, set()
    for number, turn in enumerate((TEXTS, ["and so", "go", "what then"])):
        out = speaker.sample(
            turn, return_state=True, sampling=GREEDY, last_state=state, max_new_tokens=12
        )
        state = next_turn(out.state)
        for text, prompt, tokens in zip(texts, turn, np.asarray(out.tokens), strict=True):
            text += Tokenizer().encode(prompt, add_bos=number == 0)
            expected = by_forward(model, weights, text, 12, ends=(*ENDS, stop))
            assert tokens[tokens > 0].tolist() == expected
            text += expected
            lengths.add((number, len(expected)))
    assert len(lengths) > 2


def test_lora_around_a_policy():
    model, _ = make()
    plain, bounded = (gm.nn.LoRA(rank=2, model=kind, dtype=jnp.float32)
                      for kind in (model, with_policy(model, "full")))  # fmt: skip
    ids = jnp.asarray(np.random.default_rng(0).integers(3, VOCAB, (1, 12)))
    weights = plain.init(jax.random.key(0), ids)["params"]
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(weights))))
    weights = jax.tree.map(lambda a: 0.3 * jax.random.normal(next(keys), a.shape), weights)
    assert any(
        "lora" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(weights)
    )
    expected, actual = (kind.apply({"params": weights}, ids).logits for kind in (plain, bounded))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    expected, actual = (answer(kind, weights).tokens for kind in (plain, bounded))
    np.testing.assert_array_equal(actual, expected)


def test_a_streamed_chat_prints_its_answer(capsys):
    model, weights = make()
    chat = sampler(with_policy(model, POLICIES[0]), weights, ChatSampler, multi_turn=True)
    streamed = [chat.chat(text, print_stream=True, max_new_tokens=9) for text in TEXTS]
    assert capsys.readouterr().out
    chat = sampler(with_policy(model, POLICIES[0]), weights, ChatSampler, multi_turn=True)
    for text, printed in zip(TEXTS, streamed, strict=True):
        assert chat.chat(text, max_new_tokens=9) == printed


def test_the_gradient_passes_the_policy():
    """Of finite differences, along the gradient of one weight at a time."""
    model, weights = make()
    bounded = with_policy(model, "streaming:sinks=1,window=3")
    ids = jnp.asarray(np.random.default_rng(0).integers(3, VOCAB, (2, 12)))

    @jax.jit
    def loss(weights):
        logits = bounded.apply({"params": weights}, ids).logits
        return jnp.mean(jax.nn.log_softmax(logits)[:, :, 5])

    gradients = jax.grad(loss)(weights)["layer_1"]["attn"]
    for name in ("q_einsum", "kv_einsum", "attn_vec_einsum"):
        direction = gradients[name]["w"]
        size = jnp.linalg.norm(direction.ravel())
        moved = []
        for step in (2e-3, -2e-3):
            changed = jax.tree.map(lambda leaf: leaf, weights)
            changed["layer_1"]["attn"][name]["w"] += step * direction / size
            moved.append(loss(changed))
        np.testing.assert_allclose((moved[0] - moved[1]) / 4e-3, size, rtol=2e-2, atol=4e-4)


def test_the_example_of_the_page_runs():
    code = next(code for code in blocks("docs/adapters.md", "python") if "gemma" in code)
    model, weights = make()
    settings = {"tokenizer": Tokenizer(), "cache_length": 512}
    names = {"model": model, "params": weights, "settings": settings}
    exec(compile(code.replace("params=params", "params=params, **settings"), "page", "exec"), names)
    assert names["chat"].turns


def test_bad_input(monkeypatch):
    model, weights = make()
    bounded = with_policy(model, "streaming")
    ids = jnp.ones((1, 4), jnp.int32)
    apply = lambda **inputs: bounded.apply({"params": weights}, ids, **inputs)
    with pytest.raises(UserError, match="are those of Gemma 2 and 3, got Dense"):
        with_policy(_modules.nn.Dense(2), "full")
    with pytest.raises(UserError, match="are those of Gemma 2 and 3, got Gemma3n_E2B"):
        with_policy(gm.nn.Gemma3n_E2B(), "full")
    with pytest.raises(UserError, match="has a policy already"):
        with_policy(bounded, "full")
    with pytest.raises(UserError, match="a string or an object, got None"):
        with_policy(model, None)
    with pytest.raises(UserError, match="cache_length=16 tokens, got"):
        sampler(bounded, weights, cache_length=16).sample("a" * 30)
    with pytest.raises(UserError, match="state is of a model without a policy"):
        next_turn(answer(model, weights, max_new_tokens=2).state)
    with pytest.raises(UserError, match="prompt must be"):
        with_policy(model, "full", prompt=0)
    with pytest.raises(UserError, match="unknown policy"):
        with_policy(model, "steaming")
    with pytest.raises(UserError, match="the number of its tokens as prompt="):
        with_policy(model, "snapkv").apply({"params": weights}, ids)
    with pytest.raises(UserError, match="reads text"):
        apply(images=jnp.zeros((1, 1, 8, 8, 3), jnp.uint8))
    with pytest.raises(UserError, match="leave positions and attention_mask out"):
        apply(attention_mask=jnp.ones((1, 4, 4), bool))
    sizes = {"batch_size": 1, "dtype": jnp.float32, "cache_length": 8}
    with pytest.raises(UserError, match="got another attention_mask; leave it out"):
        apply(cache=bounded.init_cache(batch_size=1, dtype=jnp.float32, cache_length=8),
              attention_mask=jnp.ones((1, 4, 4), bool))  # fmt: skip
    with pytest.raises(UserError, match="give with_policy the model inside"):
        with_policy(gm.nn.LoRA(rank=2, model=model), "full")
    with pytest.raises(UserError, match="cache is of a model without a policy"):
        apply(cache=model.init_cache(**sizes))
    with pytest.raises(UserError, match="leave sharding out"):
        bounded.init_cache(**sizes, sharding="data")
    out = answer(bounded, weights, max_new_tokens=3)
    with pytest.raises(UserError, match=r"last_state=next_turn\(state\)"):
        sampler(bounded, weights).sample(TEXTS, last_state=out.state)
    chat = sampler(with_policy(model, "full"), weights, ChatSampler, cache_length=100)
    chat.chat("a" * 30, max_new_tokens=3)
    with pytest.raises(UserError, match="Full grows and has room for 100 tokens, got"):
        chat.chat("a" * 30, max_new_tokens=3, multi_turn=True)
    monkeypatch.setattr(adapter, "VERSION", "3.0.0")
    with pytest.raises(UserError, match=r"tried in gemma 3\.0\.0, got 4\.0\.1"):
        with_policy(model, "full")
