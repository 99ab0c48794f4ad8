"""Wrong input exits with code 2 and one line: the rule, the value, the remedy; `policies`."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv import POLICIES
from jaxkv.cli import COMMANDS, Parser
from jaxkv.errors import UserError
from jaxkv.models.loading import smollm2
from jaxkv.models.tools.choices import CHOICES
from jaxkv.policy_spec import describe, parse_policy

ROOT = Path(__file__).resolve().parents[3]


def refused(ran, *words: str) -> None:
    """Assert exit code 2, no standard output, and one error line that contains these words."""
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith("jaxkv: error: ")
    for word in words:
        assert word in line, line


# Flags after `generate Hi --model MODEL`, and words of the error line: a case for each check. The
# tests of policies and of sampling have the rules of each field.
FLAGS = {
    "unknown policy": ("--policy windw", "unknown policy", "'windw'", "did you mean 'window'"),
    "a colon without fields": ("--policy streaming:", "a field must follow", "sinks, window"),
    "unknown field": ("--policy window:widow=3", "no field", "'widow'", "did you mean 'window'"),
    "value like a flag": ("--max-new-tokens -5x", "expected one argument", "write --flag=-1"),
    "no such layer": ("--policy 7=full;*=window", "layer 7", "layers 0 to 1"),
    "window beyond memory": (
        "--policy window:window=1000000000000", "1 sequence(s)", "TiB", "is free", "smaller window",
    ),
    "a policy twice": (
        "--policy full --policy window", "--policy is given twice", "remove the duplicate",
    ),
    "a field of an earlier version": (
        "--policy balance:temperature=0.1", "no field 'temperature'", "key_scale",
    ),
    "head shares without their budgets": (
        "--policy retrieval:calibration=default", "belong together", "give both or neither",
    ),
    "more tokens than a cache can have slots": (
        "--policy balance --max-new-tokens 900000000000", "a growing cache holds at most",
        "900000000003 are needed", "constant memory",
    ),
    "no tokens": ("--max-new-tokens 0", "--max-new-tokens", "at least 1", "'0'", "--help"),
    "temperature not a number": ("--temperature nan", "0 or more and finite", "nan"),
    "seed": ("--seed -1", "--seed", "from 0 to 4294967295", "'-1'"),
    "dtype": ("--dtype int8", "float32, bfloat16, float16", "'int8'"),
    "mesh": ("--mesh rows=2", "data=BATCH,model=HEADS", "'rows=2'", "try data=1"),
    "mesh beyond the batch": (
        *("--mesh data=2", "must divide the sequences", "1 sequence over 2 places; use data=1"),
    ),
    "sink without a token": ("--sinks constant:", "constant: needs a token after it"),
    "prompt twice": ("--prompt-file x", "given twice", "not both"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_flags(run, model, name):
    flags, *words = FLAGS[name]
    refused(run("generate", "Hi", "--model", model, *flags.split()), *words)


# Commands that give a flag, a value or a field twice, and words of the error line.
TWICE = {
    "data --text a --text b --vocab-size 300 --out o": ("--text is given", "all values after one"),
    "generate Hi --stop a b --stop b": ("--stop has the value b",),
    "compare --text a --policy full --policy full": ("--policy has the value full",),
}


@pytest.mark.parametrize("words", TWICE)
def test_nothing_is_given_twice(run, words):
    refused(run(*words.split()), *TWICE[words], "twice; remove the duplicate")


def test_sampling_is_checked_before_a_model_is_opened(run):
    for command in (("generate", "Hi"), ("chat",)):
        ran = run(*command, "--model", "absent/model", "--temperature", "-1")
        refused(ran, "temperature must be 0 or more", "-1")


# Commands that name a pipe without a writer, which would block; PIPE ends in .json.
PIPES = (
    "generate Hi --model PIPE",
    "data --text PIPE --vocab-size 300 --out o",
    "data --text TEXT --valid VALID --tokenizer PIPE --out o",
    "serve --model nowhere/at/all --port 0 --chat-template PIPE",
    "chat --model MODEL --session PIPE",
)


@pytest.mark.parametrize("words", PIPES)
def test_pipes(run, model, text, tmp_path, words):
    os.mkfifo(pipe := tmp_path / "pipe.json")
    paths = {"PIPE": pipe, "TEXT": text, "VALID": tmp_path / "valid.txt", "MODEL": model}
    shutil.copy(text, paths["VALID"])
    ran = run(*(paths.get(word, word) for word in words.split()))
    refused(ran, "not a regular file", str(pipe))


def test_an_evicted_sink_warns(run, model):
    warned = {
        policy: run("generate", "Hi", "--model", model, "--sinks", "constant:.", "--policy", policy,
                    "--max-new-tokens", 2).err.count(f"not all queries attend under {policy};")
        for policy in ("window", "streaming:sinks=0,window=8", "streaming", "full")
    }  # fmt: skip
    assert list(warned.values()) == [1, 1, 0, 0]


def test_filters_without_temperature_warn_once(run, model):
    ran = run("generate", "Hi", "--model", model, "--top-k", "5", "--max-new-tokens", "2")
    assert ran.code == 0 and ran.err.count("--top-k") == 1 and "--temperature" in ran.err


def test_a_byte_order_mark_is_not_part_of_the_prompt(run, model, tmp_path):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(b"Once upon a time")
    marked.write_bytes(b"\xef\xbb\xbfOnce upon a time")
    words = ("--model", model, "--max-new-tokens", "4")
    texts = {run("generate", "--prompt-file", file, *words).out for file in (plain, marked)}
    assert len(texts) == 1


def test_commands(run):
    refused(run(), "COMMAND", "jaxkv --help")


def test_no_such_model(run, tmp_path, text):
    refused(run("generate", "Hi", "--model", tmp_path / "no"), "no such folder", "no", "name a")
    refused(run("generate", "Hi", "--model", tmp_path / "no.gguf"), "no such file", "name a GGUF")
    refused(run("generate", "Hi", "--model", "smollm2"), "no such folder", "mean smollm2-135m?")
    refused(
        run("generate", "Hi", "--model", text), "a model is a folder", "is another file", "name the"
    )


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


# How a model folder is damaged, and words of the error line. The tests of loading have all faults.
FOLDERS = {
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in", "tokenizer.mod"),
    "truncated": (truncate, "model.safetensors is truncated or corrupt", "download it again"),
    "bad json": (lambda f: (f / "config.json").write_text("{"), "not valid JSON", "download"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_model_folders(run, model, tmp_path, name):
    damage, *words = FOLDERS[name]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage(folder)
    refused(run("generate", "Hi", "--model", folder), str(folder), *words)


def test_prompts(run, model, stdin, tmp_path):
    def generate(*words):
        return run("generate", *words, "--model", model)

    refused(generate(), "no prompt", "--prompt-file")
    refused(generate("--stop", "a", "the prompt"), "no prompt", "before --stop")
    refused(generate(""), "the prompt is empty", "at least one character")
    refused(generate("a\udcff"), "lone surrogate at character 1", "save it as UTF-8")
    stdin(b"")
    refused(generate("-"), "prompt on standard input is empty")
    stdin(b"\n")
    refused(generate("-"), "the prompt is empty")
    stdin(b"caf\xe9")
    refused(generate("-"), "standard input is not UTF-8", "byte 3", "convert it")
    refused(generate("--prompt-file", tmp_path), "is a folder", "name a file in it")
    refused(generate("--prompts", tmp_path), "file of prompts", "is a folder", "name a file in it")
    (tmp_path / "empty").write_text("\n \n", encoding="utf-8")
    refused(generate("--prompts", tmp_path / "empty"), "only empty lines", "a prompt a line")
    for words in (["Hi", "--prompts", "f"], ["--prompt-file", "f", "--prompts", "f"], ["Hi", "-"]):
        refused(generate(*words), "give")
    refused(generate("Hi", ""), "the prompt is empty", "at least one character")
    words = ("trained context of 512 tokens, got 60", "such as streaming, or a shorter prompt")
    refused(generate("x" * 600, "--policy", "full"), *words)


@pytest.mark.parametrize("command", ["perplexity", "compare"])
def test_texts(run, model, tmp_path, command):
    def read(path, *flags):
        return run(command, "--model", model, "--text", path, *flags)

    file = tmp_path / "text"
    refused(read(file), "no such text", str(file), "give the path")
    refused(read(tmp_path), "is a folder", "name a file in it")
    file.write_text("a text " * 30)
    long = read(file, "--max-tokens", 20, "--prompt-tokens", 20)
    refused(long, "more --max-tokens, or lower --prompt-tokens")
    assert "--score-tokens" not in long.err
    file.write_bytes(b"")
    refused(read(file), "is empty", "must contain some text")
    file.write_bytes(b"ab\xff")
    refused(read(file), str(file), "not UTF-8", "byte 2", "convert it")
    refused(run(command, "--model", model), "--text", "--help")


def test_compare(run, model, text, tmp_path):
    def compare(*flags):
        return run("compare", "--model", model, "--text", text, *flags)

    refused(compare("--policy", "windw"), "did you mean 'window'")
    refused(compare("--policy", "recompute:window=0"), "at least 1", "try recompute:window=256")
    refused(compare("--policy", "recompute"), "recompute:window=W")
    refused(compare("--policy", "window", "--policy", "full:max=100"), "at most 100", "max")
    refused(compare("--out", text), "--out needs a folder", str(text), "choose another")
    out = tmp_path / "out"
    refused(compare("--out", out, "--policy", "full:max=100"), "at most 100")
    assert not out.exists()


def test_other_exceptions_keep_their_traceback(run, monkeypatch):
    monkeypatch.setattr("jaxkv.policy_spec.describe", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("policies")


def test_nothing_is_downloaded_for_a_model_that_cannot_be_read(run, monkeypatch, tmp_path):
    """Without the package gguf, the error comes before the download."""
    monkeypatch.setattr(smollm2, "location", lambda: tmp_path / "absent.gguf")
    monkeypatch.setattr(smollm2, "_download", lambda _: pytest.fail("it was downloaded"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(run("chat", "--model", "smollm2-135m"), "needs the package gguf", "pip install")


def mistyped(word: str) -> str:
    """The word with its fifth letter left out, or the last of a shorter word."""
    return word[:4] + word[5:] if len(word) > 5 else word[:-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag(command):
    parser = Parser(f"jaxkv {command}", allow_abbrev=False)
    importlib.import_module(f"jaxkv.cli.{command}").add_flags(parser)
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    assert len(flags) > 1
    for flag in flags:
        parser.check_flags([flag, f"{flag}=x", "-", "-5", "a text", "--", "--anything"])
        for wrong in (
            mistyped(flag),
            flag.upper(),
            flag[1:],
            flag.replace("-", "_").replace("__", "--"),
        ):
            if wrong in flags:
                continue
            with pytest.raises(UserError) as error:
                parser.check_flags(["x", wrong])
            assert f"unrecognized arguments: {wrong}; did you mean {flag}?" in str(error.value)


def test_flags_and_commands(run, model, text):
    words = ("generate", "Hi", "--model", model, "--max-tokens", 5)
    refused(run(*words), "--max-tokens; did you mean --max-new-tokens?", "generate --help")
    refused(run("perplexity", "--txt", text), "--txt; did you mean --text?")
    refused(run("generat", "Hi"), "unknown command 'generat'", "did you mean generate?")
    refused(run("policies", "windw"), "unknown policy 'windw'", "mean 'window'", "balance-stream")
    refused(run("--vesion"), "--vesion; did you mean --version?")


def test_the_package_is_a_program():
    run = [sys.executable, "-m", "jaxkv", "-V"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("jaxkv ")


@pytest.mark.parametrize("listed", describe(), ids=lambda listed: listed["name"])
def test_a_description_names_every_field(run, listed):
    """Its lines fit a terminal."""
    ran = run("policies", listed["name"])
    words = ran.out.partition("\n\n")[2].partition("A policy is written")[0]
    assert ran.code == 0 and ran.out.startswith(
        f"{listed['name']}: {listed['summary']}\n  fields  "
    )
    assert not [name for name in listed["fields"] if not re.search(rf"\b{name}\b", words)]
    assert max(map(len, words.splitlines())) <= 88
    taken = [choice for choice in CHOICES if choice.policy == listed["name"]]
    assert ran.out.count("\n  take it for ") == len(taken)
    for choice in taken:
        assert f"{choice.text}, {choice.need}" in " ".join(ran.out.split())


def test_the_policy_strings_of_the_docs_parse():
    text = "".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/policies.md"))
    names = "|".join(POLICIES)
    strings = set(re.findall(rf"(?<![\w-])(?:{names}):\w+=[\w,=-]+(?:\.\d[\w,=-]*)*", text))
    assert {spec.partition(":")[0] for spec in strings} >= {"reservoir", "stratified", "balance"}
    for spec in strings:
        parse_policy(spec)
