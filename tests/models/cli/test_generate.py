"""`jaxkv generate`."""

from __future__ import annotations

import json
import re

from jaxkv import models
from jaxkv.models.generation import streams
from jaxkv.models.generation.text import Generation


def test_text_equals_that_of_the_library(run, model):
    expected = models.generate(models.load(model), "Hello", max_new_tokens=40)
    ran = run("generate", "Hello", "--model", model, "--max-new-tokens", 40)
    assert (ran.code, ran.out) == (0, expected.text + "\n" * (not expected.text.endswith("\n")))
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"jaxkv: 40 tokens \(length\), {number} tokens/s, compiled {number} s, state 66.0 KiB\n",
        ran.err,
    )


def test_prompt_from_a_file_and_from_standard_input(run, model, tmp_path, stdin):
    (tmp_path / "prompt").write_text("Hello\n", encoding="utf-8")
    flags = ("--model", model, "--max-new-tokens", 40)
    plain = run("generate", "Hello", *flags)
    assert run("generate", "--prompt-file", tmp_path / "prompt", *flags).out == plain.out
    stdin(b"Hello\n")
    assert run("generate", "-", *flags).out == plain.out


def test_several_prompts_give_the_texts_of_each_alone(run, model, tmp_path):
    """As arguments and as lines of a file, in one batch and in several, in the order given."""
    (tmp_path / "prompts").write_text("Hello\n\nGood day\nHe said: it is\n", encoding="utf-8")
    prompts = ["Hello", "Good day", "He said: it is"]
    flags = ("--model", model, "--max-new-tokens", 30, "--temperature", 1.5)
    alone = [
        run("generate", prompt, *flags, "--seed", 4 + number, "--json").json
        for number, prompt in enumerate(prompts)
    ]
    file = ("--prompts", tmp_path / "prompts")
    record = run("generate", *file, *flags, "--seed", 4, "--batch", 2, "--json").json
    assert set(record) == {"answers", "sampling", "seed", "versions"}
    assert [answer["prompt"] for answer in record["answers"]] == prompts
    assert [answer["seed"] for answer in record["answers"]] == [4, 5, 6]
    assert [answer["text"] for answer in record["answers"]] == [answer["text"] for answer in alone]
    ran = run("generate", *prompts, *flags, "--seed", 4)
    expected = [f"> {p}\n{answer['text']}" for p, answer in zip(prompts, alone, strict=True)]
    assert ran.out == "".join(text + "\n" * (text[-1] != "\n") + "\n" for text in expected)
    assert "jaxkv: 90 tokens (3 of 3 prompts), " in ran.err
    (tmp_path / "prompts").write_text("Hello", encoding="utf-8")
    ran = run("generate", *file, *flags, "--seed", 4)  # a file of one line is a batch too
    assert ran.out == f"> Hello\n{run('generate', 'Hello', *flags, '--seed', 4).out}\n"


def test_a_mesh_splits_the_prompts_of_a_batch(run, model):
    """Two prompts over two devices; a batch that is left over must be divided too."""
    flags = ("--model", model, "--max-new-tokens", 12, "--json", "--batch", 2)
    alone, split = (
        run("generate", "Hello", "Good day", *flags, *mesh).json["answers"]
        for mesh in ((), ("--mesh", "data=2"))
    )
    assert [answer["text"] for answer in split] == [answer["text"] for answer in alone]
    refused = run("generate", "Hello", "Good day", "He said", *flags, "--mesh", "data=2")
    assert refused.code == 2 and "1 sequence over 2 places; use data=1" in refused.err


def test_ctrl_c_keeps_the_texts_of_all_prompts(run, model, press):
    """And the batches that have not begun are left out."""
    press(Generation, "blocks", 3, items=True)
    flags = ("--model", model, "--max-new-tokens", 10000, "--ignore-eos", "--batch", 2, "--json")
    ran = run("generate", "Hello", "Good day", "Not begun", *flags)
    answers = json.loads(ran.out)["answers"]
    assert ran.code == 130 and [answer["prompt"] for answer in answers] == ["Hello", "Good day"]
    for answer in answers:
        assert answer["finish_reason"] == "interrupted" and 0 < len(answer["tokens"]) < 10000


def test_ctrl_c_at_the_last_block_of_a_batch(run, model, press):
    """The batch is complete, and later prompts are missing, so the command is interrupted."""
    press(Generation, "blocks", None, items=True)
    flags = ("--model", model, "--max-new-tokens", 5, "--ignore-eos", "--batch", 1)
    ran = run("generate", "Hello", "Good day", *flags, "--json")
    (answer,) = json.loads(ran.out)["answers"]
    assert ran.code == 130
    assert (answer["prompt"], answer["finish_reason"]) == ("Hello", "length")
    ran = run("generate", "Hello", "Good day", *flags)
    assert ran.code == 130 and "5 tokens (1 of 2 prompts)" in ran.err


def test_ctrl_c_during_a_later_prefill_keeps_the_finished_answers(run, model, press, monkeypatch):
    """In the first of its chunks; the handler that ends the process at once must not be called."""
    chunks, leaves = press(streams, "prefill_chunk", 1), []
    monkeypatch.setattr("jaxkv.cli.leave", lambda: leaves.append(True))
    flags = ("--model", model, "--max-new-tokens", 5, "--ignore-eos", "--batch", 1, "--json")
    ran = run("generate", "Hello", "Good day " * 50, "Third", *flags)
    assert ran.code == 130 and len(chunks) == 2 and not leaves
    (answer,) = json.loads(ran.out)["answers"]
    assert (answer["prompt"], len(answer["tokens"])) == ("Hello", 5)


def test_only_line_ends_separate_prompts(run, model, tmp_path):
    """str.splitlines would also split at a form feed, a vertical tab or U+2028."""
    (tmp_path / "prompts").write_bytes("one\x0cpage\r\n\r\na\u2028b\x0bc\n".encode())
    flags = ("--model", model, "--max-new-tokens", 2, "--json")
    record = run("generate", "--prompts", tmp_path / "prompts", *flags).json
    assert [answer["prompt"] for answer in record["answers"]] == ["one\x0cpage", "a\u2028b\x0bc"]


def test_the_default_model_is_the_shipped_one(run):
    words = ("Once upon a time", "--max-new-tokens", 20, "--json")
    record = run("generate", *words).json
    assert record["text"] == models.generate(
        models.load(), words[0], max_new_tokens=20, sampling=models.Sampling(temperature=0.8)
    ).text  # fmt: skip
    assert record["sampling"]["temperature"] == 0.8


def test_an_answer_obeys_the_schema_of_a_file(run, model, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "green"]}', encoding="utf-8")
    flags = ("--model", model, "--json-schema", schema, "--temperature", 1)
    for seed in range(3):
        ran = run("generate", "Hello", *flags, "--seed", seed)
        assert (ran.code, json.loads(ran.out) in ("red", "green")) == (0, True)
    for text, words in (
        ('{"not": {}}', "Unimplemented keys"),
        ("{", "must be JSON"),
        ("", "empty"),
    ):
        schema.write_text(text, encoding="utf-8")
        ran = run("generate", "Hello", *flags)
        assert ran.code == 2
        assert words in ran.err
        assert ran.err.count("\n") == 1
    ran = run("generate", "Hello", "--model", model, "--json-schema", tmp_path / "none")
    assert ran.code == 2
