"""`jaxkv serve`: a model over HTTP, with concurrent requests of OpenAI's clients."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.cli import flags
from jaxkv.cli.files import read_text
from jaxkv.cli.interrupts import INTERRUPTED, on_interrupt
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jaxkv.engine import Engine, PrefixConfig
    from jaxkv.models import Llm
    from jaxkv.server import ServerConfig

KEYS = "JAXKV_API_KEYS"
COUNT = flags.whole(1)
# Group, flag, type, default, metavar, help.
FLAGS = (
    ("callers", "host", str, "127.0.0.1", "H", "address to listen on; by default nobody but this "
     "machine reaches it"),
    ("callers", "port", flags.whole(0, 65535), 8000, "N", "0 takes a free one, and says which"),
    ("callers", "name", str, None, "NAME", "what clients call the model; by default as its folder"),
    ("callers", "api-key-file", str, None, "F", "a line for each caller: KEY, or KEY SALT where "
     "some share prefixes; without it nobody needs a key"),
    ("callers", "per-key", COUNT, None, "N", "answers of one key at a time; by default no limit"),
    ("engine", "slots", COUNT, 16, "N", "answers that are written at a time"),
    ("engine", "max-len", flags.whole(1, 2**31 - 1), 4096, "N", "tokens of a prompt and its "
     "answer; they take memory where the policy's cache grows with them"),
    ("engine", "chunk", COUNT, 128, "N", "tokens of a prompt read at a time: the grid on which "
     "prefixes are shared"),
    ("engine", "queue", COUNT, 256, "N", "answers that may wait for a slot; others are sent away"),
    ("engine", "queue-tokens", COUNT, 2**20, "N", "tokens of prompts that may wait"),
    ("prefixes", "prefix-slots", flags.whole(0), 256, "N", "chunks or states of prompts that are "
     "kept for others that begin alike; 0 keeps none"),
    ("prefixes", "prefix-host-slots", flags.whole(0), 0, "N", "chunks or states in the memory of "
     "the host besides"),
    ("prefixes", "prefix-order", str, "lru", "O", "eviction order of the chunks of append-only "
     "caches: lru (least recently used), lru-deepest-first (and among those of one request the "
     "deepest) or lfu (least often used)"),
    ("prefixes", "prefix-where", str, "last+branch", "W", "chunk boundaries at which the states of "
     "evicting caches are stored: last, branch (where prompts part), every=N; joined by +"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"API keys may also be lines of the environment variable {KEYS}; on the command line other "
        "users would see them. Ctrl-C waits some seconds for answers in progress."
    )
    flags.add_policy(parser)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for title, name, kind, default, metavar, text in FLAGS:
        group = groups.get(title) or parser.add_argument_group(title)
        groups[title] = group
        shown = text if default is None else f"{text} (default {default})"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=shown)
    groups["prefixes"].add_argument(
        "--no-cached-tokens", action="store_true",
        help="do not report cached prompt tokens: the count reveals others' prompts",
    )  # fmt: skip
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    with Progress("loading"):
        from jaxkv import server
    keys, prefixes = read_keys(args.api_key_file), prefixes_of(args)
    tenants = server.parse_api_keys(*keys) if keys else ()
    if args.name is not None:
        check_name(args.name)
    if args.per_key is not None and not tenants:
        raise UserError("--per-key limits each API key; give --api-key-file")
    # Bind before minutes of loading, so that a port in use is reported at once.
    listener = server.bind(args.host, args.port, server.ServerConfig.write_seconds)
    with listener:
        if not (tenants or is_loopback(listener)):
            warnings.warn(
                "whoever reaches this machine may send requests; give --api-key-file, or no --host",
                stacklevel=2,
            )
        llm = flags.load_model(args, args.policy)
        engine = make(args, llm, prefixes)
        from jaxkv.models.language import Language

        language = Language(llm, check_name(args.name or name_of(args, llm)))
        app = server.application(engine, language, tenants, server_config(args, llm))
        server.begin_listening(listener)  # only now: before, a probe must fail
        print(
            f"jaxkv: serving {language.name} on {server.url(listener)} "
            f"(policy {args.policy}, slots {args.slots})",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        pressed, running = threading.Event(), server.make_server(app)

        def leave() -> None:
            running.should_exit = True

        def stop() -> None:
            pressed.set()
            leave()

        engine.start()
        try:
            # The server handles both signals itself, and passes them on when it has ended.
            with on_interrupt(stop), on_interrupt(leave, signal.SIGTERM):
                running.run(sockets=[listener])
        finally:
            engine.stop()
    return INTERRUPTED if pressed.is_set() else 0


def read_keys(path: str | None) -> tuple[str, str] | None:
    """The lines of keys and their source; None where there are no keys."""
    content = os.environ.get(KEYS)
    if path is not None and content is not None:
        raise UserError(f"keys are given twice, by --api-key-file and {KEYS}; give them once")
    if path is not None:
        return read_text(path, "key file"), path
    return None if content is None else (content, KEYS)


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def check_name(name: str) -> str:
    """The name, if clients can send it; raises UserError otherwise."""
    from jaxkv.engine.request import is_unicode
    from jaxkv.server.fields import TEXT

    if not 0 < len(name) <= TEXT or not is_unicode(name):
        raise UserError(
            f"--name must be Unicode of 1 to {TEXT} characters, got {name!r:.60}; give another"
        )
    return name


def name_of(args: argparse.Namespace, llm: Llm) -> str:
    """The default model name: a Hub id unchanged, or the name of the folder."""
    if args.model is None or Path(args.model).is_dir():
        return llm.folder.resolve().name
    return args.model


def prefixes_of(args: argparse.Namespace) -> PrefixConfig | None:
    """The prefix cache settings, checked before a model is loaded."""
    from jaxkv.engine import PrefixConfig

    if not args.prefix_slots:
        if args.prefix_host_slots:
            raise UserError(
                f"--prefix-host-slots extend --prefix-slots, got {args.prefix_host_slots} and "
                "none; give --prefix-slots too"
            )
        return None
    fields = (args.prefix_slots, args.prefix_order, args.prefix_where, args.prefix_host_slots)
    try:
        return PrefixConfig(*fields)
    except UserError as error:  # it begins with the name of a field
        raise UserError(f"--prefix-{error}") from None


def make(args: argparse.Namespace, llm: Llm, prefixes: PrefixConfig | None) -> Engine:
    """The engine, compiled and ready."""
    with Progress("compiling"):
        from jaxkv.models.serving import make_engine

        return make_engine(
            llm, args.policy, max_batch=args.slots, max_len=args.max_len, chunk=args.chunk,
            queue=args.queue, queue_tokens=args.queue_tokens, prefix_cache=prefixes, seed=args.seed,
        )  # fmt: skip


def server_config(args: argparse.Namespace, llm: Llm) -> ServerConfig:
    from jaxkv import server

    settings = [
        llm.folder.name, llm.dtype, args.policy, args.max_len, args.chunk, args.seed,
        flags.versions(),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return server.ServerConfig(
        max_in_flight=args.slots + args.queue,
        max_per_key=args.per_key,
        max_answers=args.slots + args.queue,
        max_batch=args.slots,
        max_waiting_tokens=args.queue_tokens,
        report_cached=not args.no_cached_tokens,
        fingerprint=f"fp_{digest[:10]}",
    )
