"""Session files: a conversation continues after `load` as if it had never been saved."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation import session
from jaxkv.state import batch
from tests.models.folders import deny
from tests.tiny import write_tiny

POLICY = "streaming:sinks=2,window=30"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("session") / "tiny"))


def ask(talk: models.Conversation, text: str) -> str:
    return "".join(talk.say(text, models.Sampling(temperature=3.0), 9, ignore_eos=True))


@pytest.mark.parametrize("policy", [POLICY, "full:start=16", "snapkv:capacity=9,window=3,start=16"])
def test_a_loaded_conversation_continues(llm, tmp_path, policy):
    talk, path = models.Conversation(llm, policy, "Be brief.", seed=5), tmp_path / "session"
    ask(talk, "Hello there")
    session.save(path, talk)
    loaded = session.load(path, models.Conversation(llm, policy))
    assert (loaded.messages, loaded.position) == (talk.messages, talk.position)
    for _ in range(2):
        assert ask(loaded, "And?") == ask(talk, "And?")
    session.save(path, talk)  # a session may be overwritten


@pytest.fixture
def saved(llm, tmp_path):
    talk = models.Conversation(llm, POLICY)
    ask(talk, "Hello")
    session.save(tmp_path / "session", talk)
    return tmp_path / "session"


def test_another_policy_model_or_version(llm, saved, tmp_path, monkeypatch):
    other_model = models.load(write_tiny(tmp_path / "tiny", seed=1, hidden_size=64))
    with pytest.raises(UserError, match=r"own model: .* give --model, or begin a new session"):
        session.load(saved, models.Conversation(other_model, POLICY))
    changed = dict(llm.weights)
    name = next(name for name in changed if "q_proj" in name or name.endswith("q"))
    changed[name] = changed[name] * 2
    with pytest.raises(UserError, match="own model"):
        session.load(saved, models.Conversation(replace(llm, weights=changed), POLICY))
    with pytest.raises(UserError, match=r"own policy: .*window=30.* this chat has window:window=9"):
        session.load(saved, models.Conversation(llm, "window:window=9"))
    monkeypatch.setattr(session, "__version__", "9.9")
    with pytest.raises(UserError, match=r"own version: .* this chat has jaxkv 9.9"):
        session.load(saved, models.Conversation(llm, POLICY))


def flipped(raw):
    """One bit of an array."""
    at = len(raw) // 2
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-100], lambda raw: raw[:9], lambda raw: b"x", flipped]
)
def test_an_incomplete_file(llm, saved, damage):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(UserError, match="is no complete session") as error:
        session.load(saved, models.Conversation(llm, POLICY))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_bad_scale_of_a_cache_in_int8_is_named(llm, tmp_path, scale):
    talk, path = models.Conversation(llm, f"{POLICY},storage=int8"), tmp_path / "session"
    ask(talk, "Hello")
    states = talk.stream.decoding.states
    wrong = states[1].k._replace(scale=states[1].k.scale.at[0, 0, 3].set(scale))
    states = (states[0], states[1]._replace(k=wrong))
    talk.stream.decoding = talk.stream.decoding._replace(states=states)
    session.save(path, talk)
    with pytest.raises(batch.BadScale, match=r"finite, and above 0 .*\[1\]\.k has ") as error:
        session.load(path, models.Conversation(llm, f"{POLICY},storage=int8"))
    assert f"{path}: " in str(error.value) and f" has {scale:g}; load" in str(error.value)


def test_a_file_that_may_not_be_read(llm, saved, monkeypatch):
    deny(monkeypatch, saved)
    with pytest.raises(UserError, match=f"cannot read {saved}: Permission denied; check that it"):
        session.load(saved, models.Conversation(llm, POLICY))


def test_a_flipped_bit_is_one_line(llm, saved):
    """In the index of the archive, whose fields choose how the rest is read."""
    raw, talk = saved.read_bytes(), models.Conversation(llm, POLICY)
    start, refused = raw.rindex(b"PK\x01\x02"), 0
    for at in range(start, len(raw)):
        saved.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with contextlib.suppress(UserError):
            session.load(saved, talk)
            continue
        refused += 1
    assert refused > 20


def test_a_file_that_is_absent_or_no_session(llm, saved, tmp_path):
    talk, text = models.Conversation(llm, POLICY), tmp_path / "text"
    with pytest.raises(UserError, match="no such file"):
        session.load(tmp_path / "absent", talk)
    text.write_text("my notes")
    with pytest.raises(UserError, match="only a session may be overwritten"):
        session.save(text, talk)
    assert text.read_text() == "my notes"
