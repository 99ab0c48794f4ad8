"""`jaxkv serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv import defaults
from jaxkv.cli import flags
from jaxkv.cli.files import read_text
from jaxkv.cli.interrupts import INTERRUPTED, disregard, on_interrupt
from jaxkv.cli.progress import Progress, say
from jaxkv.errors import UserError, warn

if TYPE_CHECKING:
    from jaxkv.models import Llm
    from jaxkv.serve.engine import Engine, PrefixConfig
    from jaxkv.serve.engine.plan import ServingMemory
    from jaxkv.serve.http import ApiKeys, Drain, ServerConfig
    from jaxkv.serve.http.server import Server

KEYS, ADMIN_KEYS = "JAXKV_API_KEYS", "JAXKV_ADMIN_KEYS"
COUNT = flags.integer(1)
FAILED = 70  # the exit code if the engine fails
STOP = 5.0  # seconds for the engine's last step
# Group of flags -> name, type, default, metavar and help of each, as flags.add takes them.
FLAGS = {
    "server": (
        ("host", str, "127.0.0.1", "HOST", "address to listen on; 127.0.0.1 accepts "
         "connections from this machine only"),
        ("port", flags.integer(0, 65535), 8000, "N", "port to listen on; 0 picks a free port "
         "and prints it"),
        ("served-model-name", str, None, "NAME,...", "names of the model in the API, of which "
         "answers state the first (default: the Hub id, or the name of the model folder or file)"),
        ("chat-template", str, None, "FILE", "chat template in Jinja, in place of the "
         "model's own"),
        ("api-key-file", str, None, "FILE", "file of accepted API keys, one per line: KEY, "
         "KEY SALT, then perhaps name=NAME, requests=N and tokens=N, both a minute; keys with "
         "equal salts share a prefix cache, and usage is reported by name (default: no key is "
         "required)"),
        ("admin-key-file", str, None, "FILE", "file of admin keys, one per line; with API "
         "keys, /metrics needs an admin key (default: there is none)"),
        ("allowed-origins", flags.origins, (), "ORIGINS", "origins of web pages on other sites "
         "that may use the server, such as https://chat.example,http://localhost:3000; * is all "
         "(default: none)"),
        ("per-key", COUNT, None, "N", "maximum number of concurrent answers per API key "
         "(default: half of --max-batch and --queue together)"),
        ("metrics-prefix", flags.metric_name, "jaxkv", "NAME", "prefix of the names of "
         "metrics; routers that know vLLM read the prefix vllm"),
        ("log", flags.one_of("text", "json"), "text", "FORMAT", "text (warnings and errors) or "
         "json (also every request, one object per line) on standard error"),
        ("drain", flags.integer(0), 0, "SECONDS", "after SIGTERM, finish the running answers "
         "for up to so long; meanwhile /health fails and new requests are refused with status 503"),
    ),
    "engine": (
        ("step-timeout", COUNT, 300, "SECONDS", "/health fails while one step of the engine "
         "takes longer"),
        ("memory", flags.memory, None, "SIZE", "device memory for weights, sequences and "
         f"prefixes, such as 4GiB (default: {defaults.MEMORY_SHARE:.0%}% of what is free)"),
        ("max-batch", COUNT, None, "N", "maximum number of sequences that decode together "
         f"(default: {defaults.MAX_BATCH}, or fewer if --memory holds fewer)"),
        ("max-len", flags.integer(2, 2**31 - 1), None, "N", "maximum number of tokens of a "
         f"prompt and its answer together (default: {defaults.GROWING_LEN} for growing caches, "
         f"which reserve memory for it; for other caches {defaults.MAX_TOKENS} for each of the "
         "two)"),
        ("max-prefill-tokens", COUNT, None, "N", "prompt tokens that are prefilled between two "
         "tokens of running answers, in whole chunks, one at least (default: a chunk)"),
        ("max-stall", flags.integer(0), 30, "MILLISECONDS", "about how long running answers wait "
         "for prefills between two tokens; 0 for no limit"),
        ("chunk", flags.integer(1, defaults.MAX_CHUNK), 128, "N", "prompt tokens per prefill call; "
         "prompts share prefixes in multiples of it"),
        ("queue", COUNT, 256, "N", "maximum number of waiting requests; more are refused with "
         "status 503"),
        ("queue-tokens", COUNT, 2**20, "N", "maximum number of prompt tokens of waiting "
         "requests"),
    ),
    "prefix cache": (
        ("prefix-memory", flags.memory, None, "SIZE", "device memory of the prefix cache, "
         "such as 4GiB; 0 disables it (default: what --memory leaves; without --memory, at most "
         f"{defaults.PREFIX_MEMORY // 2**20}MiB)"),
        ("prefix-host-memory", flags.memory, 0, "SIZE", "host memory for prefixes that the "
         "device evicts (default 0)"),
        ("prefix-dir", str, None, "FOLDER", "folder of prefixes that survive a restart, and "
         "of prompts therefore; one server at a time uses it (default: none)"),
        ("prefix-dir-size", flags.memory, None, "SIZE", "maximum bytes of --prefix-dir; the "
         "least recently used prefixes are deleted first (default: "
         f"{defaults.PREFIX_DIR_SIZE // 2**30}GiB)"),
        ("prefix-where", str, None, "WHERE", "chunk boundaries at which snapshots are stored: "
         "last (the last of the prompt), branch (where prompts diverge) or every=N; + joins "
         "several (default: last+branch)"),
    ),
}  # fmt: skip
# Group of flags -> help of those without a value.
SWITCHES = {
    "server": {
        "allow_special_tokens": "turn added tokens that are written out in chat messages into "
        "their ids, not text",
        "log_probes": "with --log json, also log the requests for /health and /metrics that "
        "succeed",
    },
    "engine": {
        "fixed_batch": "compute --max-batch sequences in every step, however few run: no bit of an "
        "answer then depends on the number of others, and a single client waits longer (default: "
        "the batch grows with load)",
    },
    "prefix cache": {
        "no_cached_tokens": "leave cached_tokens out of the usage, because it reveals other users' "
        "prompts",
    },
}


# The engine splits no sequences: more of them take more servers.
MESH = (
    "mesh",
    str,
    None,
    "model=N",
    "split the KV heads of the model and its caches over N devices; memory is then per device",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"The environment variables {KEYS} and {ADMIN_KEYS} may hold the lines of the key files "
        "instead. SIGHUP reads the key files again; without any it ends the server. Ctrl-C waits "
        "up to 5 seconds for running answers; a second Ctrl-C does not wait. If the engine fails, "
        f"the exit code is {FAILED}."
    )
    flags.add_policy(parser)
    for title, rows in FLAGS.items():
        group = parser.add_argument_group(title)
        flags.add(group, *rows)
        flags.add_switches(group, **SWITCHES[title])
    flags.add_model(parser, mesh=False)
    flags.add(parser, MESH)


def run(args: argparse.Namespace) -> int:
    with Progress("loading"):
        from jaxkv.serve import http as server
    server.raise_descriptor_limit()
    keys, prefixes = read_keys(args), prefixes_of(args)
    names = names_of(args)
    template = read_template(args)
    if args.per_key is not None and not keys.tenants:
        raise UserError("--per-key limits each API key; give --api-key-file")
    if args.log_probes and args.log != "json":
        raise UserError(f"--log-probes needs --log json, got --log {args.log}; give both")
    # Bind before minutes of loading, so that a port in use is reported at once.
    listener = server.bind(args.host, args.port, server.ServerConfig.write_seconds)
    with listener, reload_at_hangup(args, keys), server.log_as(args.log):
        if not (keys.tenants or is_loopback(listener)):
            warn(
                "the server accepts requests from other machines without an API key; give "
                "--api-key-file, or leave --host out"
            )
        llm, load = flags.open_model(args, args.policy, engine=True)
        plan = plan_of(args, llm, has_keys=bool(keys.tenants))
        load()
        names = names or (check_name(name_of(args, llm)),)
        if template is not None:
            llm = replace(llm, chat=replace(llm.chat, template=template, response=None))
        llm = with_usable_response(llm)
        # Before the engine counts compilations.
        fingerprint = fingerprint_of(args, llm, plan.max_batch)
        engine = make(args, llm, plan, prefixes, has_keys=bool(keys.tenants))
        flags.report_unusable_cache(args, llm)
        from jaxkv.models.generation.serving import Language

        language = Language(llm, names[0], allow_special=args.allow_special_tokens)
        with contextlib.suppress(UserError):  # such requests are refused then
            language.matcher("json_object", None)  # the first one takes a third of a second
        config = server_config(args, llm, plan.max_batch, has_keys=bool(keys.tenants))
        config = replace(config, aliases=names[1:], fingerprint=fingerprint)
        drain = server.Drain(args.drain)
        app = server.application(engine, language, keys, config, drain)
        server.begin_listening(listener)  # until the engine is ready, health probes must fail
        ready = (
            f"serving {language.name} on {server.url(listener)} (policy {args.policy}, "
            f"{at_most(plan.max_batch)}; {memory_of(engine, plan)})"
        )
        lost = partial(is_lost, engine, drain)
        code, ended = run_until_stopped(
            engine, server.make_server(app, config, drain, lost), listener, ready
        )
    if not ended:  # Python would wait for the device, which does not answer
        sys.stderr.flush()
        os._exit(code)
    return code


def is_lost(engine: Engine, drain: Drain) -> bool:
    """Whether nobody can be answered any more."""
    return bool(engine.failure) or (drain.has_begun and not engine.healthy)


def run_until_stopped(
    engine: Engine, server: Server, listener: socket.socket, ready: str
) -> tuple[int, bool]:
    """Serve until a signal or a failure; returns the exit code, and whether the engine stopped.

    ready: a line that is printed once signals end the server as they should.
    """
    pressed = threading.Event()

    def leave() -> None:
        server.should_exit = True

    def stop() -> None:
        pressed.set()
        leave()

    engine.start()
    with disregard(signal.SIGTERM):  # a second one, while the engine stops
        try:
            # uvicorn handles both signals itself, and raises them again when it has stopped.
            with on_interrupt(stop), on_interrupt(leave, signal.SIGTERM):
                say(ready)
                server.run(sockets=[listener])
        finally:
            failed, ended = bool(engine.failure), engine.stop(STOP)
    return FAILED if failed else INTERRUPTED if pressed.is_set() else 0, ended


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def names_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The names of --served-model-name; none without the flag."""
    if args.served_model_name is None:
        return ()
    names = tuple(map(check_name, args.served_model_name.split(",")))
    if len(set(names)) < len(names):
        raise UserError(
            f"--served-model-name must give each name once, got {args.served_model_name:.60}; "
            "leave the second one out"
        )
    return names


