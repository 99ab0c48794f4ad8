"""Continued training of a model, in whole or in part, and sinks in front of a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.serving import Language, make_model
from jaxkv.models.loading import sinks
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.source import ModelSource
from jaxkv.models.training import continued, data, training
from jaxkv.models.training.pretrain import pretrain
from jaxkv.models.training.recipes import recipe_from
from jaxkv.state.sharding import mesh_of
from tests.models.training_data import write_tokens
from tests.seldom import seldom
from tests.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")

FEW = ("context=16", "batch_size=8", "steps=6", "log_every=1", "eval_every=3", "save_every=1",
       "valid_samples=8", "lr=1e-2")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with tied weights, without a BOS in front of texts."""
    return write_tiny(tmp_path_factory.mktemp("model") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def texts(folder, tmp_path_factory) -> data.DataFolder:
    """A data folder with the tokenizer of that model."""
    return write_tokens(tmp_path_factory.mktemp("tokens"), vocab=None, tokenizer=folder)


def start(folder, *settings):
    base = continued.open_base(folder)
    return base, recipe_from(base.config, [*FEW, *settings])


def begin(folder, texts, *settings, mesh=None):
    """The base of a run, its setting, and its trained and frozen initial weights."""
    base, recipe = start(folder, *settings)
    setting = base.setting(recipe, texts, mesh)
    return base, setting, *base.weights(setting, texts.id_of(data.END))


def steps(folder, texts, count, *settings, mesh=None):
    """The state after `count` steps, the frozen weights, and the metrics of the last step."""
    _, setting, weights, frozen = begin(folder, texts, *settings, mesh=mesh)
    trained = training.init(setting, weights)
    for step in range(count):
        runs = data.batch(texts, "train", 0, step, 8, 16)
        trained, metrics = training.update(setting, trained, setting.split(runs), frozen)
    return trained, frozen, metrics


def run(folder, texts, out, *settings, **how):
    base, recipe = start(folder, *settings)
    return pretrain(recipe, texts, out, tell=lambda line: None, base=base, **how)


def published(folder) -> dict[str, np.ndarray]:
    return {name: np.asarray(w) for name, w in models.load(folder, "float32").weights.items()}


def changed(before, after) -> set[str]:
    """The last parts of the names of weights that differ."""
    return {n.rsplit(".", 1)[-1] for n in before if not np.array_equal(before[n], after[n])}


@pytest.mark.parametrize("part", ["all", "attention", "sinks"])
def test_only_the_chosen_weights_change(folder, texts, tmp_path, part):
    """The others have the bits of the model, and no moments."""
    trained, frozen, _ = steps(folder, texts, 3, f"train={part}", "sink_variant=logit")
    moments = sum(leaf.size for leaf in jax.tree.leaves(trained.moments))
    assert moments <= 2 * sum(w.size for w in trained.weights.values()) + 3
    assert {w.dtype.name for w in trained.weights.values()} == {"float32"}
    before, after = published(folder), frozen | trained.weights
    expected = {
        "all": {"embed", "norm", "attn_norm", "mlp_norm", *"qkvo", "gate", "up", "down"},
        "attention": set("qkvo"),
        "sinks": set(),
    }
    assert changed(before, after) == expected[part]
    assert all(np.any(np.asarray(after[f"layers.{i}.sink_logits"])) for i in range(2))


def test_a_sink_token_starts_as_the_token_in_front_of_texts(folder, texts):
    """The first loss of a frozen model with a sink token is that of the model after its EOS."""
    base, setting, weights, frozen = begin(folder, texts, "train=sinks", "sink_variant=token")
    assert weights.keys() == {"sink_tokens"} and setting.front == (258,)
    runs = data.batch(texts, "valid", 0, 0, 4, 16)
    loss = training.mean_loss(setting, weights, jnp.asarray(runs), frozen)
    first = base.tokenizer.front[0]
    llm = models.load(folder)
    expected = [
        np.concatenate(list(models.losses(llm, [first, *row[1:]], "full"))) for row in runs.tolist()
    ]
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)


