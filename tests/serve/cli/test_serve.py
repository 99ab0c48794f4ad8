"""`jaxkv serve`: its flags, its plan of memory, its keys, and errors before a model is loaded."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxkv import models
from jaxkv.cli import serve
from jaxkv.cli.serve import read_keys, reload_at_hangup
from tests.models.cli.test_bad_input import refused
from tests.serve.http.conftest import eventually, serving
from tests.serve.http.fake import FakeEngine

NO_MODEL = ("--model", "nowhere/at/all")


def test_a_port_in_use(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run("serve", *NO_MODEL, "--port", port), f"127.0.0.1 port {port}", "is in use", "0")


@pytest.mark.parametrize("words, expected", [
    (["--host", "no.such.host.invalid"], ["--host 'no.such.host.invalid'", "127.0.0.1"]),
    (["--host", "192.0.2.1"], ["192.0.2.1 port", "not an address of this machine"]),
    (["--host", "a..b"], ["--host 'a..b' is unknown", "127.0.0.1"]),
    (["--served-model-name", ""], ["--served-model-name must be", "got ''"]),
    (["--served-model-name", "x" * 1001], ["--served-model-name must be", "1000 characters"]),
    (["--served-model-name", "a,b,a"], ["must give each name once", "a,b,a", "leave the second"]),
    (["--chat-template", "absent"], ["no such chat template absent"]),
    (["--chat-template", "{bad}"], ["--chat-template {bad}: the chat", "Jinja", "leave it out"]),
    (["--chunk", "5000"], ["--chunk", "from 1 to 4096", "'5000'"]),
    (["--max-batch", "0"], ["--max-batch", "at least 1"]),
    (["--memory", "lots"], ["--memory", "such as 512MiB", "lots"]),
    (["--per-key", "3"], ["--per-key", "--api-key-file"]),
    (["--prefix-memory", "0", "--prefix-host-memory", "1GiB"], ["needs --prefix-memory"]),
    (["--prefix-memory", "0", "--prefix-where", "last"], ["--prefix-where needs --prefix-memory"]),
    (["--prefix-where", ""], ["--prefix-where must be"]),
    (["--api-key-file", "absent"], ["no such API key file absent"]),
    (["--api-key", "secret"], ["--api-key"]),
    (["--allowed-origins", "https://a.example/path"], ["--allowed-origins", "without a path"]),
    (["--log", "xml"], ["--log", "must be text or json", "'xml'"]),
    (["--metrics-prefix", "v-llm"], ["--metrics-prefix", "letters", "'v-llm'"]),
    (["--allowed-origins", "a.example"], ["--allowed-origins", "https://chat.example"]),
    (["--prefix-where", "nonsense"], ["--prefix-where", "branch", "nonsense"]),
    (["--prefix-dir", "{file}"], ["--prefix-dir: a prefix folder must be", "{file}"]),
    (["--prefix-dir", "{folder}", "--prefix-memory", "0"], ["--prefix-dir needs --prefix-memory"]),
    (["--prefix-dir-size", "1GiB"], ["--prefix-dir-size", "give --prefix-dir too"]),
    (["--prefix-dir", "{folder}", "--prefix-dir-size", "0"], ["--prefix-dir-size must be", "4GiB"]),
    (["--prefix-dir", ""], ["--prefix-dir must name a folder"]),
    (["--prefix-dir", "{folder}", "--prefix-dir-size", "lots"], ["such as 512MiB", "lots"]),
])  # fmt: skip
def test_flags(run, tmp_path, words, expected):
    names = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    names["bad"] = tmp_path / "bad"
    names["file"].write_text("x")
    names["bad"].write_text("{% if")
    ran = run("serve", *NO_MODEL, "--port", "0", *(word.format(**names) for word in words))
    refused(ran, *(part.format(**names) for part in expected))


@pytest.mark.parametrize("words, expected", [
    (["--memory", "1MiB"], ["weights (12.3 MiB), 1 sequence (", "got 1.0 MiB", "--memory 16MiB"]),
    (["--memory", "64MiB", "--max-batch", "500"], ["500 sequences", "a smaller --max-batch"]),
    (["--memory", "64MiB", "--prefix-memory", "1GiB"], ["prefixes (1.0 GiB)", "--prefix-memory"]),
    (["--memory", "64MiB", "--prefix-host-memory", "1GiB"], ["a smaller --prefix-host-memory"]),
    (["--memory", "16MiB", "--prefix-host-memory", "1KiB"], ["--prefix-host-memory needs"]),
    (["--memory", "9000TiB"], ["--memory must be at most what is free", "9000.0 TiB"]),
    (["--prefix-memory", "1KiB"], ["--prefix-memory must hold one prefix", "1.0 KiB"]),
    (["--memory", "64MiB", "--policy", "full", "--max-len", "100000"], ["a smaller policy"]),
])  # fmt: skip
def test_too_little_memory_says_how_much_is_needed(run, words, expected):
    """Before the weights of the default model are loaded."""
    refused(run("serve", "--port", "0", *words), *expected)


def test_sizes_are_checked_before_programs_are_compiled(run, tmp_path):
    small, folder = ("--prefix-host-memory", "1KiB"), ("--prefix-dir", tmp_path / "prefixes")
    refused(run("serve", "--port", "0", *small), "host memory must hold one prefix", "got 1.0 KiB")
    ran = run("serve", "--port", "0", *folder, "--prefix-dir-size", 1)
    refused(ran, "a prefix folder must hold one prefix", "got 1 byte", "--prefix-dir-size")
    ran = run("serve", "--port", "0", *small, "--policy", "retrieval", "--max-len", 64)
    warning, _ = ran.err.splitlines()
    assert "needs a prompt of at least 1025 tokens, got a max_len of 64" in warning


@pytest.mark.parametrize("words", [("--memory", "48MiB"), ("--fixed-batch",)])
def test_memory_at_the_start_is_that_of_the_plan(words):
    """Within 10 %, for the default model, in the arrays that JAX has on the device."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args = parser.parse_args(words)
    gc.collect()  # engines of other tests
    before = sum(array.nbytes for array in jax.live_arrays())
    llm, load = serve.flags.open_model(args, args.policy)
    has_keys = args.prefix_memory != 0
    plan = serve.plan_of(args, llm, has_keys)
    load()
    engine = serve.make(args, llm, plan, serve.prefixes_of(args), has_keys)
    assert engine.max_per_owner == plan.max_batch - has_keys
    assert (len(engine._programs.sizes) == 1) == args.fixed_batch
    planned = sum(engine.bytes.values())
    held = sum(array.nbytes for array in jax.live_arrays()) - before
    assert 0.9 * planned < held <= planned
    assert planned <= plan.limit
    assert args.memory is None or planned > 0.9 * args.memory
    assert (engine.bytes["prefixes"] > 0) == (args.prefix_memory != 0)


