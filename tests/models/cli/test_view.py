"""`jaxkv view`, and its page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from jaxkv.models.tools import view
from tests.models.cli.test_bad_input import refused
from tests.tiny import write_sink_tokens

POLICY = "streaming:sinks=2,window=6"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
def page(run, model, text, tmp_path):
    path = tmp_path / "page.html"
    flags = ("--policy", POLICY, "--max-tokens", 24, "--out", path)
    ran = run("view", "--model", model, "--text", text, *flags, "--json")
    assert ran.json["tokens"] == 24 and ran.json["bytes"] == path.stat().st_size
    assert ran.json["page"] == str(path) and ran.json["policy"] == POLICY
    return path


def dom(url: str, folder) -> str:
    """The page after its script has run, as headless Chromium prints it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    run = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
           "--enable-logging=stderr", f"--user-data-dir={folder}", "--virtual-time-budget=20000",
           url]  # fmt: skip
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Uncaught" not in done.stderr, done.stderr
    return done.stdout


def test_a_browser_shows_the_cache(page, tmp_path):
    shown = dom(f"{page.as_uri()}#token=20&layer=1&head=3", tmp_path / "browser")
    assert 'data-ready="yes"' in shown
    (cached,) = re.findall(r'data-cached="([^"]*)"', shown)
    token = range(20)
    assert list(map(float, cached.split(","))) == [float(t < 2 or t > 19 - 6) for t in token]
    (seen,) = re.findall(r'data-seen="([^"]*)"', shown)
    assert sum(map(float, seen.split(","))) == pytest.approx(1, abs=0.02)
    classes = re.findall(r'<span class="t([^"]*)"', shown)
    assert len(classes) == 24
    assert [c.strip() for c in classes] == [
        "", "", *["out"] * 12, *[""] * 5, "now", *["later"] * 4
    ]  # fmt: skip
    assert re.search(r'id="at">token 20 of 24<', shown)
    assert re.search(r'id="count"[^>]*>8 of 20<', shown)


def test_a_browser_shows_no_loss_of_a_sink_token(run, model, text, tmp_path):
    """The second of two learned sinks: its `losses` are null, those of the text are numbers."""
    sinks = write_sink_tokens(tmp_path / "sinks.safetensors", model, 2)
    path = tmp_path / "page.html"
    flags = ("--sinks", sinks, "--policy", POLICY, "--max-tokens", 24, "--out", path)
    ran = run("view", "--model", model, "--text", text, *flags)
    assert ran.code == 0, ran.err
    shown = dom(f"{path.as_uri()}#token=1", tmp_path / "browser")
    assert 'id="loss">\u2013<' in shown and "sink, which the model does not predict" in shown
    shown = dom(f"{path.as_uri()}#token=2", tmp_path / "browser")
    assert re.search(r'id="loss">\d+\.\d\d / \d+\.\d\d<', shown)


def test_the_default_page(run, model, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run("view", "--model", model, "--text", text, "--max-tokens", 80)
    assert ran.code == 0 and ran.out.startswith("wrote view.html (")
    assert (tmp_path / "view.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(("token", "shown"), [(1, 2), (11, 11)])
def test_ctrl_c_keeps_what_was_read(run, model, text, tmp_path, press, token, shown):
    """The shortest page has two tokens, because one predicts nothing."""
    press(view, "_codes_of_weights", 2 * (token - 1))  # two layers a token
    path = tmp_path / "page.html"
    flags = ("--policy", POLICY, "--max-tokens", 24, "--out", path, "--json")
    ran = run("view", "--model", model, "--text", text, *flags)
    assert ran.code == 130 and json.loads(ran.out)["tokens"] == shown and path.is_file()
    assert ran.err.endswith(f"jaxkv: interrupted: the page shows the first {shown} of 24 tokens\n")


def test_bad_input(run, model, text, tmp_path):
    def view_with(*flags):
        return run("view", "--model", model, "--text", text, *flags)

    short = ("--policy", "window:window=24", "--max-tokens", 20)
    refused(view_with(*short), "at least 25 tokens are needed, got 20", "longer text")
    refused(view_with("--out", tmp_path / "page.png"), "ends in .html", "page.png")
    refused(view_with("--out", tmp_path / "no" / "p.html"), "a folder that exists", "no; create it")
    assert not (tmp_path / "no").exists()
    (tmp_path / "file").write_text("x")
    refused(
        view_with("--out", tmp_path / "file" / "p.html"), "--out needs a folder", "choose another"
    )
    refused(view_with("--layers", "0,x"), "--layers", "0,1,29", "'0,x'")
    refused(view_with("--max-tokens", 60, "--policy", POLICY, "--layers", 5), "layer 5", "0 to 1")
    refused(view_with("--prompt-tokens", 101, "--max-tokens", 100), "at most the 100 tokens", "101")
    snap = ("--policy", "snapkv:capacity=64", "--prompt-tokens", 40, "--max-tokens", 100)
    refused(view_with(*snap), "at least 65 tokens", "got a prompt of 40", "--prompt-tokens")
