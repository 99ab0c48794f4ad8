"""How much of a prompt is prefilled between two tokens, on a clock that the test moves."""

from __future__ import annotations

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.engine import Engine, Request
from jaxkv.serve.engine.pace import Piece, PrefillPace
from tests.serve.engine.plain import Recorder, ask, finish, plain, prompts

STEP, LAYER, INSERTION = Piece("step", 4), Piece("layer", 128), Piece("insertion", 0)
LAYERS = 30
LIMIT = 0.03


def waits(layer, insertion=0.0, chunks=12):
    """The seconds that each token waits for `chunks` chunks of LAYERS layers, and an insertion.

    layer: seconds of one layer, as a function of the number of layers before it.
    """
    pace, works, of_steps, now = PrefillPace(LIMIT), [], [], 0.0
    total, done, inserted = chunks * LAYERS, 0, False
    while not inserted:
        works.append(pace.dispatched(STEP, follows=bool(works)))
        pieces = works[-1].pieces
        took = sum(layer(number) for number in range(done - pieces[LAYER], done))
        of_steps.append(took + insertion * pieces[INSERTION])
        if len(works) > 1:  # a token comes a step after it was dispatched
            now += 0.025 + of_steps[-2]
            pace.delivered(works[-2], now)
        pace.begin(STEP)
        while done < total and (count := pace.take(LAYER, LAYERS - done % LAYERS)):
            done += count
        inserted = done == total and pace.take(INSERTION) == 1
        assert len(works) < 5000
    return of_steps


@pytest.mark.parametrize("layer", [0.0001, 0.002, 0.009, 0.02, 0.029])
def test_answers_wait_at_most_the_limit(layer):
    of_steps = waits(lambda number: layer, chunks=20 + int(1.2 / (LAYERS * layer)))
    assert max(of_steps) <= LIMIT + 1e-9
    assert of_steps[:3] == [0, 0, 0] and of_steps[3] > 0, "the time of a step alone comes first"
    # What fits is used, once the time of a layer is known.
    assert min(of_steps[14:-1]) > LIMIT - layer - 1e-9


def test_an_insertion_does_not_come_after_much_else():
    of_steps = waits(lambda number: 0.009, insertion=0.02)
    assert max(of_steps) <= LIMIT + 1e-9


def test_a_layer_that_takes_longer_than_the_limit_comes_alone():
    assert max(waits(lambda number: 0.2, chunks=1)) == pytest.approx(0.2)


def test_a_layer_that_becomes_slower_is_noticed():
    of_steps = waits(lambda number: 0.002 if number < 180 else 0.012)
    assert max(of_steps[-10:]) <= 0.036
    assert sum(wait > 0.06 for wait in of_steps) <= 4


def test_a_wrong_estimate_at_most_doubles_the_work():
    """Tokens that come late make a step seem to take all the time, and layers none."""
    pace = PrefillPace(LIMIT)
    counts = []
    for number in range(8):
        work = pace.dispatched(STEP, follows=number > 0)
        pace.delivered(work, number * 0.05)
        pace.begin(STEP)
        counts.append(pace.take(LAYER, LAYERS))
    assert counts[0] == 0 and counts[1:] == [1, 2, 4, 8, 16, 30, 30]


def test_without_waiting_answers_nothing_is_divided():
    pace = PrefillPace(LIMIT)
    pace.begin(None)
    assert pace.take(LAYER, LAYERS) == LAYERS and pace.take(INSERTION) == 1
    unlimited = PrefillPace(None)
    unlimited.begin(STEP)
    assert unlimited.take(LAYER, LAYERS) == LAYERS and unlimited.take(INSERTION) == 1


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_limit_that_is_none(seconds):
    with pytest.raises(UserError, match=r"max_stall must be a finite Python number above 0"):
        PrefillPace(seconds)


@pytest.mark.parametrize("max_stall", [1e-9, 0.0005])
def test_divided_prefills_have_the_same_bits(max_stall):
    """Two owners' prompts, echoes, hits and cancellations, while answers run."""
    asked = [
        Request(tokens, 12 + 7 * number % 30, seed=number, logprobs=2, owner="ab"[number % 2],
                echo=number == 4)
        for number, tokens in enumerate(prompts(9, 5))
    ]  # fmt: skip
    options = {"max_batch": 4, "max_len": 256, "chunk": 16, "max_per_owner": 3}
    expected = ask(Engine(plain("full"), **options), *asked)
    engine = Engine(plain("full"), max_stall=max_stall, **options)
    listeners = [Recorder() for _ in asked]
    gone = Recorder()
    for number, (request, listener) in enumerate(zip(asked, listeners, strict=True)):
        engine.submit(request, listener)
        if number == 5:
            handle = engine.submit(asked[0], gone)
        for _ in range(3):
            engine.step()
    engine.cancel(handle)
    finish(engine)
    for listener, undivided in zip(listeners, expected, strict=True):
        assert listener.scored == undivided.scored and listener.echoed == undivided.echoed
    assert gone.outcome.reason in ("cancelled", "length")
    assert engine.running == engine.waiting == 0
