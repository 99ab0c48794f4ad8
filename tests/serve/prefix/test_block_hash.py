"""Hashes of blocks: equal exactly for equal prefixes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.serve.prefix import BlockHasher, encode, root_hash
from jaxkv.serve.prefix.block_hash import sha256


def test_an_empty_salt_is_refused():
    for empty in ("", b""):
        with pytest.raises(UserError, match="salt must not be empty"):
            root_hash(salt=empty)


def test_a_field_counts_with_its_name_type_and_value():
    """Behaviour 19."""
    all_fields = [
        {}, {"adapter": "x"}, {"salt": "x"}, {"salt": None}, {"salt": b"x"},
        {"a": "ab", "b": "c"}, {"a": "a", "b": "bc"}, {"a": ("ab", "c")}, {"a": ("a", "bc")},
        {"a": 1}, {"a": "1"}, {"a": True}, {"a": 1.0}, {"a": (1,)}, {"a": ((1,),)}, {"a": ()},
        {"ab": ""}, {"a": "b"}, {"a": None, "b": None}, {"a": (None, None)},
    ]  # fmt: skip
    assert len({root_hash(**fields) for fields in all_fields}) == len(all_fields)
    assert root_hash(a=1, b="2") == root_hash(b="2", a=np.int64(1))
    assert root_hash(a=("x", 1)) == root_hash(a=["x", 1])
    assert len(root_hash()) == 32
    with pytest.raises(UserError, match="adapter must consist of"):
        root_hash(adapter={"x": 1})


def test_the_integer_type_of_tokens_does_not_matter():
    """Behaviour 22: every integer type gives one hash, and every process gives the same one."""
    tokens = [0, 65_536, 7, 2**31 - 1]
    kinds = [tokens, tuple(tokens), [np.int64(t) for t in tokens]]
    kinds += [np.array(tokens, dtype) for dtype in ("i4", "i8", "u4", "u8", ">i8", ">u4")]
    assert {encode(kind) for kind in kinds} == {b"".join(t.to_bytes(4, "little") for t in tokens)}
    hashes = BlockHasher(2).hash_prompt(tokens, root_hash()).hashes
    assert all(BlockHasher(2).hash_prompt(kind, root_hash()).hashes == hashes for kind in kinds)
    assert (
        BlockHasher(1).hash_prompt([65_536], root_hash()).hashes
        != BlockHasher(1).hash_prompt([0], root_hash()).hashes
    )
    code = ("from jaxkv.serve.prefix import BlockHasher, root_hash; "
            f"found = BlockHasher(2).hash_prompt({tokens}, root_hash()); "
            "print(found.hashes[-1].hex())")  # fmt: skip
    for seed in ("0", "1"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert run.stdout.strip() == hashes[-1].hex(), run.stderr


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [1.5], ["a"], 5, np.array([1.0]), np.zeros((1, 2), int)]
)  # fmt: skip
def test_invalid_tokens_are_refused(tokens, unchecked):
    with pytest.raises(UserError, match="tokens must be whole numbers from 0"):
        encode(tokens)


@pytest.mark.parametrize("value", ["\ud800", 2**64, (1, "\udfff"), object()])
def test_invalid_fields_are_refused(value):
    with pytest.raises(UserError, match=r"must (be|consist of) "):
        root_hash(a=value)


def test_the_index_needs_no_jax():
    code = "import sys, jaxkv.serve.prefix; print(*{'jax', 'jaxlib', 'flax'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_a_chained_hash_by_its_definition():
    """The definition is fixed, because another machine may recompute the hash."""
    (block_hash,) = BlockHasher(2).hash_prompt([1, 2], root_hash()).hashes
    assert block_hash == sha256(root_hash() + (8).to_bytes(8, "little") + encode([1, 2]))
