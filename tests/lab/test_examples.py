"""Every command line and Python snippet of README.md and docs/, run as printed."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markdown_it import MarkdownIt

import jaxkv
from jaxkv.rotary import NoPosition
from jaxkv.state.batch import nbytes
from jaxkv.testing import check_policy
from jaxkv.testing.subject import SPEC
from tests.pages import ROOT, blocks, run_block

FOLDERS = ("docs", "docs/results")
PAGES = (
    "README.md",
    *sorted(f"{x}/{page.name}" for x in FOLDERS for page in (ROOT / x).glob("*.md")),
)
# The beginning of a command -> why it is not run.
NOT_RUN = {
    "pip install": "CI installs them; test_readme.py compares them with pyproject.toml",
    "vllm-router": "tests/serve/cli/test_router.py runs it",
    "lm_eval": "tests/serve/http/test_lm_eval.py runs it",
    "JAX_PLATFORMS=cuda": "needs a GPU",
    **dict.fromkeys(
        (
            "python -m jaxkv.evals.streaming.tables",
            "python -m jaxkv.evals.reservoir.stream_losses",
            "python -m jaxkv.evals.balancekv.single_layer",
        ),
        "reads novels, for hours",
    ),
    **dict.fromkeys(
        (
            "jaxkv data --tokenizer smollm2-135m",
            "jaxkv pretrain --from smollm2-135m",
            "jaxkv perplexity --model smollm2-135m --sinks",
            "jaxkv advise --model smollm2-135m",
            "jaxkv view --model smollm2-135m",
        ),
        "takes minutes; tests/models/cli runs the command with a small model",
    ),
    "python -m jaxkv.evals.training.sinks_in_front": "reads a novel 32 times, for hours",
}
# The beginning of a command -> words that end it sooner.
SOONER = {
    'jaxkv generate "Once upon a time" --max-new-tokens 20000': " --max-new-tokens 3000",
    "jaxkv advise --text": " --max-tokens 1500",
    "jaxkv pretrain": " --set steps=2 --set eval_every=2 --set save_every=2 --set valid_samples=2",
}
# The beginning of a command -> what a person types.
TYPED = {
    "jaxkv chat": "Who wrote the play Hamlet?\n/help\nTell me a short story about a lighthouse.\n",
}
SERVER = "jaxkv serve"  # runs until a signal ends it
REAL_MODEL = "smollm2-135m"
BEYOND = "jaxkv: warning: full looks back "  # compare shows what happens beyond the context
LOOP = 0.5  # share of repeated groups of four words in any 120 words; a loop has nearly 1
pytestmark = pytest.mark.skipif(os.name != "posix", reason="the commands are for a POSIX shell")


def commands(page: str) -> list[str]:
    """The commands of a page, with continued lines joined."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip()]


ALL = list(dict.fromkeys(line for page in PAGES for line in commands(page)))
RUN = [line for line in ALL if not line.startswith(tuple(NOT_RUN))]


def repetition(text: str) -> float:
    """The largest share of repeated groups of four words in any 120 words of a text."""
    words, shares = text.split(), [0.0]
    for start in range(0, max(len(words) - 60, 0), 60):
        part = words[start : start + 120]
        groups = [tuple(part[at : at + 4]) for at in range(len(part) - 3)]
        shares.append(1 - len(set(groups)) / len(groups))
    return max(shares)


def test_readme_has_the_bytes_of_both_caches():
    """30 layers of SmolLM2-135M in float32."""
    spec = jaxkv.Spec(3, 64, 64**-0.5, NoPosition())
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for policy, words in (
        ("full:start=20000", "At 20,000 tokens its full cache takes {:.0f} MiB"),
        (
            "streaming:sinks=4,window=252",
            "the cache of 4 sinks and 252 newest tokens takes {:.1f} MiB",
        ),
    ):
        size = 30 * jaxkv.policy(policy).bytes_per_sequence(spec)
        assert words.format(size / 2**20) in text


def test_every_block_of_code_has_a_language_that_is_run():
    for page in PAGES:
        tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text("utf-8"))
        languages = {token.info for token in tokens if token.type in ("fence", "code_block")}
        assert languages <= {"bash", "python"}, page


def test_the_tables_of_commands_are_current():
    for line in (*NOT_RUN, *SOONER, *TYPED, SERVER):
        assert any(command.startswith(line) for command in ALL), f"no page has {line!r}"


