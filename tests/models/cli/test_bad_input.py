"""Wrong input exits with code 2 and one line: the rule, the value received and the remedy."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.models.loading import smollm2

NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


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
    "unknown field": ("--policy window:widow=3", "no field", "'widow'", "did you mean 'window'"),
    "value like a flag": ("--max-new-tokens -5x", "expected one argument", "write --flag=-1"),
    "field without value": ("--policy window:window", "field=value", "'window'"),
    "field not a number": ("--policy window:window=x", "whole number", "'x'"),
    "window below 1": ("--policy window:window=0", "at least 1", "got 0", "1 or more"),
    "no such layer": ("--policy 7=full;*=window", "layer 7", "layers 0 to 1"),
    "layer without policy": ("--policy 0=full", "layer 1 has no policy", "add *=POLICY"),
    "window beyond memory": (
        "--policy window:window=1000000000000", "1 sequence(s)", "TiB", "is free", "smaller window",
    ),
    "a policy twice": (
        "--policy full --policy window", "--policy is given twice", "remove the duplicate",
    ),
    "block not divisible by 2^rounds": (
        "--policy balance:block=100,rounds=3", "multiple of 2^rounds", "block=100", "try block=256",
    ),
    "capacity below the window": (
        "--policy snapkv:capacity=8", "must be more than window", "got 8 and 32",
        "try capacity=1024",
    ),
    "neither true nor false": (
        "--policy magicpig:host_offload=disk", "one of true, false", "'disk'",
    ),
    "a field of an earlier version": (
        "--policy balance:temperature=0.1", "no field 'temperature'", "key_scale",
    ),
    "more tokens than a cache can have slots": (
        "--policy balance --max-new-tokens 900000000000", "a growing cache holds at most",
        "900000000003 are needed", "constant memory",
    ),
    "full beyond memory": (
        "--policy full:max=1000000000000 --max-new-tokens 900000000000", "TiB", "constant memory",
    ),
    "full beyond its maximum": (
        "--policy full --max-new-tokens 200000", "at most 131072", "200003", "raise max",
    ),
    "no tokens": ("--max-new-tokens 0", "--max-new-tokens", "at least 1", "'0'", "--help"),
    "tokens not a number": ("--max-new-tokens many", "whole number", "'many'", "--help"),
    "temperature not a number": ("--temperature nan", "0 or more and finite", "nan"),
    "temperature a word": ("--temperature hot", "must be a number", "'hot'", "--help"),
    "seed": ("--seed -1", "--seed", "from 0 to 4294967295", "'-1'"),
    "dtype": ("--dtype int8", "float32, bfloat16, float16", "'int8'"),
    "mesh": ("--mesh rows=2", "data=BATCH,model=HEADS", "'rows=2'", "try data=1"),
    "mesh beyond the machine": ("--mesh model=99", "'model=99' needs 99", "make it smaller"),
    "mesh beyond the batch": (
        *("--mesh data=2", "must divide the sequences", "1 sequences over 2 places"),
    ),
    "prompt twice": ("--prompt-file x", "given twice", "not both"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_flags(run, model, name):
    flags, *words = FLAGS[name]
    refused(run("generate", "Hi", "--model", model, *flags.split()), *words)


def test_sampling_is_checked_before_a_model_is_opened(run):
    for command in (("generate", "Hi"), ("chat",)):
        ran = run(*command, "--model", "absent/model", "--temperature", "-1")
        refused(ran, "temperature must be 0 or more", "-1")


def test_a_missing_platform_is_an_error(run, model, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr("jax.local_devices", devices)
    refused(run("generate", "Hi", "--model", model), "no device", "'cuda'", "JAX_PLATFORMS=cpu")


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


def test_impossible_file_names(run, model, text):
    long = "x" * 300
    words = ("--model", model, "--text", text)
    refused(run("compare", *words, "--out", long), "--out needs a folder", "too long")
    refused(run("generate", "Hi", "--model", f"./{long}"), "no such folder", "too long")
    refused(run("generate", "Hi", "--model", "~nobody-by-that-name/m"), "no such folder")


def test_a_folder_with_the_name_of_an_output_file(run, model, text, tmp_path):
    (tmp_path / "out" / "compare.png").mkdir(parents=True)
    words = ("--model", model, "--text", text, "--out", tmp_path / "out")
    refused(run("compare", *words), "compare.png is a folder", "choose another")
    assert not (tmp_path / "out" / "compare.json").exists()


def test_an_empty_stop_string(run, model):
    refused(run("generate", "Hi", "--model", model, "--stop", ""), "must not be empty")


def test_commands(run):
    refused(run(), "COMMAND", "jaxkv --help")


def test_model_with_an_empty_name(run, text):
    for words in (["generate", "Hi"], ["chat"], ["perplexity", "--text", text]):
        refused(run(*words, "--model", ""), "no model was named", "name a folder")


def test_no_such_model(run, tmp_path, text):
    refused(run("generate", "Hi", "--model", tmp_path / "no"), "no such folder", "no", "name a")
    refused(run("generate", "Hi", "--model", tmp_path / "no.gguf"), "no such file", "name a GGUF")
    refused(run("generate", "Hi", "--model", "smollm2"), "no such folder", "mean smollm2-135m?")
    refused(
        run("generate", "Hi", "--model", text), "a model is a folder", "is another file", "name the"
    )


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A change to config.json."""

    def apply(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return apply


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A change to the weights."""

    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def lack(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


# How a model folder is damaged, and words of the error line.
FOLDERS = {
    "no config": (lack("config.json"), "no config.json in", "name the folder"),
    "no weights": (lack("model.safetensors"), "no weights in", "model.safetensors"),
    "no tokenizer": (lack("tokenizer.json"), "no tokenizer in", "tokenizer.model"),
    "truncated": (truncate, "model.safetensors is truncated or corrupt", "download it again"),
    "corrupt": (corrupt, "model.safetensors is truncated or corrupt", "download it again"),
    "missing tensor": (tensors(lambda w: w.pop(NORM)), "missing tensor " + NORM),
    "extra tensor": (tensors(lambda w: w.update(extra=w[NORM])), "extra tensor extra"),
    "wrong shape": (tensors(lambda w: w.update({Q: w[Q][:8]})), Q, "[8, 32]", "[32, 32]"),
    "bad json": (lambda f: (f / "config.json").write_text("{"), "not valid JSON", "download"),
    "architecture": (
        edit(lambda c: c.update(architectures=["MambaForCausalLM"])),
        "unsupported architecture MambaForCausalLM", "supported: LlamaForCausalLM",
    ),
    "learned positions": (
        edit(lambda c: c.update(architectures=["GPT2LMHeadModel"], model_type="gpt2")),
        "GPT2LMHeadModel has learned absolute positions", "relative ones", "supported: Llama",
    ),
    "rope kind": (
        edit(lambda c: c.update(rope_scaling={"rope_type": "longrope"})),
        "unsupported rope kind 'longrope'", "supported: default",
    ),
    "quantized": (
        edit(lambda c: c.update(quantization_config={"quant_method": "awq"})),
        "quantized weights (awq)", "use the float32",
    ),
}  # fmt: skip


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
    def read(path):
        return run(command, "--model", model, "--text", path)

    file = tmp_path / "text"
    refused(read(file), "no such text", str(file), "give the path")
    refused(read(tmp_path), "is a folder", "name a file in it")
    file.write_bytes(b"")
    refused(read(file), "is empty", "must contain some text")
    file.write_bytes(b"ab\xff")
    refused(read(file), str(file), "not UTF-8", "byte 2", "convert it")
    refused(run(command, "--model", model), "--text", "--help")


@pytest.mark.parametrize(
    "command, policy", [("perplexity", "topk"), ("compare", "0=full;*=uniform")]
)
def test_policies_with_finish_prefill_need_a_prompt(run, model, text, command, policy):
    """The error comes before any warning, and before another policy has run."""
    text.write_text("It was a bright cold day in April. " * 60, encoding="utf-8")
    first = ("--policy", "window") if command == "compare" else ()
    ran = run(command, "--model", model, "--text", text, *first, "--policy", policy)
    refused(ran, "acts at the end of a prompt", "got 0", "give --prompt-tokens", "prompt=")


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


def test_chat_not_utf8(run, model, stdin):
    stdin(b"caf\xe9\n")
    ran = run("chat", "--model", model)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("jaxkv: error: standard input is not UTF-8")


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
