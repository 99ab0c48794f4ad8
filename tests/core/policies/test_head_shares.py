"""Head shares: the file of `jaxkv calibrate`, and the budgets that KV heads get from it."""

import json
import os
import re

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import UserError, by_layer, format_policy
from jaxkv.contract import Spec
from jaxkv.policies import Retrieval
from jaxkv.policies.prompt_compression import head_shares
from jaxkv.policies.prompt_compression.head_shares import FOLDER, HeadShares, LayerBudgets
from jaxkv.policy_spec import budgets_identity
from jaxkv.rotary import rotary
from tests.core.tokens import cached, chunk, cut, state_after

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
SHARES = ((0.1, 0.0), (0.6, 0.1), (0.0, 0.2))
ABOUT = HeadShares("a model", "0123", 2, 8, SPEC.encoding, {"sha256": "", "tokens": 3}, SHARES)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(head_shares.write(ABOUT))
    return path


def test_a_file_is_read_as_it_was_written(file):
    assert head_shares.read(str(file)) == ABOUT


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_files_in_the_package(path):
    about = head_shares.read(path.stem)
    assert path.stat().st_size < 10_000
    assert abs(sum(map(sum, about.shares)) - 1) < 1e-3


def test_budgets_follow_the_shares_above_a_floor(file):
    layers = [layer.by_head for layer in head_shares.budgets(str(file), 3, 100)]
    assert layers == [(20 + 48, 20), (20 + 288, 20 + 48), (20, 20 + 96)]
    for budget in range(1, 50):
        layers = head_shares.budgets(str(file), 3, budget)
        tokens = [number for layer in layers for number in layer.by_head]
        assert 0 <= 6 * budget - sum(tokens) < 3 and min(tokens) >= max(1, budget // 5)


def test_layers_of_about_the_same_total_get_its_mean(file):
    shares = [[0.01 * (1 + layer % 10), 0.02 if layer < 15 else 0.3] for layer in range(30)]
    file.write_text(head_shares.write(ABOUT._replace(shares=shares)))
    layers = head_shares.budgets(str(file), 30, 500)
    before = 100 + 400 * 60 * np.array(shares) / np.sum(shares)
    totals = sorted({layer.total for layer in layers})
    assert 3 <= len(totals) <= head_shares.MAX_GROUPS
    assert 0 <= 500 * 60 - sum(layer.total for layer in layers) < 30
    step = (before.sum(1).max() / before.sum(1).min()) ** (1 / head_shares.MAX_GROUPS)
    for layer, exact in zip(layers, before, strict=True):
        same = [other for other in layers if other.total == layer.total]
        assert sum(layer.by_head) == layer.total
        assert layer.largest == max(max(other.by_head) for other in same)
        assert layer.smallest == min(min(other.by_head) for other in same)
        assert 1 / step < layer.total / exact.sum() < step
        rest = np.array(layer.by_head) - 100  # in the proportion of the layer's own shares
        np.testing.assert_allclose(
            rest / rest.sum(), (exact - 100) / (exact - 100).sum(), atol=0.01
        )


def test_layers_of_a_total_share_programs(file):
    file.write_text(head_shares.write(ABOUT._replace(shares=[[0.1, 0.2], [0.2, 0.1], [0.1, 0.3]])))
    layers = by_layer(f"retrieval:budgets=calibrated,calibration={file}", 3)
    first, second, third = (layer.program for layer in layers)
    assert len(set(layers)) == 3 and first == second != third
    streaming = by_layer("streaming", 2)
    assert all(layer.program is layer for layer in streaming)


def test_a_state_without_its_budgets_gives_nan(file):
    """`init` of `program` gives shapes alone; a compiled call cannot refuse its state."""
    text = f"retrieval:capacity=8,sinks=1,window=2,budgets=calibrated,calibration={file}"
    policy = by_layer(text, 3)[0]
    tokens = chunk(SPEC, 40)
    for init, finite in ((policy.init, True), (policy.program.init, False)):
        state = policy.reserve(SPEC, init(SPEC, 1, jax.random.key(0)), 40)
        _, state = jaxkv.step(policy, SPEC, state, *tokens)
        state = policy.reserve(SPEC, policy.finish_prefill(SPEC, state), 1)
        out, _ = jaxkv.step(policy, SPEC, state, *cut(tokens, -1))
        assert np.isnan(out).any() != finite  # of a head, so of the output of the layer


def test_one_string_names_all_layers(file):
    text = f"retrieval:capacity=15,sinks=2,window=3,budgets=calibrated,calibration={file}"
    layers = by_layer(text, 3)
    assert [policy.layer_budgets.by_head for policy in layers] == [(6, 2), (30, 7), (2, 11)]
    assert [policy.min_prompt for policy in layers] == [5 + 2 + 1, 5 + 7 + 1, 5 + 2 + 1]
    assert by_layer(format_policy(layers), 3) == layers
    assert by_layer(f"1=full;*={text}", 3)[2] == layers[2]


def test_a_stored_cache_belongs_to_the_budgets_of_its_file(file):
    text = f"retrieval:budgets=calibrated,calibration={file}"
    before = by_layer(text, 3)
    assert budgets_identity(before) == budgets_identity(by_layer(text, 3)) != ""
    file.write_text(head_shares.write(ABOUT._replace(shares=SHARES[::-1])))
    assert format_policy(by_layer(text, 3)) == format_policy(before)
    assert budgets_identity(by_layer(text, 3)) != budgets_identity(before)
    assert budgets_identity(by_layer("pyramidkv", 3)) == ""


def test_a_head_keeps_the_same_tokens_whatever_the_other_stores(file):
    """Law 6 for budgets that are fixed: rows lie together, but heads do not compete."""
    policy = Retrieval(12, 2, 3, "calibrated", "a file", layer_budgets=LayerBudgets.of((4, 10)))
    tokens = chunk(SPEC, 40)
    k = tokens.k.at[:, :, 1].set(9 * chunk(SPEC, 40, rng=1).k[:, :, 1])
    first, other = (
        cached(policy, SPEC, state_after(policy, SPEC, prompt))[0]
        for prompt in (tokens, tokens._replace(k=k))
    )
    assert first[0] == other[0] != first[1] != other[1]
    assert list(map(len, first)) == [4 + 5, 10 + 5]


def test_layers_have_budgets_of_their_own(file):
    policy = Retrieval(budgets="calibrated", calibration=str(file))
    with pytest.raises(UserError, match=r"each of 2 KV heads, got 0; call for_layer"):
        policy.init(SPEC, 1, jax.random.key(0))
    with pytest.raises(UserError, match="has 3 layers, but the model has 4"):
        policy.for_layer(0, 4)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"budgets": "calibrated"}, "budgets=calibrated,calibration=none"),
        ({"calibration": "default"}, "budgets=adaptive,calibration=default"),
    ],
)
def test_calibrated_budgets_and_their_file_belong_together(fields, text):
    with pytest.raises(UserError, match=rf"belong together, got {text}; give both or neither"):
        Retrieval(**fields)