def read_template(args: argparse.Namespace) -> str | None:
    """The chat template of --chat-template, checked before a model is loaded."""
    if args.chat_template is None:
        return None
    from jaxkv.models.loading.chat import check_template

    template = read_text(args.chat_template, "chat template", may_be_pipe=False)
    try:
        check_template(template)
    except UserError as error:
        raise UserError(
            f"--chat-template {args.chat_template}: {error}; correct it, or leave it out for the "
            "model's own"
        ) from None
    return template


def check_name(name: str) -> str:
    """Returns a model name that clients can send; raises UserError for others."""
    from jaxkv.serve.engine.request import is_unicode
    from jaxkv.serve.http.checks import MAX_TEXT

    if not 0 < len(name) <= MAX_TEXT or not is_unicode(name):
        raise UserError(
            f"--served-model-name must be Unicode of 1 to {MAX_TEXT} characters, got {name!r:.60}; "
            "give another"
        )
    return name


def with_usable_response(llm: Llm) -> Llm:
    """The model; without its `response_template`, and with a warning, where that cannot be used."""
    from jaxkv.models.generation.response_template import response_parser

    if llm.chat.response is None:
        return llm
    try:
        response_parser(llm.chat.response, "")
    except UserError as error:
        warn(f"{error}; until then, thoughts and calls are read in the forms that jaxkv knows")
        return replace(llm, chat=replace(llm.chat, response=None))
    return llm


