"""Single faults in the core, and whether the everyday tests catch them.

    python -m jaxkv.evals.correctness.faults [NUMBER ...]

Each fault is inserted into a copy of the checkout, on which its tests run until the first failure,
those of its module first. Prints one line per fault; exits with 1 if any was missed. Without
numbers it runs all, for an hour.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxkv.evals.lib.record import ROOT, make_parser, run_command

CORE, SERVE = ("tests/core",), ("tests/serve/prefix", "tests/serve/engine")


class CoreFault(NamedTuple):
    """old: a text that its file has once; new: the faulty one. tests: those that should fail."""

    file: str
    old: str
    new: str
    tests: Sequence[str] = CORE


def broken_copy(fault: CoreFault, folder: Path) -> None:
    """Copy the tracked files of the checkout, and insert the fault."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    text = (folder / fault.file).read_text("utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(
            f"{fault.file} must have {fault.old!r} once, it has {text.count(fault.old)}"
        )
    (folder / fault.file).write_text(text.replace(fault.old, fault.new), "utf-8")


def failure(fault: CoreFault) -> str:
    """The first test that fails, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        broken_copy(fault, Path(folder))
        of_module = Path(folder, *fault.tests[:1]).rglob(f"test_{Path(fault.file).stem}.py")
        runs = ([str(path.relative_to(folder))] for path in of_module)
        return next(filter(None, (first_failure(folder, run) for run in [*runs, fault.tests])), "")


def first_failure(folder: str, tests: Sequence[str]) -> str:
    """The first of these tests that fails in a copy of the checkout, or an empty string."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(pytest, cwd=folder, capture_output=True, text=True)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if run.returncode and not failed:
        raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])
    return failed[0].partition(" - ")[0] if failed else ""


def main() -> None:
    parser = make_parser("jaxkv.evals.correctness.faults", __doc__)
    every = range(len(FAULTS))
    parser.add_argument("numbers", type=int, nargs="*", choices=every, help="of faults")
    numbers = parser.parse_args().numbers or every
    missed = 0
    for number in numbers:
        fault = FAULTS[number]
        test = failure(fault)
        missed += not test
        print(f"{number} {fault.file}: {fault.new.strip()!r}: {test or 'MISSED'}", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} faults were caught")
    if missed:
        raise SystemExit(1)


