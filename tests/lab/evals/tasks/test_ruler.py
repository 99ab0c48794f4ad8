"""RULER's own tasks: the prompts and scores of its package, a run on a small model, bad input."""

import json
import os
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from jaxkv import models
from jaxkv.evals.lib.run import run
from jaxkv.evals.tasks import __main__ as tasks
from jaxkv.evals.tasks import prompts, ruler, score, served
from jaxkv.evals.tasks import run as task_run
from jaxkv.models.generation.serving import Language, make_engine
from tests.serve.http.conftest import serving
from tests.tiny import write_tiny

package = pytest.mark.skipif(
    util.find_spec("long_context_eval") is None,
    reason="needs RULER's package: pip install -e '.[ruler]'",
)
SEED = 42  # that of the package's `prepare.py`
LENGTHS = {"niah_multiquery": 2048, "vt": 1024, "cwe": 1024, "fwe": 1024, "qa_1": 4096}
# Modules in the place of those that the package's scripts import and that need a download or torch.
STUBS = {
    "nltk/__init__.py": "class data:\n    find = staticmethod(lambda name: name)\n",
    "nltk/tokenize.py": (
        "import re\nsent_tokenize = lambda text: re.split(r'(?<=[.!?])\\s+', text)\n"
    ),
    "pandas.py": "from unittest.mock import MagicMock\nDataFrame = concat = MagicMock()\n",
    "transformers.py": (
        "import tokenizers\n"
        "class AutoTokenizer:\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, path, **_):\n"
        "        cls.tokenizer = tokenizers.Tokenizer.from_file(path)\n"
        "        return cls()\n"
        "    def tokenize(self, text):\n"
        "        return self.tokenizer.encode(text, add_special_tokens=False).tokens\n"
    ),
}


@pytest.fixture(scope="module")
def llm():
    return models.load()


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """Runs a script of the package as its entry point does, with the stubs."""
    stubs = tmp_path_factory.mktemp("stubs")
    for name, text in STUBS.items():
        (stubs / name).parent.mkdir(exist_ok=True)
        (stubs / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(stubs)}

    def call(script: str, **words: object) -> None:
        (folder,) = util.find_spec("long_context_eval").submodule_search_locations
        arguments = [f"--{key}={value}" for key, value in words.items()]
        subprocess.run(
            [sys.executable, str(Path(folder) / script), *arguments],
            env=environment, check=True, capture_output=True,
        )  # fmt: skip

    return call


@package
@pytest.mark.parametrize("name, length", LENGTHS.items())
def test_prompts_are_those_of_the_package(llm, called, tmp_path, name, length):
    llm.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    called(
        "data/prepare.py", save_dir=tmp_path, task=name, tokenizer_type="hf",
        tokenizer_path=tmp_path / "tokenizer.json", max_seq_length=length, num_samples=2,
    )  # fmt: skip
    lines = (tmp_path / name / "validation.jsonl").read_text("utf-8").splitlines()
    samples = ruler.samples(llm, name, length, 2, SEED)
    for line, sample in zip(lines, samples, strict=True):
        entry = json.loads(line)
        assert sample.context + sample.question + sample.lead == entry["input"]
        assert list(sample.answers) == entry["outputs"]
        assert sample.lead.startswith((" Answer:", " The special magic"))
        assert len(sample.question) < 600 < len(sample.context)
        assert not {ruler.SPLIT, ruler.LEAD} & {*sample.context}


@package
def test_scores_are_those_of_the_package(called, tmp_path):
    answers = {
        "niah_multivalue": (["12", "34"], ["12 and 56", "34\x0012", "", " none"]),
        "qa_1": (["Paris", "the city"], ["It is PARIS.", "The City", "Rome", ""]),
        "vt": (["ABC"], ["abc", "AB C", "x\nABC", "\x01"]),
    }
    for name, (outputs, texts) in answers.items():
        lines = [{"index": i, "input": "", "outputs": outputs, "pred": text, "others": {}}
                 for i, text in enumerate(texts)]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    called("eval/evaluate.py", data_dir=tmp_path, benchmark="synthetic")
    expected = json.loads((tmp_path / "per_sample_scores.json").read_text())
    for name, (outputs, texts) in answers.items():
        scores = [ruler.task(name).match(text, outputs) for text in texts]
        assert [100 * value for value in scores] == expected[name]