def name_of(args: argparse.Namespace, llm: Llm) -> str:
    """The default model name: a Hub id unchanged, or the name of the folder or file."""
    if args.model is None or Path(args.model).exists():
        return llm.path.resolve().name
    return args.model


def prefixes_of(args: argparse.Namespace) -> PrefixConfig | None:
    """The prefix cache settings, checked before a model is loaded."""
    from jaxkv.serve.engine import PrefixConfig
    from jaxkv.serve.prefix.folder import PrefixFolder

    if args.prefix_memory == 0:
        for name, value in needing_prefixes(args):
            raise UserError(
                f"{name} needs --prefix-memory, got {value} and 0; give --prefix-memory too"
            )
        return None
    if args.prefix_dir_size is not None and args.prefix_dir is None:
        raise UserError("--prefix-dir-size bounds a folder of prefixes; give --prefix-dir too")
    try:
        config = PrefixConfig(
            memory=args.prefix_memory or PrefixConfig.memory,
            where=PrefixConfig.where if args.prefix_where is None else args.prefix_where,
            host_memory=args.prefix_host_memory,
        )
    except UserError as error:  # the message begins with the name of a field
        raise UserError(f"--prefix-{error}") from None
    if args.prefix_dir is None:
        return config
    if not args.prefix_dir:
        raise UserError("--prefix-dir must name a folder, got an empty name; leave it out for none")
    if args.prefix_dir_size == 0:
        raise UserError("--prefix-dir-size must be at least 1 byte, got 0; try 4GiB")
    size = defaults.PREFIX_DIR_SIZE if args.prefix_dir_size is None else args.prefix_dir_size
    try:
        return replace(config, folder=PrefixFolder(args.prefix_dir, size))
    except UserError as error:
        raise UserError(f"--prefix-dir: {error}") from None


