"""`jaxkv policies`: list the cache policies, describe one, or show the caches of a model's layers.

Of each it shows the fields, the memory, the source, and where docs/which_cache.md takes it. With
--model it shows the policy and the bytes of each layer, which may have a window of its own.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap

from jaxkv import defaults
from jaxkv.cli import flags
from jaxkv.cli.files import print_json
from jaxkv.errors import UserError, suggestion

NOTE = """\
A policy is written name or name:field=value,...; layers can differ, as in
0=full;*=streaming:sinks=4,window=252.
Memory is that of one sequence in one layer of SmolLM2-135M in float32, at its largest."""
MORE = "`jaxkv policies NAME` describes a policy and its fields."
WIDTH = 88  # columns of prose
INDENT = " " * 10


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="POLICY", help="policy to describe, or to show in a model"
    )
    flags.add(
        parser,
        ("tokens", flags.integer(1), None, "N", "with --model: tokens of the sequence (default: "
         "the trained context)"),
    )  # fmt: skip
    flags.add_json(parser)
    flags.add_model(parser, mesh=False, seed=False)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        return show_layers(args)
    for name in ("tokens", "dtype", "weights", "sinks"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} is of a model, and there is none; give --model")
    from jaxkv.models.tools.choices import CHOICES
    from jaxkv.policies import POLICIES
    from jaxkv.policy_spec import describe
    from jaxkv.state.memory import show

    if args.name is not None and args.name not in POLICIES:
        raise UserError(f"unknown policy {args.name!r}{suggestion(args.name, POLICIES)}")
    policies = [
        policy
        | {"about": about(POLICIES[policy["name"]])}
        | {"choices": [c._asdict() for c in CHOICES if c.policy == policy["name"]]}
        for policy in describe()
        if args.name in (None, policy["name"])
    ]
    if args.json:
        print_json({"policies": policies})
        return 0
    for policy in policies:
        fields = [f"{n}={f['default']} ({f['type']})" for n, f in policy["fields"].items()]
        print(f"{policy['name']}: {policy['summary']}")
        print(f"  fields  {', '.join(fields) or 'none'}")
        memory = (f"{show(size)} at {int(n):,} tokens" for n, size in policy["bytes"].items())
        print(f"  memory  {', '.join(memory)}")
        print(f"  source  {policy['source']}")
        for choice in policy["choices"]:
            text = f"for {choice['text']}, {choice['need']}, {choice['device']}: {choice['reason']}"
            print(textwrap.fill(text, WIDTH, initial_indent="  take it ", subsequent_indent=INDENT))
        print()
    if args.name is None:
        print(f"{NOTE}\n{MORE}")
    else:
        print(f"{policies[0]['about']}\n\n{NOTE}")
    return 0


def show_layers(args: argparse.Namespace) -> int:
    """The policy and the bytes of every layer of --model; its weights are not read."""
    policy = args.name or defaults.POLICY
    llm, _ = flags.open_model(args, policy)
    from jaxkv.models.tools import layers
    from jaxkv.state.memory import show

    tokens = args.tokens or llm.config.context
    rows = layers.describe(llm, policy, tokens)
    total = sum(row["bytes"] for row in rows)
    if args.json:
        print_json({"policy": policy, "tokens": tokens, "layers": rows, "bytes": total})
        return 0
    print(layers.table(rows))
    print(f"\none sequence of {tokens:,} tokens in {llm.dtype}: {show(total)}")
    return 0


def about(kind: type) -> str:
    """The docstring of the policy class, wrapped for a terminal."""
    paragraphs = inspect.getdoc(kind).split("\n\n")
    return "\n\n".join(textwrap.fill(p, WIDTH, break_on_hyphens=False) for p in paragraphs)