ATTENTION, ROTARY, RING, ROWS = (
    "jaxkv/attention.py", "jaxkv/rotary.py", "jaxkv/cache/ring.py", "jaxkv/rows.py",
)  # fmt: skip
DRAWS, RESERVOIR, TREE = (
    "jaxkv/draws.py", "jaxkv/policies/reservoir.py", "jaxkv/policies/merge_reduce/tree.py",
)  # fmt: skip
FAULTS = (
    CoreFault(ATTENTION, "k, v = rows.store(k, like), rows.store(v, like)",
              "v = rows.store(v, like)"),
    CoreFault(ATTENTION, "visible &= distance < window", "visible &= distance <= window"),
    CoreFault(ATTENTION,
              "jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))\n\n\ndef sink_logit",
              "top + jnp.log(safe))\n\n\ndef sink_logit"),
    CoreFault(ATTENTION, "logits = logits * scales", "logits = logits"),
    CoreFault(ATTENTION, "merge(blocks, attend(q, k, v, rest", "merge(attend(q, k, v, rest"),
    CoreFault(ATTENTION, "shown = valid if hidden is None else valid & ~hidden", "shown = valid"),
    CoreFault(ATTENTION, "return Partial(jnp.zeros_like(like.out), lse)",
              "return Partial(like.out, lse)"),
    CoreFault(ATTENTION, "[:, None] >= jnp.arange(keys)", "[:, None] > jnp.arange(keys)"),
    CoreFault("jaxkv/driver.py", "partial = merge(partial, sink_logit(sink_logits, partial))",
              "partial = merge(partial, *2 * [sink_logit(sink_logits, partial)])"),
    CoreFault(ROTARY, "second * cos + first * sin", "second * cos - first * sin"),
    CoreFault(ROTARY, "np.int32(-(2**31)) - signed", "np.int32(-(2**31)) + signed"),
    CoreFault(ROTARY, "return replace(self, amplitude=1.0).rotate(x, by)",
              "return self.rotate(x, by)"),
    CoreFault(ROTARY, "(1 - blend) * frequencies / factor", "(1 - blend) * frequencies"),
    CoreFault(ROTARY, "low, high = max(low, 0), min(high, head_dim - 1)",
              "low, high = max(low, 0), high"),
    CoreFault(RING, "beyond = sinks + (ring.count - sinks) % (size - sinks)",
              "beyond = ring.count % size"),
    CoreFault(RING, "(number >= jnp.minimum(slot, sinks))", "(number >= 0)"),
    CoreFault(RING, "visible &= (distance < settings.window) | (slot < sinks)",
              "visible &= distance < settings.window"),
    CoreFault(RING, "jnp.where(over[:, None, None, None], jnp.nan, partial.out)", "partial.out"),
    CoreFault(RING, "out = write_range(out, jnp.full_like(ring.count, sinks), tokens)", "pass"),
    CoreFault(RING, "(jnp.clip(numbers, 0, last) + num_sampled)", "jnp.clip(numbers, 0, last)"),
    CoreFault(ROWS, "jnp.maximum(scale, _SMALLEST)", "scale"),
    CoreFault(ROWS, "jnp.clip(jnp.rint(wide / scale), -LARGEST, LARGEST)",
              "jnp.floor(wide / scale)"),
    CoreFault(DRAWS, "^ rng[:, :, 1:]", ""),
    CoreFault(DRAWS, "(bits(numbers, rng) >> np.uint32(8))",
              "(bits(numbers, rng) >> np.uint32(9))"),
    CoreFault(RESERVOIR, "takes = draw < jnp.max(stored, axis=2)",
              "takes = draw <= jnp.min(stored, axis=2)"),
    CoreFault(RESERVOIR, "takes &= evicts[:, None]", "pass"),
    CoreFault(RESERVOIR, "ranks - sample.positions), sample.v, ranks", "ranks), sample.v, ranks"),
    CoreFault(RESERVOIR, "num_evicted.astype(jnp.float32) / np.float32(self.sample), 1)",
              "num_evicted.astype(jnp.float32) / np.float32(self.sample), 0)"),
    CoreFault(TREE, "jnp.where(level == 0, 0, reducer.size.half * (level.astype(jnp.int32) + 1))",
              "reducer.size.half * level.astype(jnp.int32)"),
    CoreFault(TREE, "full = (after != num_evicted) & (after % fill_tokens == 0)",
              "full = after % fill_tokens == 0"),
    CoreFault(TREE, "number = level * np.uint32(block) + jnp", "number = jnp"),
    CoreFault("jaxkv/policies/h2o.py", "jnp.argmin(jnp.where(new, jnp.inf, state.score)",
              "jnp.argmax(jnp.where(new, -jnp.inf, state.score)"),
    CoreFault("jaxkv/policies/prompt_compression/keydiff.py", "score = -jnp.sum(k",
              "score = jnp.sum(k"),
    CoreFault("jaxkv/policies/prompt_compression/snapkv.py",
              "return jnp.mean(pooled(attention, self.kernel, self.pool), axis=2)",
              "return pooled(attention, self.kernel, self.pool)[:, :, 0]"),
    CoreFault("jaxkv/policies/sparse_attention/base.py", "(slot > query_slot - window)",
              "(slot >= query_slot - window)"),
    CoreFault("jaxkv/policies/magicpig/lsh.py", " + jnp.log1p(np.float32(tables - 1) * p)", ""),
    CoreFault("jaxkv/sampling.py", "mass_limit = knobs.top_p * total", "mass_limit = total"),
    CoreFault("jaxkv/state/batch.py", 'if header["identity"] != identity:', "if False:"),
    CoreFault("jaxkv/serve/prefix/block_hash.py", "last = hash(last + length",
              "last = hash(root + length", SERVE),
    CoreFault("jaxkv/serve/engine/store.py", "if arrays is None:", "if False:", SERVE),
)  # fmt: skip


if __name__ == "__main__":
    run_command(main)
