"""StreamEval at tiny size: where sentences stand, what counts as right, and the verdict."""

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import parts
from jaxkv.evals.lib.record import Record, run_command
from jaxkv.evals.lib.verdict import UNSEEN, decide
from jaxkv.evals.streaming import stream_eval
from jaxkv.evals.streaming.stream_eval import DISTANCES, EVERY, Fact, Streamed
from jaxkv.models.network import uncached
from tests.tiny import write_tiny

TOKENS = 1_800


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream_eval") / "model"
    return models.load(write_tiny(folder, max_position_embeddings=2_048))


@pytest.fixture(scope="module")
def streams(llm):
    random = np.random.default_rng(0)
    novels = [random.integers(97, 122, TOKENS).tolist() for _ in range(2)]
    return [stream_eval.stream_of(llm, ids, [0, n]) for n, ids in enumerate(novels)]


def test_every_sentence_ends_before_its_distances(llm, streams):
    for streamed in streams:
        assert len(streamed.tokens) == TOKENS and len(streamed.facts) == TOKENS // EVERY
        for number, fact in enumerate(streamed.facts, 1):
            text = llm.tokenizer.decode(streamed.tokens[EVERY * (number - 1) : EVERY * number])
            said = llm.tokenizer.decode(fact.ids)
            assert text.endswith(f"{said}.\n\n") and "The secret number of the " in said
            digits = llm.tokenizer.decode(fact.ids[fact.start :])
            assert said.endswith(f" is {digits.strip()}") and digits.strip().isdigit()
    assert streams[0].facts[0].ids != streams[1].facts[0].ids


def test_greedy_numbers_are_right_and_others_are_not(llm, streams):
    """The sentences are replaced by what a forward pass without a cache writes."""
    at, number = EVERY + 60, 3
    asked = []
    for streamed in streams:
        ids, question = streamed.tokens[:at], llm.tokenizer.encode(" It is", bos=False)
        for _ in range(number):
            decoder, hidden, _ = uncached.forward(
                llm.config, llm.weights, np.array([[*ids, *question]])
            )
            question = [*question, int(np.argmax(decoder.logits(hidden)[:, 0, -1]))]
        asked.append(Fact(question, len(question) - number))
    wrong = asked[0]._replace(ids=[*asked[0].ids[:-1], (asked[0].ids[-1] + 1) % 256])
    questioned = [
        Streamed(streamed.tokens, [fact])
        for streamed, fact in zip(streams, (wrong, asked[1]), strict=True)
    ]
    right = stream_eval.answers(llm, questioned, "full:max=1024", [(at, 1)], at)
    assert right[:, DISTANCES.index(60)].tolist() == [0, 1]
    assert not right[:, 1:].any()


def test_a_question_leaves_the_stream_as_it_was(llm, streams):
    stream = models.Stream(llm, "streaming:sinks=4,window=60", 2)
    stream_eval.feed(stream, np.array([streamed.tokens[:130] for streamed in streams]))
    before = jax.tree.map(np.asarray, stream.decoding)
    stream_eval.correct(stream, [streamed.facts[0] for streamed in streams])
    jax.tree.map(np.testing.assert_array_equal, before, stream.decoding)
    assert stream.lengths.tolist() == [130, 130]


@pytest.mark.slow
def test_a_record_has_every_policy_distance_and_gate(llm, streams, monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "TRIALS", tmp_path)
    monkeypatch.setattr(stream_eval, "POLICIES", {"streaming": "streaming:sinks=4,window=252"})
    record = Record("stream_eval", quick=True)
    results = stream_eval.run(llm, streams, parts.Parts(record, 3))
    assert results["questions"] == 2 and results["gate_questions"] == 1
    distances = [str(distance) for distance in DISTANCES]
    for row in (results["gate"], *results["right"].values()):
        assert list(row) == distances
        assert all(0 <= share <= 1 for distance in row.values() for share in distance["each"])
    assert list(results["right"]) == ["streaming", "full"]
    assert decide(stream_eval.CLAIMS[0], results)[1] == UNSEEN  # this model answers nothing


@pytest.mark.parametrize(
    "words, reported",
    [
        (["--texts", "README.md"], "at least 2 files, got 1"),
        (["--texts", "README.md", "LICENSE", "--tokens", "900"], "--tokens must be from 1800"),
        (["--texts", "README.md", "{short}", "--tokens", "2000"], "2000 tokens, short has fewer"),
    ],
)
def test_bad_input_is_one_line(llm, words, reported, monkeypatch, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("A short text.")
    words = [word.format(short=tmp_path / "short.txt") for word in words]
    monkeypatch.setattr(models, "load", lambda *_: llm)
    monkeypatch.setattr("sys.argv", ["stream_eval", *words, "--quick"])
    with pytest.raises(SystemExit) as stopped:
        run_command(stream_eval.main)
    assert stopped.value.code == 2 and reported in capsys.readouterr().err.splitlines()[-1]
