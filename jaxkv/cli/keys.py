"""The API keys of `jaxkv serve`: read at the start, and from their files again at SIGHUP."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxkv.cli.files import read_text
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jaxkv.serve.http import ApiKeys

KEYS, ADMIN_KEYS = "JAXKV_API_KEYS", "JAXKV_ADMIN_KEYS"


def read_keys(args: argparse.Namespace) -> ApiKeys:
    """The API keys and admin keys of the files or the environment. Raises UserError."""
    from jaxkv.serve.http import ApiKeys, parse_api_keys

    keys = _content("api-key-file", args.api_key_file, KEYS)
    admin = _content("admin-key-file", args.admin_key_file, ADMIN_KEYS)
    if admin and not keys:
        raise UserError(
            "--admin-key-file needs API keys, because /metrics is open without any; give "
            "--api-key-file"
        )
    return ApiKeys(
        parse_api_keys(*keys) if keys else (), parse_api_keys(*admin, salts=False) if admin else ()
    )


def _content(flag: str, path: str | None, variable: str) -> tuple[str, str] | None:
    """The text of a key file and its source; None without keys."""
    content = os.environ.get(variable)
    if path is not None and content is not None:
        raise UserError(f"keys are given twice, in --{flag} and {variable}; give them once")
    if path is not None:
        return read_text(path, flag.replace("-", " ").replace("api", "API")), path
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
            fresh = read_keys(args)
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