def mean_loss(llm, texts) -> float:
    """The mean loss of the validation samples, each with the model's front in place of its own."""
    front, parts = llm.tokenizer.front, []
    for row in data.batch(texts, "valid", 0, 0, 8, 16).tolist():
        ids = [*front, *row[len(front) :]]
        losses = np.concatenate(list(models.losses(llm, ids, "full")))
        parts.append(losses[max(0, len(front) - 1) :])  # a second sink token is not predicted
    return float(np.mean(parts))


def logged(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["token", seldom("two_tokens"), seldom("logit")])
def test_a_file_of_sinks_has_the_losses_of_its_run(folder, texts, tmp_path, kind):
    path = run(folder, texts, tmp_path / "run", "train=sinks", f"sink_variant={kind}")
    assert path == tmp_path / "run" / sinks.FILE and path.stat().st_size < 10_000
    llm, plain = models.load(folder, sinks=path), models.load(folder)
    assert changed(plain.weights, llm.weights) == set()
    front = {"token": (258,), "two_tokens": (258, 259)}.get(kind, (0,))
    assert llm.tokenizer.front == front
    assert mean_loss(llm, texts) == pytest.approx(logged(tmp_path / "run")[-1]["valid_loss"], 1e-5)
    assert mean_loss(llm, texts) < mean_loss(plain, texts) - 1e-4
    answer = models.generate(llm, "the cat", "streaming:sinks=1,window=15", 20)
    assert answer.prompt_tokens == len(front) + 7 and max(answer.tokens) < 258
    score = models.score(llm, llm.tokenizer.encode("the cat sat"), "full")
    assert len(score.losses) == 11  # neither the BOS nor a sink is predicted
    int8 = models.load(folder, sinks=path, weights="int8")
    assert mean_loss(int8, texts) == pytest.approx(mean_loss(llm, texts), rel=0.02)


@pytest.mark.parametrize(
    "kind", [seldom("none"), "token", seldom("two_tokens"), seldom("zero"), seldom("logit")]
)
def test_a_model_folder_has_the_losses_of_its_run(folder, texts, tmp_path, kind):
    path = run(folder, texts, tmp_path / "run", f"sink_variant={kind}", "lr=1e-3")
    llm = models.load(path)
    front = {"token": (258,), "two_tokens": (258, 259)}.get(kind, (0,))
    assert llm.tokenizer.front == front and llm.config.context == 512
    assert llm.config.vocab == max(258, *(i + 1 for i in front))
    assert mean_loss(llm, texts) == pytest.approx(logged(tmp_path / "run")[-1]["valid_loss"], 1e-5)


def test_trained_attention_comes_with_its_sink(folder, texts, tmp_path):
    """The folder has the model, the file its sink; neither fits another model.

    A run that is stopped after a step and resumed writes the same bits.
    """
    settings = "train=attention", "sink_variant=token", "lr=1e-3"
    path = run(folder, texts, tmp_path / "run", *settings)
    file = tmp_path / "run" / sinks.FILE
    assert run(folder, texts, tmp_path / "cut", *settings, stopped=lambda: True) is None
    run(folder, texts, tmp_path / "cut", *settings)
    for name in ("hf/model.safetensors", sinks.FILE):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    llm = models.load(path, sinks=file)
    assert mean_loss(llm, texts) == pytest.approx(logged(tmp_path / "run")[-1]["valid_loss"], 1e-5)
    assert changed(published(folder), published(path)) == set("qkvo")
    with pytest.raises(UserError, match="belong to another model"):
        models.load(folder, sinks=file)


