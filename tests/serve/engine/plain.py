"""A small decoder in plain JAX for tests of the engine, and a listener."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.policy_spec import by_layer
from jaxkv.rotary import rotary
from jaxkv.serve.engine import Engine, Model, Outcome, PrefixConfig, Request, ScoredToken

CHUNK = 16
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 16, 4, 2, 8, 48
SPEC = jaxkv.Spec(KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rotary(HEAD_DIM, 100.0), group=2)
SIZES = {"q": (WIDTH, 32), "k": (WIDTH, 16), "v": (WIDTH, 16), "o": (32, WIDTH)}


def weights(seed: int = 0):
    rng = np.random.default_rng(seed)
    arrays = {
        f"{layer}.{name}": rng.normal(size=shape) / 3
        for layer in range(LAYERS)
        for name, shape in SIZES.items()
    }
    arrays["embed"] = rng.normal(size=(VOCAB, WIDTH))
    return {name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()}


def new_plain(policy: str = "streaming:sinks=2,window=14", seed: int = 0) -> Model:
    policies = by_layer(policy, LAYERS)

    def embed(w, tokens):
        return w["embed"][tokens]

    def layer(policy, w, x, state, positions, valid):
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, HEAD_DIM) for name in "qkv")
        out, state = jaxkv.step(policy, SPEC, state, q, k, v, positions, valid)
        return x + out.reshape(*x.shape[:2], -1) @ w["o"], state

    def head(w, x, indices):
        return jnp.take_along_axis(x, indices[..., None], axis=1) @ w["embed"].T

    def layer_weights(w, number):
        return {name: w[f"{number}.{name}"] for name in SIZES}

    return Model(
        embed, layer, head, layer_weights, weights(seed), policies, SPEC, VOCAB, f"plain {seed}"
    )


plain = functools.cache(new_plain)  # engines of one model share their programs


def new_engine(policy: str, config: PrefixConfig | None = None, seed: int = 0, **fields) -> Engine:
    """An engine for prompts of up to 256 tokens, with a prefix cache. seed: of its weights."""
    settings = {"max_batch": 2, "max_len": 256, "chunk": CHUNK} | fields
    return Engine(plain(policy, seed), prefix_cache=config, **settings)


class Recorder:
    """A listener that records its calls. stop: a token at which it ends; fail: where it raises."""

    def __init__(self, stop: int | None = None, fail: str = "") -> None:
        self.scored: list[ScoredToken] = []
        self.echoed: list[ScoredToken] = []
        self.outcomes: list[Outcome] = []
        self._stop, self._fail = stop, fail

    @property
    def tokens(self) -> list[int]:
        return [scored.token for scored in self.scored]

    @property
    def outcome(self) -> Outcome:
        (outcome,) = self.outcomes
        return outcome

    def prompt(self, scored: list[ScoredToken]) -> None:
        assert not self.scored and not self.echoed, "the prompt is delivered once and first"
        self.echoed = list(scored)

    def token(self, scored: ScoredToken) -> bool:
        assert not self.outcomes, "no token follows the end"
        self.scored.append(scored)
        if self._fail == "token":
            raise ValueError("this listener is broken")
        return scored.token == self._stop

    def done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._fail == "done":
            raise ValueError("this listener is broken")


def ask(engine: Engine, *requests: Request) -> list[Recorder]:
    """Submit all requests at once and run the engine until they end."""
    listeners = [Recorder() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    finish(engine)
    return listeners


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def prompts(count: int, seed: int = 0, max_tokens: int = 70) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.integers(0, VOCAB, int(rng.integers(1, max_tokens))).tolist())
        for _ in range(count)
    ]
