"""`jaxkv serve --prefix-dir`: its flags, and real servers that restart."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess

import openai
import pytest

from jaxkv import models
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import PrefixConfig, PrefixFolder, Request, answer
from tests.models.cli.test_bad_input import refused
from tests.serve.cli.test_serve import NO_MODEL
from tests.serve.cli.test_serve_process import POLICY, ROOT, started
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file locks and signals as on POSIX")
PROMPT = "A long beginning that outlives its server, because a folder has it. "


@pytest.mark.parametrize("words, expected", [
    (["--prefix-dir", "{file}"], ["--prefix-dir: a prefix folder must be", "{file}"]),
    (["--prefix-dir", "{folder}", "--prefix-memory", "0"], ["--prefix-dir needs --prefix-memory"]),
    (["--prefix-dir-size", "1GiB"], ["--prefix-dir-size", "give --prefix-dir too"]),
    (["--prefix-dir", "{folder}", "--prefix-dir-size", "0"], ["--prefix-dir-size must be", "4GiB"]),
    (["--prefix-dir", ""], ["--prefix-dir must name a folder"]),
    (["--prefix-dir", "{folder}", "--prefix-dir-size", "lots"], ["such as 512MiB", "lots"]),
])  # fmt: skip
def test_flags(run, tmp_path, words, expected):
    names = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    names["file"].write_text("x")
    ran = run("serve", *NO_MODEL, "--port", "0", *(word.format(**names) for word in words))
    refused(ran, *(part.format(**names) for part in expected))


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(run, tmp_path):
    folder = PrefixFolder(tmp_path, 2**30)
    words = ("serve", *NO_MODEL, "--port", "0", "--prefix-dir", tmp_path)
    refused(run(*words), "--prefix-dir: a prefix folder belongs to one server", str(tmp_path))
    folder.close()
    assert "one server" not in run(*words).err


def ask(url: str, key: str, prompt: str = PROMPT) -> tuple[str, int]:
    """The text of an answer, and the cached tokens of its prompt."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens


def metric(url: str, name: str) -> float:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="root", max_retries=0) as client:
        text = client.get("/../metrics", cast_to=str)
    return float(re.search(rf"^jaxkv:{name} (\S+)$", text, re.M)[1])


def end(process: subprocess.Popen) -> str:
    """End a server; returns what else it wrote."""
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    return rest


@pytest.mark.slow
def test_prefixes_survive_restarts_and_belong_to_their_key(model, tmp_path):
    keys, admins, folder = tmp_path / "keys", tmp_path / "admins", tmp_path / "prefixes"
    keys.write_text("first-key\nsecond-key\n")
    admins.write_text("root\n")
    words = ("--api-key-file", str(keys), "--admin-key-file", str(admins),
             "--prefix-dir", str(folder), "--served-model-name", "tiny")  # fmt: skip
    with started(model, *words) as (process, url):
        text, cached = ask(url, "first-key")
        assert cached == 0
        second = subprocess.run(process.args, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2 and second.stderr.count("\n") == 1
        assert "belongs to one server at a time" in second.stderr
        assert end(process) == ""
    assert all(b"-key" not in file.read_bytes() for file in folder.iterdir())
    with started(model, *words) as (process, url):
        assert ask(url, "second-key") == (text, 0)
        again, cached = ask(url, "first-key")
        assert again == text and cached >= 48
        assert metric(url, "prefix_disk_hits_total") > 0
        assert metric(url, "prefix_disk_failures_total") == 0
        assert end(process) == ""


def test_other_weights_under_the_same_name_are_another_model(tmp_path):
    answers = []
    for seed in (0, 1, 0):
        shutil.rmtree(tmp_path / "tiny", ignore_errors=True)
        llm = models.load(write_tiny(tmp_path / "tiny", seed))
        folder = PrefixFolder(tmp_path / "prefixes", 2**30)
        engine = make_engine(
            llm, POLICY, max_batch=1, chunk=16, prefix_cache=PrefixConfig(folder=folder)
        )
        tokens = tuple(llm.tokenizer.encode(PROMPT))
        (collected,) = answer(engine, [Request(tokens, 4)])
        answers.append((collected.tokens, collected.outcome.cached_tokens))
        engine.stop()
    assert answers[0][1] == answers[1][1] == 0 < answers[2][1]
    assert answers[0][0] == answers[2][0]