@pytest.mark.parametrize("part", ["all", "attention"])
def test_export_reads_only_frozen_weights_again(folder, texts, tmp_path, monkeypatch, part):
    """No trained weight of the base is in memory beside the result."""
    base, setting, trained, frozen = begin(folder, texts, f"train={part}", "sink_variant=token")
    placed, read = [], ModelSource.weights

    def weights(*arguments, **named):
        loaded = read(*arguments, **named)
        placed.append({name for name, weight in loaded.items() if weight is not None})
        return loaded

    monkeypatch.setattr(ModelSource, "weights", weights)
    path = base.export(tmp_path / "run", setting, trained | frozen, writes=True)
    assert placed == ([] if part == "all" else [set(frozen)])
    after = published(path)
    rows = {name: w[:258] if name == "embed" else w for name, w in after.items()}
    assert not changed(published(folder), rows)


def test_several_devices_agree_on_frozen_weights(folder, texts):
    settings = "train=attention", "sink_variant=token"
    (alone, _, metrics), (spread, _, metrics_spread) = (
        steps(folder, texts, 2, *settings, mesh=mesh) for mesh in (None, mesh_of("data=2"))
    )
    assert float(metrics.loss) == pytest.approx(float(metrics_spread.loss), rel=1e-5)
    sink_tokens = (np.asarray(state.weights["sink_tokens"]) for state in (alone, spread))
    np.testing.assert_allclose(*sink_tokens, atol=1e-4)


@pytest.mark.parametrize("part", ["sinks", "all"])
def test_the_plan_has_the_bytes_of_the_run(folder, texts, part):
    _, setting, weights, frozen = begin(folder, texts, f"train={part}", "sink_variant=token")
    memory = training.plan_memory(setting)
    trained = training.init(setting, weights)
    for size, tree in zip(memory[:3], (trained.weights, trained.moments, frozen), strict=True):
        assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    runs = setting.recipe.batch_size * (setting.recipe.context + 1) * 4
    assert memory.temporaries > 0
    # The rest are numbers of the state, the metrics, and pointers to the results.
    assert sum(memory[:4]) + runs <= memory.total <= sum(memory[:4]) + runs + 2048


def test_a_window_hides_the_first_tokens(folder, texts):
    """The losses are those of a cache of that size, the query's own token included."""
    _, setting, weights, frozen = begin(
        folder, texts, "train=sinks", "sink_variant=logit", "window=5"
    )
    runs = data.batch(texts, "valid", 0, 0, 4, 16)
    actual = training.mean_loss(setting, weights, jnp.asarray(runs), frozen)
    llm, loss = models.load(folder), []
    config = dataclasses.replace(llm.config, sink_logit="zero")  # the logits start at 0
    zero = dataclasses.replace(llm, config=config)
    for row in runs.tolist():
        loss += list(models.losses(zero, [llm.tokenizer.front[0], *row[1:]], "window:window=5"))
    assert float(actual) == pytest.approx(np.concatenate(loss).mean(), rel=1e-5)


BAD = {
    "context=1024": "context must be at most the model's 512, got 1024; set a shorter one",
    "width=64": "takes layers, width, .* from the model, got another width; leave it out",
    "train=sinks": "sink_variant=none has no weights, so train=sinks has nothing to train; set",
    "window=8 sink_variant=token": "of 8 tokens loses a sink token, got sink_variant=token; set",
    "train=head": "train must be one of all, attention, sinks, got 'head'",
}


@pytest.mark.parametrize("setting", BAD)
def test_bad_settings_are_refused(folder, setting):
    with pytest.raises(UserError, match=BAD[setting]):
        start(folder, *setting.split())


def test_sink_logits_alone_have_a_learning_rate_of_their_own(folder):
    config = continued.open_base(folder).config
    for settings, lr in (
        (["train=sinks", "sink_variant=logit"], 0.1),
        (["train=sinks", "sink_variant=token"], 0.01),
        (["sink_variant=logit"], 1e-4),
        (["train=sinks", "sink_variant=logit", "lr=0.5"], 0.5),
    ):
        assert recipe_from(config, settings).lr == lr


def test_data_of_another_tokenizer_are_refused(folder, tokens):
    base, recipe = start(folder)
    with pytest.raises(UserError, match=r"have another tokenizer than .*; make them with `jaxkv"):
        base.setting(recipe, tokens)


