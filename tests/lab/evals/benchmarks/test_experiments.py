"""Each benchmark at a tiny size, on a random model: its results, and what must end a run."""

from pathlib import Path

import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import (
    kernels,
    latency,
    startup,
)
from jaxkv.evals.lib import timing
from jaxkv.pallas_kernels.sign_walk import shapes as walk_shapes
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """One layer: quick to compile."""
    folder = write_tiny(tmp_path_factory.mktemp("benchmarks") / "model", num_hidden_layers=1)
    return models.load(folder, "float32")


def test_variants_alternate():
    order = []
    variants = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert timing.time_rounds(variants, 2, "trial") == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert "".join(order) == "baabba"
    assert timing.time_rounds(variants, 1, "trial", warm_up=False) == {"a": [7.0], "b": [8.0]}
    assert timing.bar("x", timing.ratio([1, 2, 9], [1, 1, 1]), ">=", 2)["met"]
    assert not timing.bar("x", 1.06, "<=", 1.05)["met"]


def test_each_round_decodes_from_the_same_state(llm):
    stream = models.Stream(llm, latency.POLICY)
    stream.prefill([timing.prompt(llm, 300)])
    variant = timing.decode_variant(stream, 10)
    assert variant() > 0 and variant() > 0
    assert int(stream.decoding.position[0]) == 300 + 10


@pytest.mark.parity
@pytest.mark.parametrize("part", latency.PARTS)
def test_latency(part, llm):
    shape = {"layers": 1, "width": 32, "heads": 2, "mlp": 48, "vocab": 64}
    scale = latency.Scale(shape, (100, 400), (32,), 1, 1)
    results = latency.PARTS[part](llm, latency.random_llama(shape), scale)
    names = {"seen": "ratio", "recompute": "most"}
    assert results[names[part]]


def test_kernels_are_timed(monkeypatch):
    """A CPU has no kernel, so there is no bar."""
    tiny = [walk_shapes.WalkBenchShape(2, 16, 1, 8), walk_shapes.WalkBenchShape(2, 16, 2, 8)]
    monkeypatch.setattr(walk_shapes, "PROMPT", dict(zip(("tokens", "pairs"), tiny, strict=True)))
    monkeypatch.setattr(kernels, "LENGTHS", (256,))
    results = kernels.time_kernels(2, quick=True)
    assert set(results["sampled_attention"]["float32, 256 slots"]) == {"dense", "xla"}
    assert results["sign_walk"]["tokens, products and walk"]["xla"]["n"] == 2
    assert results["bars"] == []


def test_each_message_of_a_chat_has_its_seconds(llm, monkeypatch):
    """The start and the compilation are in those of the first message. Warm: compiled before."""
    folders, measured = [], startup.chat

    def watched(model, asked, folder):
        folders.append((folder, len(list(Path(folder).iterdir()))))
        return measured(model, asked, folder)

    monkeypatch.setattr(startup, "chat", watched)
    seconds = startup.chats(str(llm.path), ["Hello", "And?", "A page " * 60], rounds=1)
    (cold, before), (warm, programs) = folders
    assert cold == warm and before == 0 < programs
    for turns in seconds.values():
        first, *later = [turn["median"] for turn in turns]
        assert len(later) == 2 and first > 4 * max(later)


def test_a_chat_that_ends_is_no_measurement(tmp_path):
    with pytest.raises(SystemExit, match="ended in turn 1"):
        startup.chat(str(tmp_path / "absent"), ["Hello"], "off")
