"""Policies whose caches fill a budget of bytes per sequence.

SHAPES is the table of the policies that `jaxkv advise` compares, with their fields as functions of
the number of slots. `fit` takes the largest number that the budget allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.contract import Policy, Spec
from jaxkv.errors import UserError
from jaxkv.models.llm import Llm
from jaxkv.policy_spec import max_lookback, parse_policy, state_bytes
from jaxkv.state import memory

BUDGET = 256  # slots of the streaming cache whose bytes are the default budget
LEAST = 16  # slots of the smallest cache
# At 256 slots these are the default fields. The last one stores more tokens in as many bytes.
SHAPES = {
    "window": "window:window={slots}",
    "streaming": "streaming:sinks=4,window={recent}",
    "h2o": "h2o:heavy={half},window={rest}",
    "reservoir": "reservoir:sinks=4,window={recent_half},sample={sampled_half}",
    "stratified": "stratified:sinks=4,window={beside_power},sample={power}",
    "balance-stream": "balance-stream:sinks=4,window={beside_tree},levels=2,block={block}",
    "streaming-int8": "streaming:sinks=4,window={recent},cache=int8",
}


def shape(name: str, slots: int) -> str:
    """The policy string of an entry of SHAPES for this many slots."""
    recent = slots - 4  # besides four sinks
    # A stratified sample is a power of two, and two levels have three half blocks, of a power of
    # two: the largest that leave at least 40 % and 55 % of the slots to the window.
    power = 1 << ((slots * 3 // 5).bit_length() - 1)
    block = 1 << ((slots * 3 // 10).bit_length() - 1)
    return SHAPES[name].format(
        slots=slots,
        recent=recent,
        half=slots // 2,
        rest=slots - slots // 2,
        recent_half=recent - recent // 2,
        sampled_half=recent // 2,
        power=power,
        beside_power=recent - power,
        block=block,
        beside_tree=recent - 3 * block // 2,
    )


def budget_of(llm: Llm, policies: Sequence[str], tokens: int) -> int:
    """The budget where none is given, in bytes per sequence of `tokens` tokens.

    It is that of the largest of these policies that is not in SHAPES, else that of a streaming
    cache of BUDGET tokens.
    """
    own = [policy for policy in policies if policy not in SHAPES]
    slots = max(LEAST, min(BUDGET, llm.config.context // 2))
    return max(bytes_of(llm, policy, tokens) for policy in own or [shape("streaming", slots)])


def fit(llm: Llm, budget: int, policies: Sequence[str], tokens: int) -> list[str]:
    """The policies within `budget` bytes per sequence of `tokens` tokens.

    policies: names in SHAPES, which get the largest fields that fit, or policy strings, which stay
    as they are; empty takes all names whose positions stay within the trained context for a text of
    `tokens` tokens. No cache gets more slots than half of the trained context.
    Raises UserError where the smallest cache of a policy is larger than the budget.
    """
    names = list(policies) or [
        name for name in SHAPES
        if max_lookback(parse_policy(shape(name, LEAST)), tokens) <= llm.config.context
    ]  # fmt: skip
    least = {name: shape(name, LEAST) if name in SHAPES else name for name in names}
    needs = {name: bytes_of(llm, policy, tokens) for name, policy in least.items()}
    name = max(needs, key=needs.get)
    if needs[name] > budget:
        raise UserError(
            f"--budget must be at least {memory.show(needs[name])} ({needs[name]} bytes) for "
            f"{name}, got {budget} bytes per sequence; raise it, or name "
            "other policies with --policy"
        )
    return list(
        dict.fromkeys(
            _largest(llm, budget, name, tokens) if name in SHAPES else name for name in names
        )
    )


def _largest(llm: Llm, budget: int, name: str, tokens: int) -> str:
    """The entry of SHAPES with the most slots that fit, by bisection."""
    fits, beyond = LEAST, max(LEAST, llm.config.context // 2) + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if bytes_of(llm, shape(name, middle), tokens) <= budget:
            fits = middle
        else:
            beyond = middle
    return shape(name, fits)


def bytes_of(llm: Llm, policy: str, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens in all layers; growing caches have room for them."""
    with warnings.catch_warnings():  # of layers that keep the model's own window
        warnings.simplefilter("ignore")
        return state_bytes(llm.policies(policy), llm.spec, 1, tokens)


def slots_of(llm: Llm, policies: Sequence[Policy]) -> int:
    """The most tokens that a KV head caches, over the layers whose cache does not grow."""
    return max(
        (_slots(policy, llm.spec) for policy in set(policies) if not policy.grows), default=0
    )


def _slots(policy: Policy, spec: Spec) -> int:
    state = jax.eval_shape(lambda: policy.init(spec, 1, jax.random.key(0)))
    cached = jax.eval_shape(lambda state: policy.cached(spec, state), state)
    return jnp.shape(cached.positions)[2]
