"""How much of a prompt is prefilled between two tokens, on a clock that the test moves."""

from __future__ import annotations

import random
import statistics

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.engine import Engine, PrefixConfig, Request, pace
from jaxkv.serve.engine.pace import SHARE, Piece, PrefillPace
from tests.serve.engine.plain import Recorder, ask, finish, plain, prompts

STEP, LAYER, INSERTION = Piece("step", 4), Piece("layer", 128), Piece("insertion", 4)
LAYERS = 30
LIMIT = 0.03
LONG_PROMPT = tuple(range(1, 41)) * 5


def waits(layer, chunks, insertion=0.0, step=lambda number: 0.025, before=0, unlimited=False):
    """The seconds that each token waits for prompts of `chunks` chunks, each with an insertion.

    layer: seconds of a layer, by the number of layers before it. step: seconds of a token alone, by
    its number. before: tokens before the first prompt. unlimited: a prompt came before all answers.
    """
    prefills, works, of_steps, now = PrefillPace(LIMIT), [], [], 0.0
    if unlimited:
        prefills.begin(None, 0, 1)
        assert prefills.take(LAYER, LAYERS) == LAYERS and prefills.take(INSERTION) == 1
        prefills.dispatched(STEP, follows=False)
    plan = [(LAYER, LAYERS)] * chunks + [(INSERTION, 1)]
    done, index, left = 0, 0, plan[0][1]
    while index < len(plan):
        works.append(prefills.dispatched(STEP, follows=bool(works)))
        pieces = works[-1].pieces
        took = sum(layer(number) for number in range(done - pieces.get(LAYER, 0), done))
        of_steps.append(took + insertion * pieces.get(INSERTION, 0))
        if len(works) > 1:  # a token comes a step after it was dispatched
            now += step(len(works) - 2) + of_steps[-2]
            prefills.delivered(works[-2], now)
        if len(works) <= before:
            continue
        prefills.begin(STEP, 1, 1)
        while index < len(plan):
            piece = plan[index][0]
            count = prefills.take(piece, left)
            done += count if piece == LAYER else 0
            left -= count
            if left:
                break
            index += 1
            left = plan[index][1] if index < len(plan) else 0
        assert len(works) < 9000
    return of_steps


def share_above(of_steps, seconds):
    return sum(wait > seconds + 1e-9 for wait in of_steps) / len(of_steps)


@pytest.mark.parametrize("unlimited", [False, True])
@pytest.mark.parametrize("layer", [0.0001, 0.002, 0.009, 0.02, 0.029])
def test_answers_wait_about_the_limit(layer, unlimited):
    of_steps = waits(lambda number: layer, 20 + int(1.2 / (LAYERS * layer)), unlimited=unlimited)
    assert max(of_steps) <= LIMIT + 1e-9
    assert of_steps[:3] == [0, 0, 0] and max(of_steps[:8]) > 0, "a token alone comes first"
    # What fits is used once the time of a layer is known, but for the tokens that come alone.
    busy = [wait for wait in of_steps[16:-2] if wait]
    assert min(busy) > LIMIT - layer - 1e-9
    assert len(busy) > 0.9 * len(of_steps[16:-2])


@pytest.mark.parametrize(
    "answers, prompts, seconds",
    [(1, 1, 0.03), (1, 9, 0.03), (2, 1, 0.05), (8, 16, 0.1), (4, 12, 0.15), (2, 14, 0.15)],
)  # fmt: skip
def test_several_answers_wait_for_a_token_and_longer_in_a_crowd(answers, prompts, seconds):
    pace, now, works, took = PrefillPace(LIMIT), 0.0, [], [0.0]
    for number in range(120):
        works.append(pace.dispatched(STEP, follows=number > 0))
        took.append(0.002 * works[-1].pieces.get(LAYER, 0))
        now += 0.05 + took[-2]
        if number:
            pace.delivered(works[-2], now)
        pace.begin(STEP, answers, prompts)
        pace.take(LAYER, 1000)
    assert max(took) <= seconds + 1e-9
    assert statistics.median(took[40:]) > seconds - 0.003


def test_an_insertion_does_not_come_after_much_else():
    assert max(waits(lambda number: 0.009, 12, insertion=0.02)) <= LIMIT + 1e-9


def test_a_layer_that_takes_longer_than_the_limit_comes_alone():
    assert max(waits(lambda number: 0.2, 1)) == pytest.approx(0.2)


def test_a_layer_that_becomes_slower_is_noticed():
    of_steps = waits(lambda number: 0.002 if number < 180 else 0.012, 40)
    assert max(of_steps[-100:]) <= 0.036 and share_above(of_steps, 0.06) < 0.05