DAMAGES = {
    "not JSON": lambda fields: "{",
    "no object": lambda fields: "[1]",
    "deep": lambda fields: "[" * 100_000,
    "another format": lambda fields: fields | {"format": "jaxkv head shares 9"},
    "a field missing": lambda fields: {k: v for k, v in fields.items() if k != "rotary"},
    "a layer missing": lambda fields: fields | {"shares": fields["shares"][1:]},
    "a head missing": lambda fields: fields | {"shares": [[0.1], [0.6, 0.1], [0, 0.2]]},
    "all zero": lambda fields: fields | {"shares": [[0, 0], [0, 0], [0, 0]]},
    "layers as a text": lambda fields: fields | {"layers": "3"},
    "a long number": lambda fields: fields | {"rotary": {"frequencies": [0.5], "amplitude": 1}},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files(file, name):
    damaged = DAMAGES[name](json.loads(file.read_text()))
    file.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    with pytest.raises(
        UserError, match=r"has no head shares of the format .*; name a file"
    ) as info:
        head_shares.read(str(file))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("share", [-0.2, 1.01, 1e300, 10**70, float("nan"), "0.5", True, None])
def test_shares_that_are_no_numbers_from_0_to_1(file, share):
    fields = json.loads(file.read_text()) | {"shares": [[0.1, 0], [0.6, 0.1], [0, share]]}
    file.write_text(json.dumps(fields))
    received = re.escape(f"{share!r:.60}")
    with pytest.raises(UserError, match=rf"json: .* 0 to 1, got {received}; name a file"):
        head_shares.read(str(file))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_absent_files(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")  # would block
    for name in ("absent", str(tmp_path), str(pipe), "a\0b", ""):
        with pytest.raises(UserError, match=r"cannot read the head shares .*; name a file"):
            head_shares.read(name)


def test_files_of_another_model(file):
    def check(**fields):
        arguments = {"spec": SPEC, "layers": 3, "fingerprint": "0123"} | fields
        head_shares.check_model(str(file), **arguments)

    check()
    cases = {
        "its layers differ, 3 and not 4": {"layers": 4},
        "its KV heads differ, 2 and not 1": {"spec": Spec(1, 8, 1.0, SPEC.encoding)},
        "its head dims differ, 8 and not 4": {"spec": Spec(2, 4, 1.0, rotary(4, 100.0))},
        "its rotary settings differ;": {"spec": Spec(2, 8, 1.0, rotary(8, 1e4))},
        "its weights differ, 0123 and not 4567": {"fingerprint": "4567"},
    }
    for reason, fields in cases.items():
        with pytest.raises(UserError, match=f"another model, a model: {reason}.*jaxkv calibrate"):
            check(**fields)