def needing_prefixes(args: argparse.Namespace) -> list[tuple[str, object]]:
    """The given flags that need a prefix cache, with their values."""
    settings = {
        "--prefix-host-memory": args.prefix_host_memory,
        "--prefix-dir": args.prefix_dir,
        "--prefix-where": args.prefix_where,
    }
    return [(name, value) for name, value in settings.items() if value]


def plan_of(args: argparse.Namespace, llm: Llm, has_keys: bool = False) -> ServingMemory:
    """The division of memory, before the weights are loaded."""
    import jax

    from jaxkv.models.generation.serving import make_model
    from jaxkv.serve.engine.plan import plan_memory, sizes
    from jaxkv.state.memory import available

    engine_bytes = sizes(make_model(llm, args.policy), args.max_len, args.chunk, has_keys)
    # On a CPU, the host's prefixes take the memory of the device.
    host = args.prefix_host_memory if jax.local_devices()[0].platform == "cpu" else 0
    plan = plan_memory(
        engine_bytes,
        args.memory,
        args.max_batch,
        args.prefix_memory,
        available(),
        host,
        args.fixed_batch,
    )
    if not plan.prefixes:
        for name, _ in needing_prefixes(args):
            raise UserError(
                f"{name} needs --prefix-memory, for which no memory is left; give more --memory"
            )
    return plan


def make(
    args: argparse.Namespace,
    llm: Llm,
    plan: ServingMemory,
    prefixes: PrefixConfig | None,
    has_keys: bool = False,
) -> Engine:
    """The engine, compiled and ready. has_keys: no API key can take every batch entry."""
    if prefixes is not None:
        prefixes = replace(prefixes, memory=plan.prefixes) if plan.prefixes else None
    progress = Progress("jaxkv: compiling", unit="programs", steady=False, logged=True)
    with progress:  # logged, because it takes up to minutes
        from jaxkv.models.generation.serving import make_engine

        return make_engine(
            llm,
            args.policy,
            max_batch=plan.max_batch,
            max_len=args.max_len,
            chunk=args.chunk,
            max_prefill_tokens=args.max_prefill_tokens,
            max_stall=args.max_stall / 1000 or None,
            queue=args.queue,
            queue_tokens=args.queue_tokens,
            prefix_cache=prefixes,
            seed=args.seed,
            step_seconds=args.step_timeout,
            fixed_batch=args.fixed_batch,
            max_per_owner=max(1, plan.max_batch - 1) if has_keys else None,
            progress=progress.at,
        )


def at_most(sequences: int) -> str:
    """The number of sequences in words."""
    return f"at most {sequences} sequence{'' if sequences == 1 else 's'}"


