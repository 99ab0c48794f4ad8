"""StreamingLLM's claims about training with sinks (section 3.3)."""

from __future__ import annotations

from functools import wraps
from typing import Any

from jaxkv.evals.lib.claim import (
    OPEN,
    UNSEEN,
    Claim,
    Find,
    Finding,
    Results,
    adder,
    grade,
    joined,
    over_base,
    pick,
)
from jaxkv.models.palette import VARIANTS

FELT = 0.02  # nats per token: the smallest difference of losses that counts
NO_MODEL_NEEDS_SINKS = f"{UNSEEN}: no model of this size depends on its first tokens"
BOTH = ("none", "token")


def trained(r: Results, sinks: str) -> dict[int, dict[str, Any]]:
    """The models with one kind of sink, by their seeds."""
    of_kind = [x for x in r["variants"].values() if x["recipe"]["sinks"] == sinks]
    return {x["recipe"]["seed"]: x for x in of_kind}


def pairs(r: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Plain softmax and sink token, of equal seeds."""
    plain, token = (trained(r, sinks) for sinks in BOTH)
    return [(plain[seed], token[seed]) for seed in sorted(plain.keys() & token.keys())]


def size_of(r: Results) -> str:
    """The size, training tokens and seeds, which all variants share."""
    models = list(r["variants"].values())
    weights = max(x["weights"] for x in models) / 1e6
    seeds = len({x["recipe"]["seed"] for x in models})
    return (
        f"{weights:.1f}M weights, {models[0]['tokens'] / 1e6:.1f}M tokens of training, "
        f"seeds: {seeds}"
    )


def texts(r: Results, sinks: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """By model and text: its name, its results, and those by number of sinks."""
    return [
        (name, text, {key: line for key, line in text.items() if "+" in key})
        for model in trained(r, sinks).values()
        for name, text in model["perplexity"].items()
    ]


def gaps(r: Results, sinks: str) -> list[list[float]]:
    """By model and text, the loss with 0, 1, 2 and 4 sinks minus that with 4."""
    return [[x["loss_over_base"] for x in lines.values()] for *_, lines in texts(r, sinks)]


def unneeded(found: list[list[float]]) -> bool:
    return all(abs(gap[0]) < FELT for gap in found)


def table_3(r: Results, sinks: str) -> str:
    """Perplexities of one kind of model with 0, 1, 2 and 4 first tokens in the cache."""
    return joined([size_of(r)] + [
        f"{sinks}, {name}, {text['predictions']:,} tokens: "
        + ", ".join(f"{key} {x['perplexity']:.2f} {over_base(x)}" for key, x in lines.items())
        for name, text, lines in texts(r, sinks)
    ])  # fmt: skip


def several_needed(r: Results, sinks: str = "none") -> Finding:
    """The loss is higher without the first tokens, and also with only one of them."""
    none, one = (all(gap[count] > FELT for gap in gaps(r, sinks)) for count in (0, 1))
    return table_3(r, sinks), grade(none and one, none)


def zero_needs_some(r: Results) -> Finding:
    """The same for a zero sink; the difference to plain softmax is shown, not graded."""
    if unneeded(gaps(r, "zero")):
        return table_3(r, "zero"), NO_MODEL_NEEDS_SINKS
    return several_needed(r, "zero")


def one_enough(r: Results) -> Finding:
    """One token is needed and enough; the claim holds only if plain softmax needs more."""
    found, plain = gaps(r, "token"), gaps(r, "none")
    if unneeded(found + plain):
        return table_3(r, "token"), NO_MODEL_NEEDS_SINKS
    enough = all(abs(gap[1]) < FELT for gap in found)
    gained = all(gap[0] > FELT for gap in found) and all(gap[1] > FELT for gap in plain)
    return table_3(r, "token"), grade(enough and gained, enough)


def loss_unharmed(r: Results) -> Finding:
    """At no seed is the sink token's loss larger by FELT; one seed is not enough."""
    by_kind = {sinks: trained(r, sinks).values() for sinks in VARIANTS if trained(r, sinks)}
    shown = ", ".join(f"{sinks} " + " ".join(f"{x['valid_loss']:.4f}" for x in models)
                      for sinks, models in by_kind.items())  # fmt: skip
    harm = [token["valid_loss"] - plain["valid_loss"] for plain, token in pairs(r)]
    if not harm:
        return "", f"{OPEN}: needs variants of equal seeds"
    text = f"{size_of(r)}; valid loss: {shown}"
    if len(harm) < 2:
        return text, f"{UNSEEN}: one seed cannot separate harm from chance"
    return text, grade(max(harm) < FELT)


def tasks_unharmed(r: Results) -> Finding:
    """On no task with accuracy above chance does it fall by more than two standard errors."""
    shown, lost = [], []
    for plain, token in pairs(r):
        for task, one in token["zeroshot"].items():
            other = plain["zeroshot"][task]
            error = 2 * (one["standard_error"] ** 2 + other["standard_error"] ** 2) ** 0.5
            known = any(x["accuracy"] - x["chance"] > 2 * x["standard_error"] for x in (one, other))
            if known:
                lost.append(other["accuracy"] - one["accuracy"] > error)
            shown.append(
                f"{task} {100 * other['accuracy']:.1f} to {100 * one['accuracy']:.1f} "
                f"(± {100 * error:.1f}{'' if known else ', both by chance'})"
            )
    if not shown:
        return "", f"{OPEN}: needs --zeroshot, and variants of equal seeds"
    text = f"{size_of(r)}; from none to token, %: " + ", ".join(shown)
    if not lost:
        return text, f"{UNSEEN}: no model of this size is better than chance"
    return text, grade(not any(lost))


def given(variants: tuple[str, ...], find: Find) -> Find:
    """The verdict function, with an open verdict if the record lacks a variant."""

    @wraps(find)
    def found(r: Results) -> Finding:
        missing = [sinks for sinks in variants if not trained(r, sinks)]
        if missing:
            return "", f"{OPEN}: needs the variants {', '.join(missing)}"
        return find(r)

    return found


SECTION_3_3 = (  # claim, its figure in the paper, variants that it needs, verdict function
    ("Trained with plain softmax, a model needs several of its first tokens",
     "Table 3, 160M, 0/1/2/4 of 1024: 27.87/18.49/18.05/18.05", ("none",), several_needed),
    ("Trained with a zero sink, a model still depends on its first tokens",
     "Table 3: 29214/19.90/18.27/18.01", ("zero",), zero_needs_some),
    ("A learnable sink token in training makes one sink enough",
     "Table 3: 1235/18.01/18.01/18.02", BOTH, one_enough),
    ("A sink token in training does not raise the loss", "Figure 6", BOTH, loss_unharmed),
    ("A sink token in training does not lower accuracy on tasks", "Table 4, seven tasks", BOTH,
     tasks_unharmed),
)  # fmt: skip
TRAINING = [
    Claim(says, paper, "sink_tables", given(variants, find))
    for says, paper, variants, find in SECTION_3_3
]
claim = adder(TRAINING)


def small_table(r: Results, *kinds: str) -> str:
    """Table 3 of the smallest models: medians over the seeds, and the range."""
    signed = lambda x: f"{x['median']:+.3f} ({x['min']:+.3f} to {x['max']:+.3f})"  # noqa: E731
    over = {kind: pick(r, f"variants/{kind}/summary/loss_over_base") for kind in kinds}
    seeds = r["variants"][kinds[0]]["summary"]["first_token"]["n"]
    shown = (f"{kind}: {', '.join(f'{key} {signed(x)}' for key, x in lines.items())}"
             for kind, lines in over.items())  # fmt: skip
    return f"one layer, one head, seeds: {seeds}; loss over that of 4+20: {joined(shown)}"


@claim("backcopy", "A learnable sink token in training makes one sink enough, with a head that is "
       "idle most of the time",
       "Table 3; the stream is that of Guo et al. 2024 (arXiv 2410.13835)")  # fmt: skip
def small_one_enough(r: Results) -> Finding:
    """The token is needed and enough, and plain softmax needs more than one."""
    over = pick(r, "variants/*/summary/loss_over_base")
    token, plain = over["token"], over["none"]
    holds = max(abs(token["1+23"][end]) for end in ("min", "max")) < FELT < token["0+24"]["min"]
    text = small_table(r, "token", "none", "zero", "logit")
    if holds and plain["1+23"]["min"] <= FELT:
        return text + "; plain softmax needs no first token here", grade(False, part=True)
    return text, grade(holds)


@claim("backcopy", "Two sink tokens in training are then both needed",
       "appendix: no gain from a second")  # fmt: skip
def small_two_needed(r: Results) -> Finding:
    over = pick(r, "variants/two_tokens/summary/loss_over_base")
    return small_table(r, "two_tokens"), grade(over["1+23"]["min"] > FELT)


IN_FRONT = "sinks_in_front"
SIZE = 256  # of the cache that the verdicts read
COUNTS = (0, 1, 2, 4)  # sinks


def rows_of(r: Results, *names: str) -> str:
    """Loss with 0, 1, 2 and 4 sinks over the published model with 4, by variant; means of seeds."""
    shown = [f"{name} {', '.join(f'{loss(r, name, n):+.4f}' for n in COUNTS)}" for name in names]
    read = r["stretches"]
    tokens = next(iter(read.values()))
    head = (
        f"SmolLM2-135M, {len(read)} stretches of {tokens:,} tokens, cache of {SIZE}, 0/1/2/4 sinks"
    )
    return f"{head}; loss over that of the published model with 4: {joined(shown)}"


def loss(r: Results, name: str, sinks: int) -> float:
    """The loss of a variant over the published model's with four sinks, the mean of its seeds."""
    of = [key for key in r["variants"] if key.partition("-")[0] == name]
    size = f"{sinks}+{SIZE - sinks}"
    each = [r["variants"][key][size]["loss_over_base"] for key in of]
    return sum(each) / len(each)


def spent(r: Results, name: str) -> str:
    """How a variant was trained."""
    recipe = r["runs"][f"{name}-0"]["recipe"]
    tokens = recipe["steps"] * recipe["rows"] * recipe["context"]
    return f"{name}: {tokens / 1e6:.2f}M tokens, train={recipe['train']}"


@claim(IN_FRONT, "A model trained without a sink needs several of its first tokens",
       "Table 3, vanilla")  # fmt: skip
def published_needs_several(r: Results) -> Finding:
    none, one, _, four = (loss(r, "plain", n) for n in COUNTS)
    return rows_of(r, "plain", "zero"), grade(one - four > FELT, none - four > FELT)


@claim(IN_FRONT, "A learnable sink token in training makes one sink enough: all weights trained on",
       "Table 3, learnable sink")  # fmt: skip
def continued_one_enough(r: Results) -> Finding:
    text = rows_of(r, "all_none", "all_token", "all_logit") + "; " + spent(r, "all_token")
    none, one, _, four = (loss(r, "all_token", n) for n in COUNTS)
    plain = loss(r, "all_none", 1) - loss(r, "all_none", 4)
    enough = abs(one - four) < FELT < none - four
    if enough and plain < FELT:
        return f"{text}; one first token is enough without a sink token too", grade(False, True)
    return text, grade(enough)


@claim(IN_FRONT, "One constant token in front of every stream replaces four first tokens",
       "not in the papers; PrefixQuant (Chen et al. 2024, arXiv 2410.05265)")  # fmt: skip
def constant_enough(r: Results) -> Finding:
    gap = loss(r, "constant", 1)
    worst = max(r["variants"]["constant"][f"1+{SIZE - 1}"]["over_base_by_stretch"].values())
    return (f"{rows_of(r, 'constant')}; worst stretch {worst:+.4f}", grade(gap < 0.002))


@claim(IN_FRONT, "One trained vector in front of a frozen model is at least as good",
       "not in the papers")  # fmt: skip
def frozen_enough(r: Results) -> Finding:
    text = rows_of(r, "frozen_token", "frozen_two_tokens", "frozen_logit")
    text += "; " + spent(r, "frozen_token")
    return text, grade(loss(r, "frozen_token", 1) <= 0)


LOGITS = "sinks_distilled"


def logits_of(r: Results) -> str:
    """Losses of a frozen model with sink logits, trained on text and distilled."""
    names, counts = ("plain", "zero", "text", "distilled"), (0, 1, 4)
    shown = [f"{name} {', '.join(f'{loss(r, name, n):+.4f}' for n in counts)}" for name in names]
    run = r["runs"]["distilled-0"]
    tokens = run["steps"] * run["rows"] * run["context"]
    return (
        f"SmolLM2-135M, {len(r['stretches'])} stretches, cache of {SIZE}, 0/1/4 sinks; loss over "
        f"that of the published model with 4: {joined(shown)}; text and distilled: logits trained "
        f"on {tokens:,} tokens with one learning rate"
    )


@claim(LOGITS, "A logit per head, trained in a frozen model, replaces its first tokens",
       "not in the papers")  # fmt: skip
def logits_replace(r: Results) -> Finding:
    """In a window without first tokens, against the published model with four."""
    found = loss(r, "text", 0)
    return logits_of(r), grade(found < FELT, found < loss(r, "plain", 0) / 2)


@claim(LOGITS, "Logits distilled from the model are better than logits trained on text",
       "not in the papers")  # fmt: skip
def distilled_better(r: Results) -> Finding:
    return logits_of(r), grade(loss(r, "text", 0) - loss(r, "distilled", 0) > FELT)


@claim("learned_memory", "Trained keys and values say more of a document than compressed ones of "
       "equal bytes", "not in the papers")  # fmt: skip
def learned_memory(r: Results) -> Finding:
    """By document; better than every policy with at most the same slots, beyond FELT."""
    gaps, shown = {}, []
    for measure in ("following", "spans", "facts"):
        over = pick(r, f"variants/*/{measure}/over_full_by_document")
        learned = over.pop("learned")
        others = [over[name] for name in over if name not in ("full", "no document")]
        best = [min(of_document) for of_document in zip(*others, strict=True)]
        gaps[measure] = [b - a for a, b in zip(learned, best, strict=True)]
        shown.append(
            f"{measure} {listed_losses(learned)}, the best policy {listed_losses(best)}, without "
            f"the document {listed_losses(over['no document'])}"
        )
    facts = pick(r, "variants/*/facts")
    minutes = max(r["training_seconds"]) / 60
    return (
        f"{r['model']}, {len(r['starts'])} documents of {r['length']} tokens of one novel, "
        f"{r['slots']} slots, {r['steps']} steps of training ({minutes:.0f} minutes at most); loss "
        f"over full attention, nats per token, by document: {joined(shown)}; facts recalled: "
        f"learned {facts['learned']['recalled']}, full attention {facts['full']['recalled']} of "
        f"{facts['full']['of']}"
    ), grade(
        all(gap > FELT for each in gaps.values() for gap in each),
        any(all(gap > FELT for gap in each) for each in gaps.values()),
    )


def listed_losses(losses: list[float]) -> str:
    return " and ".join(f"{loss:+.3f}" for loss in losses)