def test_a_folder_belongs_to_one_model(folder, texts, tmp_path):
    run(folder, texts, tmp_path / "run", "train=sinks", "sink_variant=token", "steps=1")
    other_model = write_tiny(tmp_path / "other", seed=1, tie_word_embeddings=True)
    with pytest.raises(UserError, match="of another run: model was"):
        run(other_model, texts, tmp_path / "run", "train=sinks", "sink_variant=token", "steps=1")


def test_bad_files_of_sinks_are_refused(folder, texts, tmp_path):
    path = run(folder, texts, tmp_path / "run", "train=sinks", "sink_variant=token", "steps=1")
    other_model = write_tiny(tmp_path / "other", seed=1, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"belong to another model .*; name that model, or sinks"):
        models.load(other_model, sinks=path)
    with pytest.raises(UserError, match=r"cannot read the sinks .*absent: .*; name a sinks"):
        models.load(folder, sinks=tmp_path / "absent")
    for raw in (b"", b"text", (folder / "model.safetensors").read_bytes(), path.read_bytes()[:-4]):
        (tmp_path / "bad").write_bytes(raw)
        with pytest.raises(UserError, match="is no file of sinks"):
            models.load(folder, sinks=tmp_path / "bad")


def test_the_engine_refuses_learned_sink_tokens(folder, texts, tmp_path):
    path = run(folder, texts, tmp_path / "run", "train=sinks", "sink_variant=token", "steps=1")
    with pytest.raises(UserError, match="got learned sink tokens from a file; give --sinks const"):
        make_model(models.load(folder, sinks=path))


def test_a_chat_begins_with_the_constant_sink(folder):
    """Once per stream, in front of what the template writes."""
    llm = models.load(folder, sinks="constant:\\n")
    (line,) = llm.tokenizer.sinks
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    llm = dataclasses.replace(llm, chat=Chat(template, ()))
    talk = models.Conversation(llm, "streaming:sinks=1,window=31")
    asked = "".join(talk.say("hi", max_new_tokens=3, ignore_eos=True))
    assert talk.position == 1 + len("[hi]") + 3 and talk._tokens_of("you")[0] != line
    assert Language(llm, "tiny", 1).render([{"role": "user", "content": "hi"}])[0] == line
    assert asked == talk.output.text


def test_a_constant_sink_begins_every_text(folder):
    """The token is the first of every text; a BOS that the model expects is a constant already."""
    plain = models.load(folder).tokenizer
    assert plain.front == (0,)
    assert models.load(folder, sinks="constant").tokenizer.front == (0,)
    named = models.load(folder, sinks="constant:\\n").tokenizer
    (line,) = plain.encode("\n", bos=False)
    assert named.encode("ab") == [line, *plain.encode("ab")] and named.sinks == (line,)
    with pytest.raises(UserError, match="a constant sink is one token, and 'ab' has 2; name"):
        models.load(folder, sinks="constant:ab")


def test_the_data_have_the_tokens_of_the_model(folder, texts):
    tokenizer = models.load(folder).tokenizer
    ids = texts.run("valid", 0, texts.count("valid"))
    assert ids[-1] == texts.id_of(data.END) == 1  # the EOS: this model has no <|endoftext|>
    (path,) = [f["file"] for f in texts.manifest["files"] if "valid" in f["documents"]]
    assert len(ids) - 1 == len(tokenizer.decode(ids[:-1].tolist()).encode())
    assert ids.max() < models.load(folder).config.vocab == 258
    assert path.endswith(".txt")


def test_frozen_weights_have_the_dtype_of_the_computation(folder, texts):
    _, _, weights, frozen = begin(folder, texts, "train=attention", "dtype=bfloat16")
    assert {w.dtype.name for w in frozen.values()} == {"bfloat16"}
    assert {w.dtype.name for w in weights.values()} == {"float32"}