def test_every_policy_string_of_the_pages_is_one():
    """`name:field=value,...`, with or without the layers that it is for."""
    policies = set()
    for page in PAGES:
        policies |= set(re.findall(r"`([\w=*]*[a-z-]+:\w+=[^`\s]+|[\d*]=[a-z-]+;[^`\s]+)`",
                                (ROOT / page).read_text("utf-8")))  # fmt: skip
    policies -= {"name:field=value,..."}
    assert len(policies) > 5
    for text in policies:
        jaxkv.by_layer(text.replace("=FILE", "=smollm2-135m"), 30)  # of a user


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files that the commands name, and `jaxkv` and `python` to run them."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("FILE", "books/train/1.txt", "books/valid/2.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "models/default/passage.txt", folder / name)
    text = (ROOT / "models/default/passage.txt").read_text("utf-8")
    (folder / "story.txt").write_text(text[:700], "utf-8")  # within the trained context
    (folder / "models/default").mkdir(parents=True)
    shutil.copy(ROOT / "models/default/passage.txt", folder / "models/default")
    (folder / "bin").mkdir()
    (folder / "bin/jaxkv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxkv "$@"\n')
    (folder / "bin/jaxkv").chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """A user's environment: without the flags by which tests compile fast and run slowly."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PATH": path
    }


def text_of(table: dict[str, str], command: str) -> str:
    return next((value for line, value in table.items() if command.startswith(line)), "")


def mark(command: str):
    marks = [pytest.mark.real_model] if REAL_MODEL in command else []
    return pytest.param(command, marks=marks)


@pytest.mark.parametrize("command", [mark(line) for line in RUN if not line.startswith(SERVER)])
def test_a_command_runs_as_printed(command, folder, request):
    """In the order of the pages: later commands use what earlier ones wrote."""
    if REAL_MODEL in command:
        request.getfixturevalue("smollm2_file")
    done = subprocess.run(
        ["bash", "-c", command + text_of(SOONER, command)], cwd=folder, env=environment(folder),
        input=text_of(TYPED, command), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    warned = [line for line in done.stderr.splitlines() if "warning" in line]
    assert all(line.startswith(BEYOND) for line in warned), warned
    assert done.stdout.strip()
    assert repetition(done.stdout) < LOOP, done.stdout


@contextmanager
def server(command: str, folder: Path) -> Iterator[None]:
    """The server of a command, ready for requests; Ctrl-C ends it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 8000))
        except OSError:
            pytest.skip("port 8000, which the pages name, is in use")
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=environment(folder),
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        killer = threading.Timer(600, process.kill)
        killer.start()
        try:
            lines = iter(process.stderr.readline, "")
            assert any(line.startswith("jaxkv: serving ") for line in lines), "it did not start"
            yield
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(60) == 130
        finally:
            killer.cancel()
            process.kill()


def run_blocks(page: str, names: dict) -> str:
    """Execute the Python of a page in one namespace; returns what it prints.

    Without the __future__ imports here, which would change its dataclasses.
    """
    with redirect_stdout(io.StringIO()) as out:
        for block in blocks(page, "python"):
            exec(compile(block, page, "exec", dont_inherit=True), names)
    return out.getvalue()


def test_the_python_of_readme_runs():
    names: dict = {"__name__": "readme"}
    printed = run_blocks("README.md", names)
    assert len(names["answer"].tokens) > 500 and names["answer"].text in printed
    assert repetition(printed) < LOOP
    assert names["out"].shape == names["q"].shape


def test_the_scores_of_the_policies_page_compress_a_prompt():
    names: dict = {"__name__": "policies"}
    run_blocks("docs/policies.md", names)
    states, capacity = names["stream"].decoding.states, names["policy"].capacity
    filled = [int((np.asarray(state.log_weight) > -np.inf).sum()) for state in states]
    kv_heads, sinks = names["llm"].spec.kv_heads, names["policy"].sinks
    assert sum(filled) == len(states) * kv_heads * (capacity - sinks)
    assert 0 < names["tokens"].shape[1] <= 16


def test_the_python_of_the_serving_pages_runs(folder):
    (command,) = [line for line in commands("docs/serving.md") if line.startswith(SERVER)]
    assert command in commands("README.md")
    with server(command, folder):
        printed = run_blocks("docs/serving.md", {}) + run_blocks("docs/serving_reference.md", {})
    assert len(printed.split()) > 200 and repetition(printed) < LOOP


def integration_names() -> dict:
    """What the blocks of docs/integration.md take from the text around them."""
    from jaxkv.contract import Chunk, Partial

    q, k = jnp.ones((2, 3, 16, 64)), jnp.ones((2, 3, 8, 64))
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.uint32), (2, 3))
    chunk = Chunk(q, k, k, positions, jnp.ones((2, 3), bool))
    return {
        "__name__": "integration", "batch": 2, "rng": jax.random.key(0),
        "chunk": chunk, "slots": 256, "sinks": 4, "window": 252, "positions": positions, "q": q,
        "k": jnp.ones((2, 8, 5, 64)), "v": jnp.ones((2, 8, 5, 64)), "scale": 64**-0.5, "x": q,
        "bias": jnp.zeros((2, 1, 1, 1, 5)),
        "partial": Partial(q, jnp.zeros((2, 3, 16))),
        "params": decoder_params(), "prompt": PROMPT, "valid": PROMPT > 0,
    }  # fmt: skip


