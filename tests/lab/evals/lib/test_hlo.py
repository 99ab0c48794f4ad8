"""Copies inside a loop are found, and those outside are not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.evals.lib import hlo
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


STEP = """\
HloModule step

%moves (p: f32[4,8]) -> f32[8,4] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %t = f32[8,4]{0,1} transpose(%p), dimensions={1,0}
}

%adds (p: f32[8,4], q: bf16[3]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = bf16[3]{0} parameter(1)
  %w = f32[8,4]{1,0} convert(%q)
  ROOT %a = f32[8,4]{1,0} add(%p, %w)
}

%part (p: s32[], c: f32[50,4], r: f32[1,4]) -> f32[50,4] {
  %c = f32[50,4]{1,0} parameter(1)
  %at = s32[] parameter(0)
  %b = f32[50,4]{1,0} bitcast(%c)
  %row = f32[2,4]{1,0} dynamic-slice(%b, %at, %at), dynamic_slice_sizes={2,4}
  %r = f32[1,4]{1,0} parameter(2)
  ROOT %u = f32[50,4]{1,0} dynamic-update-slice(%c, %r, %at, %at)
}

%rare (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %s = f32[8,4]{1,0} sort(%p), dimensions={0}
}

%inner (p: (s32[], f32[100])) -> (s32[], f32[100]) {
  %p = (s32[], f32[100]{0}) parameter(0)
  %x = f32[100]{0} get-tuple-element(%p), index=1
  %m = f32[100]{0} multiply(%x, %x)
  ROOT %r = (s32[], f32[100]{0}) tuple(%x, %m)
}

%step (p: (f32[4,8], bf16[3])) -> (f32[4,8], bf16[3]) {
  %p = (f32[4,8]{1,0}, bf16[3]{0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=0
  %b = bf16[3]{0} get-tuple-element(%p), index=1
  %one = s32[] add(%c, %c)
  %moved = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%moves
  %sum = f32[8,4]{1,0:T(8,128)S(1)} fusion(%moved, %b), kind=kLoop, calls=%adds
  %cache = f32[50,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %new = f32[1,4]{1,0} parameter(3)
  %written = f32[50,4]{1,0} fusion(%i, %cache, %new), kind=kLoop, calls=%part
  %early = (bf16[50]{0:S(1)}, bf16[99]{0}, u32[]) slice-start(%b), slice={[0:50]}
  %late = bf16[50]{0:S(1)} slice-done(%early)
  %if = f32[8,4]{1,0} conditional(%d, %sum, %sum), branch_computations={%rare, %rare}
  %loop = (s32[], f32[100]{0}) while(%t), condition=%inner.condition, body=%inner
  ROOT %r = (f32[4,8]{1,0}, bf16[3]{0}) tuple(%x, %b)
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %w = (f32[4,8]{1,0}, bf16[3]{0}) while(%a), condition=%step.condition, body=%step
  ROOT %c = f32[4,8]{1,0} copy(%a)
}
"""


def test_the_kernels_of_a_step():
    """Three fusions, an addition of scalars and a product in a loop; the entry is left out."""
    assert hlo.step_of(STEP) == {
        "kernels": 5,
        "copies": 1,
        # A move; operands of a sum whose result is in fast memory; a scalar; a slice; a product.
        # Of the cache two rows are read and one is written, from a row and a number.
        "moved_bytes": 2 * 128 + 128 + 6 + 4 + 100 + 2 * 400 + 32 + 16 + 16 + 4,
        "host_conditions": 2,
        "collectives": 0,
        "largest_float32": [50, 4],
    }
    assert hlo.step_of(STEP, scalars=10)["kernels"] == 4
    (entry,) = re.findall(r"ENTRY.*", STEP, re.DOTALL)
    alone = hlo.step_of(entry.replace("while(", "tuple(").replace("body=", "x="))
    done = "  %x = f32[4] all-gather-start(%a)\n  %y = f32[4] all-gather-done(%x)\n"
    started = hlo.step_of(STEP.replace("  ROOT %c", done + "  ROOT %c"), loop=False)
    assert started["collectives"] == 1
    loop = "while(%t), condition=%inner.condition, body=%inner"
    often = STEP.replace(loop, loop + ', backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.step_of(often)["kernels"] == hlo.step_of(STEP)["kernels"] + 6
    every = hlo.step_of(STEP.replace("copy(%a)", "all-reduce(%a)"), loop=False)
    assert every["collectives"] == 1 and every["kernels"] == 1 + hlo.step_of(STEP)["kernels"]
    assert alone["kernels"] == alone["copies"] == 1 and alone["moved_bytes"] == 2 * 128