def memory_of(engine: Engine, plan: ServingMemory) -> str:
    """The memory by use, for the start line; on a CPU also what the process holds besides."""
    import jax

    from jaxkv.state.memory import resident, show

    used = ", ".join(f"{use} {show(count)}" for use, count in engine.bytes.items())
    used = used if plan.limit is None else f"{used}, of {show(plan.limit)}"
    on_cpu = jax.local_devices()[0].platform == "cpu"
    besides = (resident() or 0) - sum(engine.bytes.values()) if on_cpu else 0
    return f"{used}; the process {show(besides)} besides" if besides > 0 else used


def fingerprint_of(args: argparse.Namespace, llm: Llm, max_batch: int) -> str:
    """The system_fingerprint of answers: a hash of what the answer to a request depends on."""
    settings = [
        llm.fingerprint(),
        llm.chat.template,
        llm.chat.response,
        args.allow_special_tokens,
        str(llm.sampling),
        args.policy,
        args.max_len,
        args.chunk,
        args.seed,
        args.fixed_batch,
        args.mesh,
        max_batch,
        flags.versions(),
    ]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return f"fp_{digest[:10]}"


def server_config(
    args: argparse.Namespace, llm: Llm, max_batch: int, has_keys: bool
) -> ServerConfig:
    from jaxkv.serve import http as server

    max_in_flight = max_batch + args.queue
    # By default one key cannot fill the batch and the queue.
    per_key = args.per_key or (max(1, max_in_flight // 2) if has_keys else None)
    return server.ServerConfig(
        max_in_flight=max_in_flight,
        max_per_key=per_key,
        max_batch=max_batch,
        max_waiting_tokens=args.queue_tokens,
        report_cached=not args.no_cached_tokens,
        host=args.host,
        allowed_origins=args.allowed_origins,
        metrics_prefix=args.metrics_prefix,
        log_probes=args.log_probes,
        sampling=llm.sampling,
    )


def read_keys(args: argparse.Namespace, may_be_pipe: bool = True) -> ApiKeys:
    """The API keys and admin keys of the files or the environment. Raises UserError."""
    from jaxkv.serve.http import ApiKeys, parse_api_keys

    keys = _content("api-key-file", args.api_key_file, KEYS, may_be_pipe)
    admin = _content("admin-key-file", args.admin_key_file, ADMIN_KEYS, may_be_pipe)
    if admin and not keys:
        raise UserError(
            "--admin-key-file needs API keys, because /metrics is open without any; give "
            "--api-key-file"
        )
    return ApiKeys(
        parse_api_keys(*keys) if keys else (), parse_api_keys(*admin, salts=False) if admin else ()
    )


def _content(
    flag: str, path: str | None, variable: str, may_be_pipe: bool
) -> tuple[str, str] | None:
    """The text of a key file and its source; None without keys."""
    content = os.environ.get(variable)
    if path is not None and content is not None:
        raise UserError(f"keys are given twice, in --{flag} and {variable}; give them once")
    if path is not None:
        return read_text(path, flag.replace("-", " ").replace("api", "API"), may_be_pipe), path
    return None if content is None else (content, variable)


@contextlib.contextmanager
def reload_at_hangup(args: argparse.Namespace, keys: ApiKeys) -> Iterator[None]:
    """Inside, SIGHUP reads the key files again into `keys`; invalid files change nothing.

    Without key files, or if they are standard input, SIGHUP ends the process, as by default.
    """
    hangup = getattr(signal, "SIGHUP", None)  # absent on Windows
    in_main = threading.current_thread() is threading.main_thread()
    files = {args.api_key_file, args.admin_key_file} - {None}
    if hangup is None or not in_main or not files or "-" in files:
        yield
        return

    def reload(*_: object) -> None:
        try:
            fresh = read_keys(args, may_be_pipe=False)  # it would block the signal's handler
        except UserError as error:
            line = f"the API keys stay as they are: {error}"
        else:
            keys.tenants, keys.admins = fresh.tenants, fresh.admins
            line = f"read the keys again: API keys {len(fresh.tenants)}, admin {len(fresh.admins)}"
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, f"jaxkv: {line}\n".encode())  # print may be running, and cannot be nested

    before = signal.signal(hangup, reload)
    try:
        yield
    finally:
        signal.signal(hangup, before)