# Two prompts of up to 40 tokens; the second is padded on the left.
PROMPT = jnp.asarray(np.random.default_rng(0).integers(1, 97, (2, 40))).at[1, :7].set(0)
LAYERS = 2


def decoder_params() -> dict:
    """Random weights of two layers of 16 query heads and 8 KV heads of 64 dimensions."""
    draw = np.random.default_rng(1).normal
    sizes = {"q": (32, 16, 64), "k": (32, 8, 64), "v": (32, 8, 64), "o": (16, 64, 32)}
    layers = {name: draw(size=(LAYERS, *size)) / 6 for name, size in sizes.items()}
    weights = {"embedding": draw(size=(97, 32)), "logits": draw(size=(32, 97)), "layers": layers}
    return jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), weights)


def test_the_layer_in_the_integration_page_runs():
    names = integration_names()
    exec(compile(blocks("docs/integration.md", "python")[0], "integration", "exec"), names)
    q, k, _, positions, valid = names["chunk"]
    out, _ = names["attend"](names["state"], q, k, k, positions, valid)
    assert out.shape == q.shape and bool((abs(out - 1) < 1e-5).all())
    assert names["state"].k.is_deleted()  # donated


@pytest.fixture(scope="module")
def page() -> dict:
    """The names of docs/integration.md up to its loop, which has run."""
    names = integration_names()
    for word in ("def attend(state", "def decoder(", "def generate("):
        run_block("docs/integration.md", word, names)
    return names


def with_small_caches(name: str) -> jaxkv.Policy:
    """A policy that acts on a prompt of 40 tokens, and compiles in a second."""
    fields = {"start": 8, "window": 4, "capacity": 16, "block": 8, "sinks": 2, "L": 4, "K": 4}
    kind = jaxkv.POLICIES[name]
    names = {f.name for f in dataclasses.fields(kind)} - ({"start"} if not kind().grows else set())
    return kind(**{field: value for field, value in fields.items() if field in names})


@pytest.mark.parametrize("name", jaxkv.POLICIES)
def test_the_loop_of_the_integration_page_runs_under_every_policy(name, page):
    policy, arguments = with_small_caches(name), (page["params"], PROMPT, PROMPT > 0, 20)
    if name == "pyramidkv":  # its layers have other sizes
        with pytest.raises(ValueError, match="unpack"):
            page["generate"](policy, *arguments)
        return
    tokens, states = page["generate"](policy, *arguments)
    assert tokens.shape == (2, 20)
    assert nbytes(states) == LAYERS * 2 * policy.bytes_after_prefill(page["spec"], 40, 20)
    numbers = [leaf for leaf in jax.tree.leaves(states) if leaf.dtype == jnp.float32]
    assert not any(jnp.isnan(leaf).any() for leaf in numbers)


def test_the_loop_generates_the_tokens_of_full_attention(page):
    params, spec = page["params"], page["spec"]
    tokens, _ = page["generate"]("full:start=16", params, PROMPT, PROMPT > 0, 20)
    for prompt, generated in zip(PROMPT, tokens, strict=True):
        text = jnp.concatenate([prompt[prompt > 0], generated])[None]
        positions = jnp.arange(text.shape[1], dtype=jnp.uint32)[None]
        x = params["embedding"][text]
        for layer in range(LAYERS):
            weights = {name: array[layer] for name, array in params["layers"].items()}
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
            q, k = (spec.encoding.rotate(array, positions) for array in (q, k))
            out = jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=True)
            x = x + jnp.einsum("btnh,nhd->btd", out, weights["o"])
        expected = jnp.argmax(x @ params["logits"], axis=-1)[0, -21:-1]
        np.testing.assert_array_equal(generated, expected)
    assert len(set(tokens.ravel().tolist())) > 5


def test_the_integration_page_runs_and_its_policies_keep_the_laws(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = integration_names()
    rows = run_blocks("docs/integration.md", names).splitlines()
    chosen = next(row for row in rows if row.endswith(names["best"]))
    assert len(rows) == 5 and chosen.startswith("+0.000 ± 0.000")

    class WithoutPenalties(names["Newest"]):
        def init(self, spec, batch, rng):
            names["check_spec"](spec)
            return super().init(spec, batch, rng)

        def update(self, spec, state, chunk):
            plain = dataclasses.replace(spec, encoding=SPEC.encoding, softcap=None)
            return super().update(plain, state, chunk)

    laws = [result.statement for result in check_policy(WithoutPenalties(window=8))]
    assert "logits may be penalised and capped" not in laws
    names["check_spec"](SPEC)