def test_steps_with_several_kinds_of_work_are_learned_from():
    """Short prompts: a chunk of few layers and an insertion in each step."""
    prefills, now, number = PrefillPace(LIMIT), 0.0, 0
    works, took = [], [0.0]
    for number in range(300):
        works.append(prefills.dispatched(STEP, follows=number > 0))
        seconds = 0.0004 if number < 150 else 0.01
        took.append(sum(n * seconds for piece, n in works[-1].pieces.items()))
        now += 0.025 + took[-2]
        if number:
            prefills.delivered(works[-2], now)
        prefills.begin(STEP, 1, 1)
        if prefills.take(LAYER, LAYERS) == LAYERS:
            prefills.take(INSERTION)
    assert max(took[170:]) <= 0.06 and statistics.median(took[170:]) <= LIMIT + 1e-9


@pytest.mark.parametrize("late", range(3, 12))
def test_a_late_token_does_not_remove_the_limit(late):
    """In a step before the prompt, or while it is prefilled."""
    of_steps = waits(
        lambda number: 0.009, 40, step=lambda number: 1.0 if number == late else 0.025, before=6,
        unlimited=True,
    )  # fmt: skip
    assert share_above(of_steps, LIMIT) < 0.02


@pytest.mark.parametrize("times", [(0.025, 0.08), (0.08, 0.025), (0.025, 0.06)])
def test_tokens_that_become_faster_or_slower(times):
    first, then = times
    of_steps = waits(lambda number: 0.002, 200, step=lambda number: first if number < 30 else then)
    late = of_steps[-200:]
    assert statistics.median(late) == pytest.approx(max(LIMIT, SHARE * then), abs=0.004)
    assert share_above(late, max(LIMIT, SHARE * then) + 0.004) < 0.1


def test_noise_changes_the_wait_little():
    rng = random.Random(0)
    of_steps = waits(
        lambda number: 0.003 * rng.uniform(0.8, 1.3), 200,
        step=lambda number: 0.025 * rng.choice([1, 1, 1, 1.1, 1.2, 3]),
    )  # fmt: skip
    assert statistics.median(of_steps) <= LIMIT * 1.1 and share_above(of_steps, 2 * LIMIT) < 0.02
    assert statistics.mean(of_steps) > LIMIT / 3


def test_without_waiting_answers_nothing_is_divided():
    prefills = PrefillPace(LIMIT)
    prefills.begin(None, 0, 1)
    assert prefills.take(LAYER, LAYERS) == LAYERS and prefills.take(INSERTION) == 1
    assert not prefills.limited
    prefills.begin(STEP, 1, 1)  # an answer that was just inserted waits
    assert prefills.limited and prefills.take(LAYER, LAYERS) == 0
    unlimited = PrefillPace(None)
    unlimited.begin(STEP, 1, 1)
    assert unlimited.take(LAYER, LAYERS) == LAYERS and unlimited.take(INSERTION) == 1


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", True])
def test_wrong_limits(seconds):
    with pytest.raises(UserError, match=r"max_stall must be a finite Python number above 0"):
        Engine(plain(), max_batch=2, chunk=16, max_stall=seconds)


@pytest.mark.parametrize("max_stall", [1e-9, 0.0005])
def test_divided_prefills_have_the_same_bits(max_stall, monkeypatch):
    """Two owners' prompts, echoes, hits, and a cancellation in the middle of a chunk."""
    monkeypatch.setattr(pace, "SHARE", 0.0)  # 1e-9 seconds: every layer comes alone
    asked = [
        Request(tokens, 12 + 7 * number % 30, seed=number, logprobs=2, owner="ab"[number % 2],
                echo=number == 4)
        for number, tokens in enumerate([LONG_PROMPT, *prompts(9, 5), LONG_PROMPT])
    ]  # fmt: skip
    asked.insert(0, Request((1, 2, 3), 240, logprobs=2))  # waits for all others
    options = {"max_batch": 4, "max_len": 256, "chunk": 16, "max_per_owner": 3}
    config = PrefixConfig(num_blocks=32)
    expected = ask(Engine(plain("full"), **options), *asked)
    engine = Engine(plain("full"), max_stall=max_stall, prefix_cache=config, **options)
    listeners, gone, paused = [Recorder() for _ in asked], Recorder(), 0
    engine.submit(asked[0], listeners[0])
    for _ in range(9):  # it runs
        engine.step()
    handle = engine.submit(Request(LONG_PROMPT[::-1], 1, owner="c"), gone)
    for request, listener in zip(asked[1:], listeners[1:], strict=True):
        engine.submit(request, listener)
        for _ in range(3):
            engine.step()
            paused += in_the_middle(engine) is not None
            if in_the_middle(engine) is handle:
                engine.cancel(handle)
    finish(engine)
    for listener, undivided in zip(listeners, expected, strict=True):
        assert listener.scored == undivided.scored and listener.echoed == undivided.echoed
    assert listeners[-1].outcome.cached_tokens > 0
    if max_stall < 1e-6:
        assert paused > 3 and gone.outcome.reason == "cancelled"
    assert engine.running == engine.waiting == 0 == engine.metrics()["prefix_entries_in_use"]


def in_the_middle(engine):
    """The request of a chunk that pauses between its layers."""
    for prefill in engine._prefills:
        if prefill.chunk is not None and 0 < prefill.chunk.layers_left < 2:
            return prefill.handle
    return None
