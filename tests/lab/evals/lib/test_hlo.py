"""Copies inside a loop are found, and those outside are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.evals.lib.hlo import copies_in_loops, floats_in_loops

FUSED = """
%fused (p: s8[4,8]) -> f32[2,3] {
  %a = f32[4,8]{1,0} convert(%p)
}

%inside (p: (s8[4,8])) -> (s8[4,8]) {
  %b = f32[2,3]{1,0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %c = (s8[4,8]{1,0}, bf16[5]{0:T(256)(2,1)}) tuple(%p, %b)
}

ENTRY %main (x: s8[4,8]) -> s8[4,8] {
  %d = f32[4,8]{1,0} convert(%x)
  %w = (s8[4,8]) while(%t), condition=%inside, body=%inside
}
"""


def test_large_floats_inside_a_loop_are_found_but_not_those_inside_a_fusion():
    assert not floats_in_loops(FUSED, 7)
    fusion, result = floats_in_loops(FUSED, 5)
    assert fusion.startswith("%b = f32[2,3]") and result.startswith("ROOT %c")
    unfused = FUSED.replace("  %b = f32[2,3]", "  %e = f32[4,8]{1,0} convert(%p)\n  %b = f32[2,3]")
    assert floats_in_loops(unfused, 32) == ["%e = f32[4,8]{1,0} convert(%p)"]
    called = FUSED.replace("fusion(%p), kind=kLoop, calls=", "call(%p), to_apply=")
    assert floats_in_loops(called, 32) == ["%a = f32[4,8]{1,0} convert(%p)"]
    with pytest.raises(ValueError, match="no loop"):
        floats_in_loops(FUSED.replace("body=", ""), 32)


def test_swapping_two_caches_in_a_loop_is_found_as_a_copy():

    @jax.jit
    def swap(first, second, count):
        return jax.lax.fori_loop(0, count, lambda i, pair: (pair[1], pair[0] + 1), (first, second))

    caches = jnp.zeros((4, 16, 8)), jnp.ones((4, 16, 8))
    text = swap.lower(*caches, np.int32(3)).compile().as_text()
    assert copies_in_loops(text, {4 * 16 * 8}) and not copies_in_loops(text, {4 * 16 * 7})
