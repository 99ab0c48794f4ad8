"""`jaxkv policies`: every cache policy with its fields, memory and source."""

from __future__ import annotations

import argparse

from jaxkv.cli import flags
from jaxkv.cli.files import print_json

NOTE = """\
A policy is written name or name:field=value,...; by layer 0=full;*=streaming:sinks=4,window=252.
Memory is in bytes a row and layer: K kv heads, H head dim, itemsize of the dtype."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from jaxkv.stack import describe

    policies = describe()
    if args.json:
        print_json({"policies": policies})
        return 0
    for policy in policies:
        fields = [f"{n}={f['default']} ({f['type']})" for n, f in policy["fields"].items()]
        print(f"{policy['name']}: {policy['summary']}")
        print(f"  fields  {', '.join(fields) or 'none'}")
        print(f"  memory  {policy['bytes_per_row_and_layer']}")
        print(f"  source  {policy['source']}\n")
    print(NOTE)
    return 0
