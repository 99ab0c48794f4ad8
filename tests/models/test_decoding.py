"""The compiled decode loop: compiled once, no copies of the cache, constant memory."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.evals.lib.ahead import shapes_of_decoding
from jaxkv.evals.lib.hlo import copies_in_loops
from jaxkv.models.generation.decoding import BLOCK, Static, compiled_decode_block
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import spec_of
from jaxkv.policy_spec import by_layer
from jaxkv.sampling import Sampling
from tests.models.folders import FAMILIES, write_json
from tests.seldom import seldom

SMALL = "streaming:sinks=2,window=14"
WARM = Sampling(temperature=0.9, top_k=50)
SHAPES = {  # of stories260K and of a model of 110 M parameters, with fewer layers
    "260K": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 172}
    | {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4},
    "110M": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
    | {"num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 12},
}


class Compiles:
    """Counts compilations by XLA inside a `with` block."""

    def __enter__(self):
        self.count, self.on = 0, True
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration: float, **_) -> None:
        self.count += self.on and event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        self.on = False  # jax has no public way to remove a listener


def lowered(config: Config, policy: str, batch: int):
    """The decode block lowered for shapes only, and the shapes of its states."""
    policies, spec = by_layer(policy, config.layers, config.windows), spec_of(config, "float32")
    arg = jax.ShapeDtypeStruct
    weights = {name: arg(shape, jnp.float32) for name, (_, shape) in shapes(config).items()}
    states = jax.eval_shape(lambda: tuple(prefilled(policy, spec, batch) for policy in policies))
    decoding = shapes_of_decoding(config, states, batch)
    static, settings = Static(config, policies, None), Sampling()
    args = (static, settings.filters, (1,), weights, decoding, settings.knobs, np.int32(1))
    return compiled_decode_block().lower(*args), states


def prefilled(policy, spec, batch):
    """An empty state with slots for 5,000 tokens, its prefill finished."""
    state = policy.init(spec, batch, jax.random.key(0))
    return policy.finish_prefill(spec, policy.reserve(spec, state, 5000))


PLAIN = ("streaming", "window", "full")
LOOPS = [
    *itertools.product(SHAPES, (1, 8), PLAIN),
    *itertools.product(list(SHAPES)[-1:], (1, 8), ("reservoir", "balance-stream")),
    (list(SHAPES)[-1], 1, "streaming:storage=int8"),
    *(seldom(list(SHAPES)[-1], 8, f"{policy}:storage=int8") for policy in (*PLAIN, "reservoir")),
    *(seldom(list(SHAPES)[-1], 8, policy) for policy in ("stratified", "h2o")),
    *(seldom(list(SHAPES)[-1], batch, "magicpig:K=4,L=20") for batch in (1, 8)),
]  # fmt: skip


def largest_part(policy: str, batch: int) -> float:
    """The part of the caches that a loop may need as temporary memory.

    Halving and re-rotation need some. For balance-stream with jax 0.7.2 it is 0.57 of the cache,
    0.62 for one sequence, and less with later versions. The rotated keys of a sample in int8 are
    floats. jax before 0.12 also makes float copies of one layer in int8.
    """
    if policy.partition(":")[0] in PLAIN:
        return 2.4 if "int8" in policy and jax.__version_info__ < (0, 12) else 0.25
    if "int8" in policy:
        return 1
    return 0.65 if batch == 1 else 0.6


@pytest.mark.parametrize("size, batch, policy", LOOPS)
def test_the_loop_copies_no_cache(size, batch, policy, tmp_path):
    write_json(tmp_path / "config.json", FAMILIES["llama2"] | SHAPES[size])
    program, states = lowered(read_config(tmp_path), policy, batch)
    compiled = program.compile()
    of_tokens = [leaf for leaf in jax.tree.leaves(states) if leaf.ndim >= 4]
    copies = copies_in_loops(compiled.as_text(), {leaf.size for leaf in of_tokens})
    if "int8" in policy:  # Sinks are few, and logits have the size of scales.
        copies = [line for line in copies if re.search(r"= \(?s8\[", line)]
    if "int8" not in policy or jax.__version_info__ >= (0, 12):
        assert copies == []
    # Donated: outputs reuse the buffers of the caches.
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in of_tokens)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < caches * largest_part(policy, batch)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 copies int8 caches")
def test_the_loop_copies_no_scales(tmp_path):
    """Three query heads per KV head and 1,024 slots, as the scales are copied for some shapes."""
    heads = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    write_json(tmp_path / "config.json", FAMILIES["llama2"] | SHAPES["110M"] | heads)
    program, states = lowered(read_config(tmp_path), "streaming:window=1020,storage=int8", 1)
    sizes = {state.k.scale.size for state in states}
    copies = copies_in_loops(program.compile().as_text(), sizes)
    assert [line for line in copies if re.search(r"= \(?bf16\[", line)] == []


def test_decoding_compiles_once(tiny):
    """Limits, positions, seeds and values of settings do not cause another compilation."""
    before = compiled_decode_block()._cache_size()
    static = Stream(tiny, "streaming:sinks=1,window=9")
    static.prefill([[65] * 8])
    static.decode(WARM, 3, (1,))
    assert compiled_decode_block()._cache_size() == before + 1
    with Compiles() as compiles:
        for limit in (1, 7, BLOCK, BLOCK, 100):
            static.decode(WARM, limit, (1,))
        static.decode(Sampling(temperature=2.0, top_k=3), 20, (1,))
        again = Stream(tiny, "streaming:sinks=1,window=9", seed=5)
        again.prefill([[70] * 11])
        again.decode(WARM, 300, (1,))
    assert compiles.count == 0 and compiled_decode_block()._cache_size() == before + 1
    with Compiles() as compiles:
        jax.jit(lambda x: x * 3)(np.ones(3, np.float32))
    assert compiles.count == 1, "the counter must count a compilation"


def test_caches_are_donated(tiny):
    stream = Stream(tiny, SMALL)
    for call in (lambda: stream.prefill([[65] * 9], 16), lambda: stream.decode(WARM, 20, ())):
        old = [leaf for state in stream.decoding.states for leaf in (state.k, state.v)]
        places = [leaf.unsafe_buffer_pointer() for leaf in old]
        call()
        new = [leaf for state in stream.decoding.states for leaf in (state.k, state.v)]
        assert all(leaf.is_deleted() for leaf in old)
    assert sorted(places) == sorted(leaf.unsafe_buffer_pointer() for leaf in new)


def test_a_finished_sequence_does_not_change(tiny):
    stream = Stream(tiny, SMALL, batch=2)
    stream.prefill([[65] * 9, [66] * 30], 16)
    stream.decode(WARM, 30, ())
    for call in (
        lambda: stream.prefill([[67] * 20, []], 16),
        lambda: stream.decode(WARM, 30, ()),
    ):
        before = jax.device_get(stream.decoding)
        block = call()
        after = jax.device_get(stream.decoding)
        if block is None:  # after the prefill, mark sequence 1 as done
            stream.decoding = stream.decoding._replace(done=jnp.asarray([False, True]))
        else:
            assert (block[0][0] >= 0).all() and (block[0][1] == -1).all()
            # The logits of a finished sequence are not used.
            before, after = (d._replace(logits=0) for d in (before, after))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if np.ndim(old):
                np.testing.assert_array_equal(old[1], new[1])
        assert (after.states[0].k[0] != before.states[0].k[0]).any()


def test_memory_is_constant_over_twenty_thousand_tokens(tiny):
    stream = Stream(tiny, SMALL)
    stream.prefill([[65] * 9], 16)
    memory = []
    for _ in range(20_000 // BLOCK + 1):
        stream.decode(WARM, BLOCK, ())
        memory.append((sorted(a.nbytes for a in jax.live_arrays()), stream.state_bytes))
    assert int(stream.decoding.position[0]) > 20_000
    assert memory[-1] == memory[0]
    assert np.isfinite(np.asarray(stream.decoding.logits)).all()


@pytest.mark.parametrize(
    "policy",
    [SMALL, "1=full:start=64;*=streaming:sinks=2,window=14,storage=int8",
     "reservoir:sinks=2,window=6,sample=8", "snapkv:capacity=20,window=4,start=64"],
)  # fmt: skip
def test_arrays_that_layers_share_may_be_carried_once(llm, policy):
    """Tokens and states are the same bits, and every layer has arrays of its own afterwards."""
    results = []
    for once in (True, False):
        stream = Stream(llm, policy, batch=2, seed=3)
        stream.static = stream.static._replace(shared_once=once)
        stream.prefill([[*range(2, 40)], [*range(5, 35)]], chunk=16)  # shorter ones give a warning
        stream.finish_prefill()
        tokens, _ = stream.decode(WARM, 30, ())
        buffers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(stream.decoding) if a.size]
        assert len(buffers) == len(set(buffers))
        results.append((tokens, *jax.tree.leaves(stream.decoding.states)))
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
