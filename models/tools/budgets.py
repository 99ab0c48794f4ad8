"""Policies whose caches fill a budget of bytes per sequence.

SHAPES is the table of the policies that `jaxkv advise` knows by name, with their fields as
functions of the number of slots. `fit` takes the largest number that the budget allows. A policy
that acts on a prompt caches all tokens after it, so it is charged for those too. Policies that
cache every token select from them, and get fields with which a query attends to as many tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.contract import Policy, Spec, shapes_after_prefill
from jaxkv.errors import UserError
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.layers import quiet_policies
from jaxkv.policies import Full, MagicPIG
from jaxkv.policies.prompt_compression.base import CompressionPolicy, ExactEnds
from jaxkv.policies.sparse_attention.base import SparsePolicy
from jaxkv.policy_spec import parse_policy, state_bytes
from jaxkv.state import memory
from jaxkv.state.batch import nbytes

BUDGET = 256  # most slots of the streaming cache whose bytes are the default budget
MIN_SLOTS = 16  # slots of the smallest cache, without tokens after the prompt
WINDOW = 32  # last queries by which snapkv and pyramidkv select, and the window of retrieval
# At 256 slots the evicting ones have their default fields. -int8 stores more tokens in as many
# bytes. The third group caches every token.
SHAPES = {
    "window": "window:window={slots}",
    "streaming": "streaming:sinks=4,window={recent}",
    "h2o": "h2o:heavy={half},window={rest}",
    "reservoir": "reservoir:sinks=4,window={recent_half},sample={sampled_half}",
    "stratified": "stratified:sinks=4,window={beside_power},sample={power}",
    "balance-stream": "balance-stream:sinks=4,window={beside_tree},levels=2,block={block}",
    "streaming-int8": "streaming:sinks=4,window={recent},storage=int8",
    "snapkv": "snapkv:capacity={capacity},window={queries}",
    "pyramidkv": "pyramidkv:capacity={capacity},window={queries}",
    "expected-attention": "expected-attention:capacity={capacity}",
    "keydiff": "keydiff:capacity={capacity}",
    "retrieval": "retrieval:capacity={capacity},sinks={first},window={queries}",
    "tova": "tova:capacity={beside_newest}",
    "rkv": "rkv:capacity={beside_every},window={newest},every={every}",
    "vase": "vase:capacity={beside_every},window={newest},sinks=4,every={every}",
    "triattention": "triattention:capacity={beside_every},every={every}",
    "uniform": "uniform:sinks=4,window={end},rounds={rounds}",
    "balance": "balance:sinks=4,window={end},rounds={rounds}",
    "topk": "topk:share={share:.3g},sinks=4,window={near}",
    "topp": "topp:mass=0.9,sinks=4,window={near}",
    "oracle": "oracle:share={share:.3g},sinks=4,window={near}",
    "quest": "quest:share={share:.3g},page=4,fewest=1,sinks=4,window={near}",
    "loki": "loki:share={share:.3g},sinks=4,window={near}",
    "vattention": "vattention:top={half_share:.3g},base={half_share:.3g},epsilon=0.99,delta=0.99,"
    "sides=one,sinks=4,window={near}",
    "magicpig": "magicpig:sinks=4,window={near},budget={budget}",
}
# What `jaxkv advise` measures by default: one of each kind, because time is short.
DEFAULT = ("streaming", "streaming-int8", "reservoir", "snapkv", "expected-attention", "keydiff",
           "uniform")  # fmt: skip
ALL = "all"


def shape(name: str, slots: int, prompt: int = 0, scored: int = 0) -> str:
    """The policy string of an entry of SHAPES for this many slots.

    prompt, scored: tokens of the prompt, and of those after it. slots: at the end of both.
    """
    recent = slots - 4  # besides four sinks
    # A stratified sample is a power of two, and two levels have three half blocks, of a power of
    # two: the largest that leave at least 40 % and 55 % of the slots to the window.
    power = 1 << ((slots * 3 // 5).bit_length() - 1)
    block = 1 << ((slots * 3 // 10).bit_length() - 1)
    capacity = max(2, slots - scored)
    rounds, end = halvings(prompt, capacity)
    # Half of the attended tokens are near, the others are selected.
    near = max(1, slots // 2 - 4)
    share = min(1.0, slots / 2 / max(1, prompt - slots // 2))
    every = slots // 8  # as with a capacity of 1,024 tokens and a compression every 128
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
        capacity=capacity,
        queries=min(WINDOW, capacity // 2),
        first=min(4, capacity // 4),
        every=every,
        beside_newest=slots - 1,
        beside_every=slots - every,
        newest=min(8, slots // 4),
        rounds=rounds,
        end=end,
        near=near,
        share=share,
        half_share=share / 2,
        budget=max(1, slots // 2),
    )


def halvings(prompt: int, capacity: int) -> tuple[int, int]:
    """Rounds and window with which four sinks, the window and a sample are `capacity` tokens.

    Of the numbers of rounds, the one whose sample is nearest to half of them; where they do not
    suffice, the one that keeps the fewest. All tokens between the ends are halved.
    """
    options = []
    for rounds in range(1, 11):
        fewest = -(-max(0, prompt - capacity) // ((1 << rounds) - 1))
        sampled = min(fewest, max(0, prompt - 5) >> rounds)
        cached = prompt - sampled * ((1 << rounds) - 1)
        unlike = abs(sampled - capacity // 2) + max(0, capacity - cached)
        options.append((max(0, cached - capacity), unlike, rounds, sampled << rounds))
    _, _, rounds, between = min(options)
    return rounds, max(1, prompt - 4 - between)


def caches_all(policies: Sequence[Policy]) -> bool:
    """Whether some layer caches every token of a long text, however small its settings are."""
    return any(isinstance(policy, SparsePolicy | MagicPIG | Full) for policy in policies)


def acts_on_prompt(policies: Sequence[Policy]) -> bool:
    return any(policy.min_prompt is not None for policy in policies)


def budget_of(llm: Llm, policies: Sequence[str], prompt: int, scored: int) -> int:
    """The budget where none is given, in bytes per sequence.

    It is that of the largest of these policies that is not in SHAPES and that does not cache every
    token, else that of a streaming cache of a quarter of a stretch, at most BUDGET tokens.
    """
    bounded = [
        name for name in policies if name not in SHAPES and not caches_all(llm.policies(name))
    ]
    slots = max(MIN_SLOTS, min(BUDGET, (prompt + scored) // 4))
    bounded = bounded or [shape("streaming", slots)]
    return max(bytes_of(llm, policy, prompt, scored) for policy in bounded)


def fit(llm: Llm, budget: int, policies: Sequence[str], prompt: int, scored: int) -> list[str]:
    """The policies within `budget` bytes per sequence after a prompt and the tokens after it.

    policies: names in SHAPES, which get the largest fields that fit, or policy strings, which stay
    as they are; empty takes DEFAULT. No cache gets more slots than the prompt has tokens. The
    budget binds no policy that caches every token.
    Raises UserError where the smallest cache of a policy is larger than the budget.
    """
    smallest = {name: _smallest(name, prompt, scored) for name in policies or DEFAULT}
    needs = {
        name: bytes_of(llm, policy, prompt, scored)
        for name, policy in smallest.items()
        if not caches_all(llm.policies(policy))
    }
    name = max(needs, key=needs.get, default=None)
    if name is not None and needs[name] > budget:
        raise UserError(
            f"--budget must be at least {needs[name]} bytes (about {memory.show(needs[name])}) for "
            f"{name}, got {budget} bytes per sequence; raise it, or name other policies with "
            "--policy"
        )
    return list(
        dict.fromkeys(
            _largest(llm, budget, name, prompt, scored) if name in SHAPES else name
            for name in smallest
        )
    )


def _smallest(name: str, prompt: int, scored: int) -> str:
    return shape(name, _min_slots(name, scored), prompt, scored) if name in SHAPES else name


def _min_slots(name: str, scored: int) -> int:
    after = scored if acts_on_prompt([parse_policy(shape(name, MIN_SLOTS, MIN_SLOTS))]) else 0
    return MIN_SLOTS + after


def _largest(llm: Llm, budget: int, name: str, prompt: int, scored: int) -> str:
    """The entry of SHAPES with the most slots that fit, by bisection.

    One that caches every token gets the slots of streaming.
    """
    fits = _min_slots(name, scored)
    beyond = max(fits, prompt) + 1
    bounded = not caches_all(llm.policies(shape(name, fits, prompt, scored)))
    sized = name if bounded else "streaming"
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        policy = shape(sized, middle, prompt, scored)
        if bytes_of(llm, policy, prompt, scored) <= budget:
            fits = middle
        else:
            beyond = middle
    return shape(name, fits, prompt, scored)


def bytes_of(llm: Llm, policy: str, prompt: int, scored: int = 0) -> int:
    """Bytes of one sequence in all layers after a prompt and the tokens after it.

    Empty slots of growing caches do not count: caches double, so that they are compiled seldom.
    """
    policies = Counter(quiet_policies(llm, policy))
    return sum(n * _bytes(p, llm.spec, prompt, scored) for p, n in policies.items())


def _bytes(policy: Policy, spec: Spec, prompt: int, scored: int) -> int:
    if policy.min_prompt is None or prompt < policy.min_prompt:
        total = max(1, prompt + scored)
        exact = replace(policy, start=total) if policy.grows else policy
        return state_bytes([exact], spec, 1, total) - _statistics_bytes(policy, spec)
    exact = replace(policy, start=prompt)
    after = shapes_after_prefill(exact, spec, prompt)
    row = rows.nbytes(spec, getattr(policy, "storage", "float"))
    exact_bytes = spec.kv_heads * row + 4
    sampled_bytes = spec.kv_heads * (row + 8)  # with the position and the log weight
    empty = 0
    if isinstance(policy, CompressionPolicy):
        sample = jax.eval_shape(partial(exact.cached, spec), after).log_weight.shape[2]
        dense = min(policy.ends.max_tokens, prompt)
        exact_tokens, sampled = _compressed(policy.ends, prompt, sample - dense)
        empty = (dense - exact_tokens) * exact_bytes + (sample - dense - sampled) * sampled_bytes
    return nbytes(after) - empty + scored * exact_bytes


def _statistics_bytes(policy: Policy, spec: Spec) -> int:
    """Bytes of what a method gathers until the end of prefill, which the cache then drops."""
    if not isinstance(policy, CompressionPolicy) or not policy.grows:
        return 0
    return nbytes(jax.eval_shape(partial(policy.scorer.statistics, spec, 1)))


def _compressed(ends: ExactEnds, prompt: int, slots: int) -> tuple[int, int]:
    """The tokens of a compressed prompt that stay exact, and those in the slots of its sample."""
    between = max(0, prompt - ends.sinks - ends.window)
    rest = between % ends.multiple
    sampled = (between - rest) // ends.multiple if ends.multiple > 1 else slots
    return prompt - between + rest, min(slots, sampled)


def prompt_bytes_of(llm: Llm, policy: str, prompt: int) -> int:
    """Bytes of one sequence in all layers before the end of its prefill, without empty slots."""
    exact = [replace(p, start=prompt) if p.grows else p for p in llm.policies(policy)]
    state = [p.bytes_per_sequence(llm.spec, prompt) for p in exact]
    return sum(state)


def slots_of(llm: Llm, policies: Sequence[Policy]) -> int:
    """The most tokens that a KV head caches, over the layers whose cache does not grow."""
    return max(
        (_slots(policy, llm.spec) for policy in set(policies) if not policy.grows), default=0
    )


def _slots(policy: Policy, spec: Spec) -> int:
    if isinstance(policy, CompressionPolicy):  # on average over KV heads with unequal budgets
        return policy.ends.max_tokens + policy.budget + policy.every
    state = jax.eval_shape(lambda: policy.init(spec, 1, jax.random.key(0)))
    cached = jax.eval_shape(lambda state: policy.cached(spec, state), state)
    return jnp.shape(cached.positions)[2]
