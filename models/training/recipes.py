"""Recipes: all hyperparameters of a training run, and ready-made presets.

jaxkv data --text BOOKS --vocab-size 4096 --out data
jaxkv pretrain --preset tiny --data data --out run --set sink_variant=token
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jaxkv.errors import UserError, check_choice, suggestion
from jaxkv.models.loading.config import THETA
from jaxkv.models.network.config import Config
from jaxkv.rotary import rotary

SinkVariant = Literal["none", "zero", "token", "two_tokens", "logit"]
Train = Literal["all", "attention", "sinks"]
# `Config.sink_logit` by the recipe's `sink_variant`; it is none for the others.
SINK_LOGIT = {"zero": "zero", "logit": "learned"}
# Fields that --from takes from the model.
ARCHITECTURE = ("layers", "width", "heads", "kv_heads", "mlp")
# Learning rates of --from, by `train`. Sinks are few numbers and start far from their optimum, so
# theirs are higher; sink logits start farthest (evals/results/sinks_distilled.json).
CONTINUED_LR: dict[str, float] = {"all": 1e-4, "attention": 1e-4, "sinks": 1e-2}
SINK_LOGITS_LR = 1e-1  # where only sink logits are trained


@dataclass(frozen=True)
class Recipe:
    """All hyperparameters of a training run; with the data and the seed they determine it."""

    # The model: Llama blocks, embedding and head in one matrix.
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    context: int
    # The sink variant (StreamingLLM, section 3.3): none, softmax with 1 added to its sum, one or
    # two sink tokens before every sample, or a learned logit per head.
    sink_variant: SinkVariant = "none"
    # The weights that are updated. All but `all` need a model to start from.
    train: Train = "all"
    # The tokens that a query attends to, its own included; 0: all. For --from with sinks that are
    # no tokens: logits learn to replace the first tokens if queries cannot see them.
    window: int = 0
    # A step: samples of `context` tokens each, and the number of parts for accumulation.
    batch_size: int = 8
    grad_accum_steps: int = 1
    steps: int = 1000
    # The optimizer. warmup is a share of the steps, final_lr_ratio a share of lr.
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    final_lr_ratio: float = 0.1
    warmup: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    z_loss: float = 1e-4
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    # What the backward pass computes again: nothing, or each layer from its stored input. Then
    # activations need a fraction of the memory (evals/results/remat.json).
    remat: Literal["none", "layers"] = "none"
    # Logging and checkpoints, in steps.
    log_every: int = 10
    eval_every: int = 250
    save_every: int = 250
    valid_samples: int = 64


CONTINUED_FIELDS = ("train", "window")  # fields of runs that start from a model
# Fields that may change when a run is resumed.
MAY_CHANGE = ("remat", "log_every", "eval_every", "save_every", "valid_samples")

PRESETS: dict[str, Recipe] = {
    # A sink token at work in a minute on a laptop: one head that has nothing to do most of the
    # time, and an MLP too small to take back what it adds. Plain softmax grows no sink here. Not
    # for text: letters.py makes the data, evals/results/backcopy.json has time and loss.
    "backcopy": Recipe(
        layers=1, width=64, heads=1, kv_heads=1, mlp=16, context=48,
        batch_size=64, steps=800, lr=5e-3, z_loss=0.0,
        log_every=100, eval_every=100, save_every=800,
    ),
    # 3.2 million weights at a vocabulary of 4,096, 5 million tokens: for the CPU of a laptop. Its
    # loss is in evals/results/emergence.json, its speed in mfu.json.
    "tiny": Recipe(
        layers=6, width=192, heads=6, kv_heads=3, mlp=512, context=512,
        batch_size=8, steps=1250, lr=2e-3,
    ),
    # The model in the package, with the shape of tiny: 16 million tokens. Its time and loss are in
    # evals/results/default_model.json.
    "default": Recipe(
        layers=6, width=192, heads=6, kv_heads=3, mlp=512, context=512, sink_variant="token",
        batch_size=8, steps=4000, optimizer="muon", lr=7e-3, final_lr_ratio=0.02,
    ),
    # 28 million weights at a vocabulary of 4,096: one GPU or TPU. By the operations that its 330
    # million tokens take, three minutes of an H100 at 45 % of its peak. The record emergence is of
    # a quarter of these tokens.
    "small": Recipe(
        layers=8, width=512, heads=8, kv_heads=8, mlp=1408, context=1024,
        batch_size=64, grad_accum_steps=4, steps=5000, lr=1e-3,
    ),
    # The paper's 160M models (section 3.3): the recipe of Pythia-160M at a batch of 256, whose
    # 143,000 steps of 524,288 tokens take Adam at 6e-4 down to 6e-5 by a cosine after 1 % of
    # warm-up, betas 0.9 and 0.95, decay 0.1, clip 1.0, in float16 on the Pile. Pythia's blocks work
    # in parallel, rotate a quarter of each head and have an untied output head; these are Llama's,
    # in bfloat16, with a z-loss. In eight parts, for the memory of one GPU: 75 thousand
    # million tokens, by their operations 38 hours of an H100 at 45 % of its peak. The record
    # sink_tables is of a thousandth of these tokens, and of a vocabulary of 16,384 (Pythia:
    # 50,304), so its models have 98 million weights.
    "160m": Recipe(
        layers=12, width=768, heads=12, kv_heads=12, mlp=2048, context=2048,
        batch_size=256, grad_accum_steps=8, steps=143_000, lr=6e-4,
    ),
}  # fmt: skip


def decoder_config(recipe: Recipe, vocab: int, bos: int | None, eos: int) -> Config:
    """The decoder that a recipe trains."""
    if recipe.width % recipe.heads or recipe.heads % recipe.kv_heads:
        raise UserError(
            "heads must divide width, and kv_heads must divide heads, got "
            f"width={recipe.width}, heads={recipe.heads}, kv_heads={recipe.kv_heads}; change one"
        )
    head_dim = recipe.width // recipe.heads
    return Config(
        family="llama",
        vocab=vocab,
        width=recipe.width,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        head_dim=head_dim,
        mlp=recipe.mlp,
        norm_eps=1e-5,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm="none",
        windows=(None,) * recipe.layers,
        context=recipe.context,
        dtype="float32",
        encoding=rotary(head_dim, THETA),
        bos=bos,
        eos=(eos,),
        sink_logit=SINK_LOGIT.get(recipe.sink_variant, "none"),
    )


def read_recipe(preset: str, settings: Iterable[str] = ()) -> Recipe:
    """A preset with some fields replaced, each written as field=value.

    Raises UserError for an unknown preset, field or value.
    """
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}{suggestion(preset, PRESETS)}")
    recipe = _with_settings(PRESETS[preset], settings)
    if recipe.train != "all" or recipe.window:
        raise UserError(
            f"a model that starts from nothing trains all weights without a window, got "
            f"train={recipe.train} and window={recipe.window}; name a model with --from"
        )
    return recipe


def recipe_from(config: Config, settings: Iterable[str] = ()) -> Recipe:
    """The recipe that continues the training of a model, with some fields replaced.

    Raises UserError for an unknown field or value, a field that the model decides, a context longer
    than the model's, sinks that differ from the model's own, and sinks without a weight to train.
    """
    settings = list(settings)
    variant_of = {sink_logit: variant for variant, sink_logit in SINK_LOGIT.items()}
    model_sinks = variant_of.get(config.sink_logit)
    start = Recipe(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        mlp=config.mlp,
        context=config.context,
        sink_variant=model_sinks or "none",
        warmup=0.05,
        z_loss=0.0,
    )
    recipe = _with_settings(start, settings)
    changed = [field for field in ARCHITECTURE if getattr(recipe, field) != getattr(start, field)]
    if changed:
        raise UserError(
            f"--from takes {', '.join(ARCHITECTURE)} from the model, got another {changed[0]}; "
            "leave it out"
        )
    if recipe.context > config.context:
        raise UserError(
            f"context must be at most the model's {config.context}, got {recipe.context}; set a "
            "shorter one"
        )
    if model_sinks is not None and recipe.sink_variant != model_sinks:
        raise UserError(
            f"this model was trained with sink_variant={model_sinks}, got {recipe.sink_variant}; "
            "keep its own"
        )
    if recipe.train == "sinks" and recipe.sink_variant in ("none", "zero"):
        raise UserError(
            f"sink_variant={recipe.sink_variant} has no weights, so train=sinks has nothing to "
            "train; set sink_variant=token, two_tokens or logit"
        )
    if recipe.window and recipe.sink_variant in ("token", "two_tokens"):
        raise UserError(
            f"a window of {recipe.window} tokens loses a sink token, got "
            f"sink_variant={recipe.sink_variant}; set window=0, or sink_variant=none, zero or logit"
        )
    if not any(setting.startswith("lr=") for setting in settings):
        logits_alone = recipe.train == "sinks" and recipe.sink_variant == "logit"
        lr = SINK_LOGITS_LR if logits_alone else CONTINUED_LR[recipe.train]
        recipe = dataclasses.replace(recipe, lr=lr)
    return recipe


def _with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """A recipe with fields replaced, each written as field=value."""
    kinds = typing.get_type_hints(Recipe)
    chosen = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise UserError(
                f"a setting must be field=value, got {setting!r}; write one such as steps=100"
            )
        if field not in kinds:
            known = suggestion(field, kinds)
            raise UserError(f"a setting must name a field of the recipe, got {field!r}{known}")
        chosen[field] = _value(field, kinds[field], value)
    recipe = dataclasses.replace(recipe, **chosen)
    if recipe.batch_size % recipe.grad_accum_steps:
        raise UserError(
            f"grad_accum_steps must divide batch_size, got {recipe.grad_accum_steps} and "
            f"{recipe.batch_size}; choose another batch_size"
        )
    return recipe


MIN_VALUES: dict[str, float] = {"final_lr_ratio": 0, "warmup": 0, "beta1": 0, "beta2": 0,
                           "weight_decay": 0, "z_loss": 0, "seed": 0, "window": 0,
                           "context": 4}  # fmt: skip
MAX_VALUES: dict[str, float] = {"final_lr_ratio": 1, "warmup": 1, "beta1": 0.999999,
                          "beta2": 0.999999, "seed": 2**32 - 1}  # fmt: skip


def _value(field: str, kind: Any, text: str) -> Any:
    if typing.get_origin(kind) is Literal:
        check_choice(field, text, typing.get_args(kind))
        return text
    low = MIN_VALUES.get(field, 1 if kind is int else 1e-12)
    high = MAX_VALUES.get(field, 2**31 - 1 if kind is int else 1e38)  # within int32 and float32
    noun = "a whole number" if kind is int else "a number"
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        has_limit = field in MAX_VALUES or (value is not None and value > high)
        span = f"from {low} to {high}" if has_limit else f"of at least {low}"
        raise UserError(f"{field} must be {noun} {span}, got {text!r}; set such a number")
    return value