@package
def test_a_run_measures_what_full_attention_solves(tmp_path, trials, monkeypatch):
    """A bar of zero, because random weights solve nothing; ten documents exceed this length."""
    folder = write_tiny(tmp_path / "tiny", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}:"
    )
    for module in (prompts, task_run, tasks):
        monkeypatch.setattr(module, "ROOM", 512)
    words = f"--model {folder} --tasks fwe qa_1 --lengths 1024 --samples 2 --quick"
    words = f"{words} --policies streaming snapkv --ratios 0.25".split()
    run(tasks.MEASURE, words)
    for bar, measured in ((score.GATE, False), (0.0, True)):
        monkeypatch.setattr(score, "GATE", bar)
        run(tasks.MEASURE, words)
        results = json.loads((trials / "ruler.json").read_text())["results"]["tasks"]
        case = results["fwe"]["1024"]
        assert case["scored"] == measured and results["qa_1"]["1024"]["full"] == {"samples": 0}
        rows = case["ratios"].get("0.25", {})
        assert [*rows] == ["streaming", "snapkv"] * measured
        assert all(row["kl"] > 0 and 0 <= row["score"] <= 1 for row in rows.values())


@package
@pytest.mark.parametrize("policy", ["full", "streaming:sinks=4,window=252"])
def test_the_package_asks_a_server(llm, policy):
    """Its client gets the answers of the Python interface, and its scorer reads them."""
    (sample,) = ruler.samples(llm, "fwe", 256, 1, SEED)
    text = sample.context + sample.question + sample.lead
    *context, last = llm.tokenizer.encode(text)
    task = ruler.task("fwe")
    prompt = prompts.TaskPrompt(context, [last], sample.answers)
    batch = task_run.Batch(llm, [prompt], task.tokens, 512, [0])
    (answer,) = batch.greedy(batch.prefill(batch.full_policy if policy == "full" else policy))
    expected = llm.tokenizer.decode(answer)
    engine = make_engine(llm, policy, max_batch=1, max_len=512, chunk=64)
    with serving(engine, Language(llm, served.NAME)) as running:
        ask = served.client(running.port, task.tokens)
        assert ask([*context, last]) == expected
        asked = [prompt._replace(answers=(expected.split()[0],))]
        assert served.scores_of(ask, task.match, asked).tolist() == [1]


@pytest.mark.parametrize("version", [None, "26.2"])
def test_another_package_is_one_line(version, tmp_path, trials, monkeypatch, capsys):
    def version_of(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    folder = write_tiny(tmp_path / "tiny", max_position_embeddings=2048)
    with pytest.raises(SystemExit) as stopped:
        run(tasks.MEASURE, ["--model", str(folder), "--tasks", "vt", "--quick"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and not trials.exists()
    assert line == (
        "error: RULER's tasks need nvidia-long-context-eval 26.3, got "
        f"{version or 'none'}; install it with pip install nvidia-long-context-eval==26.3"
    )


@package
def test_a_context_beyond_the_model_is_one_line(tmp_path, trials, capsys):
    folder = write_tiny(tmp_path / "tiny", max_position_embeddings=2048)
    for measure in (tasks.MEASURE, served.MEASURE):
        with pytest.raises(SystemExit) as stopped:
            run(measure, f"--model {folder} --tasks vt --lengths 2048 --quick".split())
        (line,) = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and not trials.exists()
        assert line.startswith("error: --lengths must be at most 1792 for tiny") and "2048" in line
