"""`jaxkv serve` reads its key files again at SIGHUP."""

from __future__ import annotations

import argparse
import os
import signal

import pytest

from jaxkv.cli.keys import read_keys, reload_at_hangup
from tests.serve.http.conftest import eventually, serving
from tests.serve.http.fake import FakeEngine

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals as on POSIX")
PROMPT = "a prompt that two requests share|x"


@pytest.fixture
def args(tmp_path, monkeypatch):
    for name in ("JAXKV_API_KEYS", "JAXKV_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)
    api_keys, admin = tmp_path / "keys", tmp_path / "admins"
    api_keys.write_text("stays\nsalted pepper\nleaves\n")
    admin.write_text("root\n")
    return argparse.Namespace(api_key_file=str(api_keys), admin_key_file=str(admin))


def cached(served, key: str) -> int:
    answer = served.complete(PROMPT, {"authorization": f"Bearer {key}"})
    assert answer.status == 200
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def status(served, key: str, path: str = "/v1/models") -> int:
    return served.ask("GET", path, authorization=f"Bearer {key}").status


def test_keys_that_stay_keep_their_prefixes(args, tmp_path, capfd):
    keys = read_keys(args)
    with reload_at_hangup(args, keys), serving(FakeEngine(), keys=keys) as served:
        assert [cached(served, key) for key in ("stays", "salted", "leaves")] == [0, 0, 0]
        (tmp_path / "keys").write_text("comes\nstays\nsalted pepper\n")
        (tmp_path / "admins").write_text("new-root\n")
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: len(keys.tenants) == 3 and status(served, "comes") == 200)
        assert "read the keys again: API keys 3, admin 1" in capfd.readouterr().err
        assert status(served, "leaves") == 401
        assert cached(served, "stays") > 0 and cached(served, "salted") > 0
        assert cached(served, "comes") == 0
        assert status(served, "new-root", "/metrics") == 200
        assert status(served, "root", "/metrics") == 401


@pytest.mark.parametrize("content", ["", "a b c\n", None])
def test_invalid_files_change_nothing(args, tmp_path, capfd, content):
    keys = read_keys(args)
    with reload_at_hangup(args, keys):
        path = tmp_path / "keys"
        path.unlink() if content is None else path.write_text(content)
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: "the API keys stay as they are" in capfd.readouterr().err)
    assert len(keys.tenants) == 3


def test_a_closed_terminal_does_not_end_the_server(args, tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    keys = read_keys(args)
    with reload_at_hangup(args, keys):
        monkeypatch.setattr(os, "write", closed)
        (tmp_path / "keys").write_text("one\n")
        signal.raise_signal(signal.SIGHUP)
    assert len(keys.tenants) == 1


@pytest.mark.parametrize("path", [None, "-"])
def test_sighup_is_left_alone_without_key_files(args, path):
    before, keys = signal.getsignal(signal.SIGHUP), read_keys(args)
    without_admins = argparse.Namespace(api_key_file=path, admin_key_file=None)
    with reload_at_hangup(without_admins, keys):
        assert signal.getsignal(signal.SIGHUP) == before