def test_invalid_api_keys(run, tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("a b c\n")
    refused(run("serve", "--api-key-file", path), f"{path}, line 1", "3 words")
    monkeypatch.setenv("JAXKV_API_KEYS", "good\ngood")
    ran = run("serve")
    refused(ran, "JAXKV_API_KEYS, line 2")
    assert "good" not in ran.err
    refused(run("serve", "--api-key-file", path), "given twice")
    monkeypatch.delenv("JAXKV_API_KEYS")
    monkeypatch.setenv("JAXKV_ADMIN_KEYS", "root")
    refused(run("serve"), "--admin-key-file needs API keys", "--api-key-file")


def test_a_public_address_without_keys_warns(run):
    ran = run("serve", *NO_MODEL, "--port", "0", "--host", "0.0.0.0")
    warning, error = ran.err.splitlines()
    assert (
        "accepts requests from other machines without an API key" in warning and "nowhere" in error
    )


@pytest.mark.parametrize("words, has_keys, expected", [
    ([], True, (16 + 256) // 2),
    (["--max-batch", "2", "--queue", "8"], True, 5),
    (["--max-batch", "1", "--queue", "1"], True, 1),
    (["--per-key", "7"], True, 7),
    ([], False, None),
])  # fmt: skip
def test_the_default_of_per_key(words, has_keys, expected):
    """One key must not fill the batch and the queue."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args = parser.parse_args(words)
    llm = SimpleNamespace(name="tiny", dtype="float32", sampling=models.Sampling())
    assert serve.server_config(args, llm, args.max_batch or 16, has_keys).max_per_key == expected


def test_the_system_fingerprint(model):
    """It tells weights, sinks and templates apart, whatever the folder is called."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args, llm = parser.parse_args([]), models.load(model)
    changed = [
        replace(llm, weights={**llm.weights, "norm": llm.weights["norm"] + 1}),
        replace(llm, tokenizer=replace(llm.tokenizer, front=(5, 0), sinks=(5,))),
        replace(llm, chat=replace(llm.chat, template="{{ messages }}")),
    ]
    fingerprints = {serve.fingerprint_of(args, loaded, 16) for loaded in (llm, *changed)}
    fingerprints |= {serve.fingerprint_of(args, llm, 8)}  # bits depend on the batch
    fixed = parser.parse_args(["--fixed-batch"])
    assert len(fingerprints | {serve.fingerprint_of(fixed, llm, 16)}) == 6
    moved = replace(llm, path=llm.path / "elsewhere")
    assert serve.fingerprint_of(args, moved, 16) == serve.fingerprint_of(args, llm, 16)


SIGHUP = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals as on POSIX")
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


@SIGHUP
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


@SIGHUP
@pytest.mark.parametrize("content", ["", "a b c\n", None, "a pipe"])
def test_invalid_files_change_nothing(args, tmp_path, capfd, content):
    keys = read_keys(args)
    with reload_at_hangup(args, keys):
        path = tmp_path / "keys"
        if content in (None, "a pipe"):
            path.unlink()
        if content == "a pipe":
            os.mkfifo(path)
        elif content is not None:
            path.write_text(content)
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: "the API keys stay as they are" in capfd.readouterr().err)
    assert len(keys.tenants) == 3


@SIGHUP
def test_a_closed_terminal_does_not_end_the_server(args, tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    keys = read_keys(args)
    with reload_at_hangup(args, keys):
        monkeypatch.setattr(os, "write", closed)
        (tmp_path / "keys").write_text("one\n")
        signal.raise_signal(signal.SIGHUP)
    assert len(keys.tenants) == 1
