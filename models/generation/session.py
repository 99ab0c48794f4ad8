"""Session files of conversations: the caches, the messages, and what they belong to."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import __version__
from jaxkv.contract import Policy
from jaxkv.errors import UserError
from jaxkv.files import reading
from jaxkv.models.generation.conversation import Conversation
from jaxkv.models.loading.llm import Llm
from jaxkv.policy_spec import budgets_identity, format_policy
from jaxkv.state import batch

IDENTITY, VERSION = "jaxkv chat session", "jaxkv {}"


def save(path: str | Path, talk: Conversation) -> None:
    """Write a conversation with its caches to a file.

    Raises UserError where the file cannot be written, or exists and is no session, and where the
    caches are lost.
    """
    path, stream = _expanded(path), talk.stream
    stream.check_usable()
    if os.path.exists(path):
        try:
            batch.read_notes(path, IDENTITY)
        except UserError:
            raise UserError(
                f"only a session may be overwritten, and {path} is something else; choose another "
                "name"
            ) from None
    lengths = {name: getattr(stream, name).tolist() for name in ("lengths", "prompt_lengths")}
    progress = lengths | {"prefill_finished": stream.prefill_finished, "messages": talk.messages}
    notes = _belongs_to(talk.llm, talk.stream.policies) | progress
    batch.save(path, stream.decoding, IDENTITY, notes | {"checksum": _checksum(notes)})


def read_notes(path: str | Path) -> dict[str, Any]:
    """What a session file belongs to, and its messages; needs no model.

    Raises UserError for a file that is no session, changed by hand, or of another version.
    """
    path = _expanded(path)
    if not os.path.isfile(path):
        kind = "this is a folder" if os.path.isdir(path) else "not a regular file"
        reason = kind if os.path.exists(path) else "no such file"
        raise UserError(f"{reason}: {path}; name a file that /save wrote")
    with reading(path):
        path.open("rb").close()
    try:
        notes = batch.read_notes(path, IDENTITY)
    except UserError:
        raise _incomplete(path) from None
    if not isinstance(notes, dict):
        raise _incomplete(path)
    checksum = notes.pop("checksum", None)
    if checksum != _checksum(notes):
        raise UserError(
            f"the notes of a session must be as they were written, and those of {path} are not; "
            "name an older copy of it"
        )
    _compare(path, notes, {"version": VERSION.format(__version__)})
    return notes


def check(path: str | Path, llm: Llm, policy: str | None = None) -> str:
    """The policy of a session, after a check that it fits a model, whose weights are not needed.

    policy: the one that the user chose, None for that of the session.
    Raises UserError as `read_notes`, and for a session of another model, format or policy, or of a
    policy that does not exist any more.
    """
    path, notes = _expanded(path), read_notes(path)
    _check_arrays(path)
    name, identity = f"{llm.name} ", notes["model"]  # and a fingerprint
    if not identity.startswith(name) or " " in identity.removeprefix(name):
        raise _unlike(path, "model", identity.rpartition(" ")[0], llm.name)
    _compare(path, notes, {"format": _format(llm)})
    try:
        llm.policies(notes["policy"])
    except UserError as error:
        raise UserError(
            f"{path} was written under the policy {notes['policy']:.80}, which this version does "
            f"not have: {error}; begin another session"
        ) from None
    if policy is not None:
        _compare(path, notes, {"policy": format_policy(llm.policies(policy))})
    return notes["policy"]


def _check_arrays(path: Path) -> None:
    """Raise UserError where the arrays of a session differ from their checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, RuntimeError, EOFError, ValueError, zlib.error, zipfile.BadZipFile):
        damaged = "the archive"
    if damaged:
        raise _incomplete(path)


def load(path: str | Path, talk: Conversation) -> Conversation:
    """The conversation in a session file.

    talk: gives the model and the policy, and is not changed.
    Raises UserError for a file that is no session, incomplete or damaged, and for one of another
    model, policy or version.
    """
    path, notes = _expanded(path), read_notes(path)
    _compare(path, notes, _belongs_to(talk.llm, talk.stream.policies))
    restored = Conversation(talk.llm, talk.policy)
    stream = restored.stream
    try:
        loaded = batch.load(path, stream.decoding, IDENTITY, any_size=True)
    except batch.BadScale:  # a whole file, so the message names the scale
        raise
    except UserError:  # a damaged file, because the notes fit
        raise _incomplete(path) from None
    # Without a mesh the arrays stay uncommitted, as those of a new stream: programs are shared.
    places = None if talk.llm.mesh is None else jax.tree.map(_place, stream.decoding)
    stream.decoding = batch.to_device(loaded, places)
    stream.lengths = np.array(notes["lengths"])
    stream.prompt_lengths = np.array(notes["prompt_lengths"])
    stream.prefill_finished = notes["prefill_finished"]
    restored.messages = notes["messages"]
    return restored


def _expanded(path: str | Path) -> Path:
    """The path, with ~ expanded. Raises UserError for the home of an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with the home of an unknown user; give a path") from None


def _place(array: jax.Array) -> jax.sharding.Sharding:
    return array.sharding


def _belongs_to(llm: Llm, policies: Sequence[Policy]) -> dict[str, str]:
    """What a chat must share with a session to continue it exactly, each in a few words."""
    return {
        "version": VERSION.format(__version__),
        "policy": format_policy(policies),
        "budgets": budgets_identity(policies),
        "format": _format(llm),
        "model": f"{llm.name} {llm.fingerprint()}",
    }


def _format(llm: Llm) -> str:
    """The dtype, and the format of quantised weights."""
    return " ".join(filter(None, (llm.dtype, llm.weight_format)))


def _compare(path: Path, notes: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    for name, value in expected.items():
        if notes.get(name, "") != value:
            raise _unlike(path, name, notes.get(name, ""), value)


# What gives a chat the model, policy or format of its session.
FLAGS = {"model": "--model", "policy": "--policy", "format": "--dtype and --weights",
         "budgets": "calibration= file"}  # fmt: skip


def _unlike(path: Path, name: str, of_session: str, of_chat: str) -> UserError:
    remedy = f"the session's {FLAGS[name]}" if name in FLAGS else "another session"
    return UserError(
        f"a session continues with its own {name}: {path} has {of_session}, this chat "
        f"has {of_chat}; give {remedy}, or begin a new session"
    )


def _incomplete(path: Path) -> UserError:
    return UserError(
        f"{path} is no complete session; name a file that /save or --session of this version wrote"
    )


def _checksum(notes: Mapping[str, Any]) -> int:
    """A checksum of notes; they are text that can be edited."""
    return zlib.crc32(json.dumps(notes, sort_keys=True).encode())
