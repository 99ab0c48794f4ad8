"""Session files of conversations: the caches, the messages, and what they belong to."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np

from jaxkv import __version__
from jaxkv.errors import UserError
from jaxkv.files import reading
from jaxkv.models.conversation import Conversation
from jaxkv.policy_spec import format_policy
from jaxkv.state import batch

IDENTITY = "jaxkv chat session"


def save(path: str | Path, talk: Conversation) -> None:
    """Write a conversation with its caches to a file.

    Raises UserError where the file cannot be written, or exists and is no session.
    """
    path, stream = _expanded(path), talk.stream
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
    batch.save(path, stream.decoding, IDENTITY, _belongs_to(talk) | progress)


def load(path: str | Path, talk: Conversation) -> Conversation:
    """The conversation in a session file.

    talk: gives the model and the policy, and is not changed.
    Raises UserError for a file that is no session, incomplete or damaged, and for one of another
    model, policy or version.
    """
    path = _expanded(path)
    incomplete = (
        f"{path} is no complete session; name a file that /save or --session of this version wrote"
    )
    if not os.path.isfile(path):
        what = "this is a folder" if os.path.isdir(path) else "no such file"
        raise UserError(f"{what}: {path}; name a file that /save wrote")
    with reading(path):
        path.open("rb").close()
    try:
        notes = batch.read_notes(path, IDENTITY)
    except UserError:
        raise UserError(incomplete) from None
    for name, ours in _belongs_to(talk).items():
        theirs = notes.get(name)
        if theirs != ours:
            raise UserError(
                f"a session continues with its own {name}: {path} has {theirs}, this chat has "
                f"{ours}; begin a chat with that {name}"
            )
    found = Conversation(talk.llm, talk.policy)
    stream = found.stream
    try:
        loaded = batch.load(path, stream.decoding, IDENTITY, any_size=True)
    except batch.BadScale:  # a whole file, so the message names the scale
        raise
    except UserError:  # a damaged file, because the notes fit
        raise UserError(incomplete) from None
    # Without a mesh the arrays stay uncommitted, as those of a new stream: programs are shared.
    places = None if talk.llm.mesh is None else jax.tree.map(_place, stream.decoding)
    stream.decoding = batch.to_device(loaded, places)
    stream.lengths = np.array(notes["lengths"])
    stream.prompt_lengths = np.array(notes["prompt_lengths"])
    stream.prefill_finished = notes["prefill_finished"]
    found.messages = notes["messages"]
    return found


def _expanded(path: str | Path) -> Path:
    """The path, with ~ expanded. Raises UserError for the home of an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with the home of an unknown user; give a path") from None


def _place(array: jax.Array) -> jax.sharding.Sharding:
    return array.sharding


def _belongs_to(talk: Conversation) -> dict[str, str]:
    """What a session needs to be continued exactly, each in a few words."""
    return {
        "version": f"jaxkv {__version__}",
        "policy": format_policy(talk.stream.policies),
        "model": f"{talk.llm.name} {talk.llm.fingerprint()}",
    }
