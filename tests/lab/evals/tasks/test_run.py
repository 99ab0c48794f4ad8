"""Tasks end to end on a small model: oracles in numpy, interruptions, and bad input."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib.run import run
from jaxkv.evals.tasks import __main__ as tasks
from jaxkv.evals.tasks import budgets, model_rows, score
from jaxkv.evals.tasks.prompts import TaskPrompt, prompts
from jaxkv.evals.tasks.run import COLUMNS, Batch
from jaxkv.models.generation.context_scores import around_context
from jaxkv.models.generation.kvzap import kvzap_stream
from jaxkv.models.generation.kvzip import kvzip_stream
from jaxkv.models.network import uncached
from jaxkv.models.tools.passage import passage
from jaxkv.policy_spec import parse_policy
from tests.lab.evals.magicpig.test_sparse_losses import share_read
from tests.models.test_families import write_family
from tests.tiny import write_tiny

TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
POLICIES = (
    "streaming:sinks=2,window=30",
    "snapkv:capacity=40,window=8,start=640",
    "topk:share=0.2,sinks=2,window=8,start=640",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("tasks") / "tiny", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return models.load(folder)


@pytest.fixture(scope="module")
def batch(llm):
    random = np.random.default_rng(0)
    ids = lambda n: random.integers(2, 250, n).tolist()
    prompts = [TaskPrompt(ids(90), ids(9), ("a",)), TaskPrompt(ids(130), ids(5), ("b",))]
    return Batch(llm, prompts, tokens=6, slots=640, seeds=[0, 1])


def test_full_answers_are_greedy(llm, batch):
    for prompt, answer in zip(batch.prompts, batch.full.answers, strict=True):
        ids = [*prompt.context, *prompt.rest]
        for token in answer:
            decoder, hidden, _ = uncached.forward(llm.config, llm.weights, np.array([ids]))
            assert int(np.argmax(decoder.logits(hidden)[0, -1])) == token
            ids.append(token)
        assert len(answer) == batch.tokens or answer[-1] in llm.eos


@pytest.mark.parametrize("policy", POLICIES)
def test_divergence_is_that_of_a_plain_computation(llm, batch, policy):
    """Full attention without a cache; the policy through `Stream`, token by token."""
    columns = dict(zip(COLUMNS, batch.result(policy).T, strict=True))
    for i, (prompt, answer) in enumerate(zip(batch.prompts, batch.full.answers, strict=True)):
        stream = models.Stream(llm, policy, seed=i)
        stream.prefill([prompt.context])
        stream.finish_prefill()
        stream.prefill([prompt.rest])
        rows = [np.asarray(stream.decoding.logits[0], np.float64)]
        for token in answer[:-1]:
            stream.prefill([[token]])
            rows.append(np.asarray(stream.decoding.logits[0], np.float64))
        ids = np.array([[*prompt.context, *prompt.rest, *answer[:-1]]])
        decoder, hidden, _ = uncached.forward(llm.config, llm.weights, ids)
        logits = np.asarray(decoder.logits(hidden), np.float64)[0, -len(answer) :]
        kl, agrees = [], []
        for p, q in zip(logits, rows, strict=True):
            p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (p, q))
            kl.append(np.sum(p * np.log(p / q)))
            agrees.append(p.argmax() == q.argmax())
        assert columns["kl"][i] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-6)
        assert columns["agreement"][i] == np.mean(agrees)
        assert columns["tokens"][i] == len(answer)


@pytest.mark.filterwarnings("ignore:.*keep the model's own window")
@pytest.mark.parametrize("name", ["smollm3", "gemma3"])
@pytest.mark.parametrize("policy", ["full:start=640,max=640", POLICIES[1]])
def test_layers_that_differ_are_read_as_a_stream_reads_them(tmp_path, name, policy):
    """Some without rotation, some with a window and a rotation of their own."""
    llm = models.load(write_family(tmp_path, name))
    ids = np.random.default_rng(0).integers(2, 250, 99).tolist()
    batch = Batch(llm, [TaskPrompt(ids[:90], ids[90:], ("a",))], tokens=6, slots=640, seeds=[0])
    (answer,) = batch.greedy(batch.prefill(policy))
    stream = models.Stream(llm, policy)
    stream.prefill([ids[:90]])
    stream.finish_prefill()
    stream.prefill([ids[90:]])
    tokens, _ = stream.decode(models.Sampling(), 6, llm.eos)
    assert answer == [token for token in tokens[0].tolist() if token >= 0]


def test_heads_that_cache_an_answer(llm, batch):
    """By hand: the head budgets of streaming are equal, so all heads cache the same tokens."""
    answer = llm.tokenizer.encode("b", bos=False, start=False)
    prompts = [
        TaskPrompt([*[3] * 20, *answer, *[3] * 60], [4], ("b",)),
        TaskPrompt([*[3] * 60, *answer, *[3] * 10], [4], ("b",)),
        TaskPrompt([3] * 80, [4], ("b",)),
    ]
    short = Batch(llm, prompts, tokens=4, slots=640, seeds=[0, 1, 2])
    np.testing.assert_array_equal(
        short.answer_heads(short.prefill("streaming:sinks=4,window=28")), [0, 1, np.nan]
    )


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_answers_of_a_policy_are_those_of_generate(llm, batch, policy):
    answers = batch.greedy(batch.prefill(policy))
    for i, (prompt, answer) in enumerate(zip(batch.prompts, answers, strict=True)):
        stream = models.Stream(llm, policy, seed=i)
        stream.prefill([prompt.context])
        stream.finish_prefill()
        stream.prefill([prompt.rest])
        out, _ = stream.decode(models.Sampling(), batch.tokens, llm.eos)
        assert [t for t in out[0].tolist() if t >= 0] == answer


@pytest.mark.parametrize("method", budgets.SCORED)
def test_a_scored_context_is_that_of_a_stream_under_global_budgets(llm, batch, method):
    text = f"{method}:capacity=40,start=640,window=8"
    policy, joint = model_rows.policy_of(text), batch.prefill(text)
    front = len(around_context(llm)[0])
    for prompt, answer in zip(batch.prompts, batch.greedy(joint), strict=True):
        if method == "kvzip":
            stream = kvzip_stream(llm, prompt.context, front, policy)
        else:
            stream = kvzap_stream(llm, prompt.context, model_rows.kvzap(llm), policy)
        stream.prefill([prompt.rest])
        out, _ = stream.decode(models.Sampling(), batch.tokens, llm.eos)
        assert [t for t in out[0].tolist() if t >= 0] == answer


@pytest.mark.parametrize("policy", POLICIES)
def test_a_score_is_that_of_the_answer_of_the_policy(llm, batch, policy):
    """The prompts ask for what the policy answers, and then for what full attention answers."""
    greedy, full = batch.greedy(batch.prefill(policy)), batch.full.answers
    text = llm.tokenizer.decode
    asked = [
        replace(batch, prompts=[
            prompt._replace(answers=(text(answer),))
            for prompt, answer in zip(batch.prompts, answers, strict=True)
        ]) for answers in (greedy, full)
    ]  # fmt: skip
    assert asked[0].result(policy)[:, 0].tolist() == [1, 1]
    agrees = [text(a) == text(b) for a, b in zip(greedy, full, strict=True)]
    assert asked[1].result(policy)[:, 0].tolist() == agrees
    assert asked[1].result("full")[:, 0].tolist() == [1, 1]


def test_the_question_follows_the_prefill(llm):
    (plain,) = prompts(llm, "passkey", 700, 1, seed=0)
    (aware,) = prompts(llm, "passkey", 700, 1, seed=0, query_aware=True)
    text = llm.tokenizer.decode
    assert len(plain.context) <= 700 and "What is the pass key?" not in text(plain.context)
    assert text(plain.rest).lstrip().startswith("What is the pass key?")
    assert text(plain.rest).endswith("assistant: The pass key is")
    assert text(aware.context).rstrip().endswith("assistant:")
    assert text(aware.rest) == "The pass key is"
    assert plain.context + plain.rest == aware.context + aware.rest


ARGUMENTS = ["--tasks", "passkey", "--lengths", "512", "--samples", "3", "--batch", "2", "--quick"]
ARGUMENTS += ["--policies", "streaming", "snapkv", "--ratios", "0.25", "--model"]


def test_an_interrupted_run_continues(folder, trials, monkeypatch):
    real, done = Batch.result, []

    def interrupted(self, policy):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(policy)
        return real(self, policy)

    monkeypatch.setattr(Batch, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tasks.MEASURE, [*ARGUMENTS, str(folder)])
    assert not (trials / "tasks.json").exists()
    monkeypatch.setattr(
        Batch, "result", lambda self, policy: done.append(policy) or real(self, policy)
    )
    run(tasks.MEASURE, [*ARGUMENTS, str(folder)])
    assert [policy.split(":")[0] for policy in done] == ["full", "streaming", "snapkv"] * 2
    results = json.loads((trials / "tasks.json").read_text())["results"]
    entry = results["tasks"]["passkey"]["512"]
    assert entry["scored"] is False and entry["full"]["score"] < score.GATE
    for row in entry["ratios"]["0.25"].values():
        assert row["kl"] > 0 and 0 <= row["agreement"] <= 1 and "score" not in row
    monkeypatch.setattr(Batch, "result", lambda *_: pytest.fail("computed again"))
    run(tasks.MEASURE, [*ARGUMENTS, str(folder)])


SMALL = [budgets.settings(size, x, 320, budgets.Tuned(8, 20, 0.9))
         for size in (96, 128, 256) for x in budgets.RATIOS]  # fmt: skip
SMALL.append(budgets.repeated(16 + budgets.MIN_CAPACITY, 16, budgets.WINDOW))


@pytest.mark.parametrize(
    ("right", "read"),
    [("111111111111", 12), ("111111111110", 12), ("110111101111", 8), ("001111111111", 4)],
)
def test_reading_stops_where_the_gate_is_out_of_reach(right, read):
    scores = np.array([*map(float, right)])
    measured = lambda samples: {"full": {"score": scores[: len(samples)]}}
    samples = tasks.within_reach([*range(12)], 4, measured)
    assert len(samples) == read
    assert score.passes(scores.mean()) == score.passes(scores[:read].mean())


@pytest.mark.parametrize("by_name", SMALL, ids=lambda by_name: by_name["snapkv"])
def test_small_budgets_suit_every_policy(by_name):
    assert by_name.keys() <= {*budgets.NAMES, budgets.HALF_WINDOW}
    for policy in by_name.values():
        parse_policy(policy)


def test_magicpig_and_top_p_are_tuned_to_the_share(llm):
    tuned = budgets.tuned(llm, 512, [0.25])[0.25]
    sinks, window, share = budgets.between(512, 0.25)
    text = passage(llm, 512 + 16)
    for name in budgets.TUNED:
        chosen = parse_policy(budgets.settings(512, 0.25, 640, tuned)[name])
        assert (chosen.sinks, chosen.window) == (sinks, window)
        read = share_read(llm, chosen, [text], 512)
        assert read == pytest.approx(share, rel=0.3), name
