"""Mistyped flags, commands and policies are answered with the nearest that exists."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv.cli import COMMANDS, Parser
from jaxkv.errors import UserError
from jaxkv.policies import POLICIES
from jaxkv.policy_spec import parse_policy
from tests.models.cli.test_bad_input import refused

ROOT = Path(__file__).resolve().parents[3]


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


def test_a_parser_without_commands_names_the_nearest_flag_too():
    """As those of experiments."""
    parser = Parser("experiment")
    parser.add_argument("--model", required=True)
    with pytest.raises(UserError, match="--modle; did you mean --model"):
        parser.parse_args(["--modle", "m"])


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy(name):
    # Without its last letter topk is as near to topp.
    for wrong in {mistyped(name), name.upper(), f"{name}s"} - {*POLICIES, "top"}:
        with pytest.raises(UserError, match=f"did you mean '{name}'"):
            parse_policy(wrong)


def test_flags_and_commands(run, model, text):
    words = ("generate", "Hi", "--model", model, "--max-tokens", 5)
    refused(run(*words), "--max-tokens; did you mean --max-new-tokens?", "generate --help")
    refused(run("perplexity", "--txt", text), "--txt; did you mean --text?")
    refused(run("generat", "Hi"), "unknown command 'generat'", "did you mean generate?")
    refused(run("policies", "windw"), "unknown policy 'windw'", "mean 'window'", "balance-stream")
    refused(run("--vesion"), "--vesion; did you mean --version?")


def test_the_version(run):
    assert run("-V") == run("--version") and run("-V").out.startswith("jaxkv ")


def test_the_package_is_a_program():
    run = [sys.executable, "-m", "jaxkv", "-V"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("jaxkv ")
