"""A learned memory (`jaxkv compact`) and policies that compress a prompt, at equal bytes.

Each document is a stretch of the passage with facts between its sentences. It is read, compressed
to --slots tokens per KV head, and only then come the texts that are scored: what follows the
document in the novel, spans of the document of which the first tokens are given, and the facts.
No policy and no training sees a question. A fact counts only where full attention recalls it.
Learned pairs are kept under out/, so that an interrupted run continues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Policy, State
from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import Record, make_parser, read, run_command, standard_error
from jaxkv.evals.lib.table import table_head, table_row
from jaxkv.evals.lib.text import PASSAGE
from jaxkv.evals.lib.verdict import Claim, Results, Statement, above, within
from jaxkv.evals.streaming.tables import SAME
from jaxkv.evals.tasks.generators import THINGS
from jaxkv.models import compaction
from jaxkv.models.decoder import Weights
from jaxkv.models.llm import Llm
from jaxkv.typing import Array, Bool, Float, Int32, UInt32

SINKS, WINDOW = 4, 16
FOLLOWING = 256  # tokens of the novel after the document
SPANS, GIVEN, CONTINUED = 12, 16, 32  # spans; their tokens that are given, and that are scored
DIGITS = 5
ROOM = 320  # tokens after a document, at most
KINDS = ("following", "spans", "facts")


class Texts(NamedTuple):
    """Texts that come after a document, and which of their tokens are scored."""

    ids: Int32[np.ndarray, "B T"]
    scored: Bool[np.ndarray, "B T"]


class Probed(NamedTuple):
    """A document, and the texts of each of KINDS."""

    document: list[int]
    texts: tuple[Texts, ...]


def settings(length: int, slots: int) -> dict[str, str]:
    """Policies that keep `slots` tokens per KV head of a document."""
    rounds = int(np.ceil(np.log2(length / slots))) + 1
    window = min(range(1, slots), key=lambda w: abs(slots - halved_tokens(length, w, rounds)))
    snap = f"capacity={slots},window={min(WINDOW, slots // 2)}"
    halved = f"sinks={SINKS},window={window},rounds={rounds}"
    return {
        "snapkv": f"snapkv:{snap}",
        "pyramidkv": f"pyramidkv:{snap}",
        "keydiff": f"keydiff:capacity={slots}",
        "balance": f"balance:{halved}",
        "uniform": f"uniform:{halved}",
        "streaming": f"streaming:sinks={SINKS},window={slots - SINKS}",
    }


def halved_tokens(length: int, window: int, rounds: int) -> int:
    """Tokens that are left of a document whose middle is halved; what makes no group stays."""
    groups, rest = divmod(length - SINKS - window, 1 << rounds)
    return SINKS + window + groups + rest


def case(llm: Llm, start: int, length: int, seed: int) -> Probed:
    """A document of `length` tokens from token `start` of the passage on."""
    encode = partial(llm.tokenizer.encode, bos=False)
    novel, rng = encode(PASSAGE.read_text("utf-8"))[start:], np.random.default_rng(seed)
    numbers = rng.integers(10 ** (DIGITS - 1), 10**DIGITS, len(THINGS))
    leads = [f"The secret number of the {thing} is" for thing in THINGS]
    facts = [encode(f" {lead} {n}.") for lead, n in zip(leads, numbers, strict=True)]
    taken = length - sum(map(len, facts))  # tokens of the novel
    part = taken // len(facts)
    document, half = [], part // 2
    for i, fact in enumerate(facts):
        before, after = novel[i * part : i * part + half], novel[i * part + half : (i + 1) * part]
        document += [*before, *fact, *after]
    document += novel[len(facts) * part : taken]
    following = novel[taken : taken + FOLLOWING]
    if len(following) < FOLLOWING:
        raise UserError(
            f"the passage ends within document {start}: give shorter or fewer documents"
        )
    line = encode("\n\n")
    size = GIVEN + CONTINUED
    spans = [line + document[at : at + size]
             for at in np.linspace(0, len(document) - size, SPANS).astype(int)]  # fmt: skip
    asked = [line + encode(f"{lead} {n}") for lead, n in zip(leads, numbers, strict=True)]
    lead_sizes = [len(line) + len(encode(lead)) for lead in leads]
    return Probed(
        document,
        (
            texts([following], [1]),
            texts(spans, [len(line) + GIVEN] * SPANS),
            texts(asked, lead_sizes),
        ),
    )


def texts(rows: Sequence[Sequence[int]], context_sizes: Sequence[int]) -> Texts:
    """Padded texts of which all tokens but the first `context_sizes` are scored."""
    size = max(map(len, rows))
    ids = np.array([[*row, *[0] * (size - len(row))] for row in rows], np.int32)
    at, lengths = np.arange(size)[None], np.array(list(map(len, rows)))[:, None]
    return Texts(ids, (at >= np.array(context_sizes)[:, None]) & (at < lengths))


def scores(
    llm: Llm,
    policies: tuple[Policy, ...],
    states: tuple[State, ...],
    position: int,
    probed: Probed,
) -> list[np.ndarray]:
    """Per kind of text, the losses of its scored tokens and whether the likeliest is right.

    Arrays [2,B,T], NaN where a token is not scored.
    """
    by_kind = []
    for ids, scored in probed.texts:
        arrays = _scores(llm.config, policies, llm.weights, states, jnp.uint32(position), ids)
        by_kind.append(np.where(scored[:, 1:], np.stack(arrays), np.nan).astype(np.float64))
    return by_kind


@partial(jax.jit, static_argnums=(0, 1))
def _scores(
    config: models.Config, policies: tuple[Policy, ...], weights: Weights,
    states: tuple[State, ...], position: UInt32[Array, ""], ids: Int32[Array, "B T"],
) -> tuple[Float[Array, "B T-1"], Float[Array, "B T-1"]]:  # fmt: skip
    decoder, hidden = compaction.follow(config, policies, weights, states, position, ids[:, :-1])
    logits, targets = decoder.logits(hidden), ids[:, 1:]
    picked = jnp.take_along_axis(logits, targets[None], axis=0)[0]
    right = jnp.argmax(logits, axis=0) == targets
    return jax.nn.logsumexp(logits, axis=0) - picked, right.astype(jnp.float32)


def after(llm: Llm, policy: str, document: Sequence[int]) -> models.Stream:
    """A stream that has read a document, prefill finished, with room for the texts."""
    stream = models.Stream(llm, policy, tokens=len(document) + ROOM)
    if document:
        stream.prefill([document])
    if any(layer_policy.min_prompt is not None for layer_policy in stream.policies):
        stream.finish_prefill()
    stream.reserve(ROOM)
    return stream


def cached(llm: Llm, stream: models.Stream) -> float:
    """Tokens cached per KV head, averaged over layers and heads."""
    pairs = zip(stream.policies, stream.decoding.states, strict=True)
    counts = [
        np.isfinite(policy.cached(llm.spec, state).log_weight).sum(2) for policy, state in pairs
    ]
    return float(np.mean(counts))


def measure(llm: Llm, probed: Probed, slots: int, pairs: np.ndarray) -> dict[str, dict[str, Any]]:
    """By variant: the cached tokens and the scores of one document."""
    learned = models.Llm(**vars(llm) | {"weights": llm.weights | compaction.Pairs(*pairs).weights})
    full = f"full:start={len(probed.document) + ROOM}"
    variants = {"full": (llm, full, probed.document), "no document": (llm, full, [])}
    variants |= {name: (llm, policy, probed.document)
                 for name, policy in settings(len(probed.document), slots).items()}  # fmt: skip
    variants["learned"] = (learned, f"full:start={slots + ROOM}", [])
    by_variant = {}
    for name, (model, policy, document) in variants.items():
        stream = after(model, policy, document)
        position = int(stream.decoding.position[0])
        arguments = stream.policies, stream.decoding.states, position, probed
        by_variant[name] = {"cached": cached(llm, stream), "scores": scores(llm, *arguments)}
        means = ", ".join(f"{np.nanmean(kind[0]):.3f}" for kind in by_variant[name]["scores"])
        print(f"{name}: {by_variant[name]['cached']:.1f} tokens; losses {means}", flush=True)
    return by_variant


def table(llm: Llm, documents: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """By variant, over all documents: bytes, losses over full attention, and recalled facts."""
    token_bytes = llm.config.layers * llm.config.kv_heads * llm.config.head_dim * 2 * 4
    rows = {}
    for name in documents[0]:
        row: dict[str, Any] = {
            "cached": np.mean([document[name]["cached"] for document in documents])
        }
        row["bytes"] = round(row["cached"] * token_bytes)
        for number, kind in enumerate(KINDS):
            losses, right = zip(
                *(document[name]["scores"][number] for document in documents), strict=True
            )
            full = [document["full"]["scores"][number][0] for document in documents]
            over = [np.nanmean(mine - base) for mine, base in zip(losses, full, strict=True)]
            row[kind] = {
                "loss": np.mean([np.nanmean(document_losses) for document_losses in losses]),
                "over_full": np.mean(over),
                "over_full_two_errors": _two_errors(over),
                "over_full_by_document": over,
                "right_tokens": np.mean([np.nanmean(document_right) for document_right in right]),
            }
        recalled = [_recalled(document[name]["scores"][2][1]) for document in documents]
        recalled_by_full = [_recalled(document["full"]["scores"][2][1]) for document in documents]
        row["facts"] |= {
            "recalled": sum(
                int((a & b).sum()) for a, b in zip(recalled, recalled_by_full, strict=True)
            ),
            "of": sum(int(b.sum()) for b in recalled_by_full),
        }
        rows[name] = row
    return rows


def _two_errors(values: Sequence[float]) -> float | None:
    error = standard_error(values)
    return None if error is None else 2 * error


def _recalled(right: Float[np.ndarray, "B T"]) -> Bool[np.ndarray, " B"]:
    """The facts of which every scored token is right."""
    return np.where(np.isnan(right), 1, right).min(axis=1) == 1


def main() -> None:
    parser = make_parser("jaxkv.evals.comparison.learned_memory", __doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="a model folder, GGUF file or Hub id"
    )
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 4000, 8000],
                        help="first tokens of the documents in the passage")  # fmt: skip
    parser.add_argument("--length", type=int, default=994,
                        help="tokens of a document; halving leaves 64 of 994")  # fmt: skip
    parser.add_argument("--slots", type=int, default=64, help="tokens per KV head of every cache")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    options = parser.parse_args()
    llm = models.load(options.model, "float32")
    record = Record("learned_memory", [*llm.files, PASSAGE], [0], quick=options.quick)
    cases = [case(llm, start, options.length, seed=start) for start in options.starts]
    parts, seconds, measurements = Parts(record, len(cases)), [], []
    for start, probed in zip(options.starts, cases, strict=True):

        def train(probed: Probed = probed) -> np.ndarray:
            start = time.perf_counter()
            pairs = compaction.compact(llm, probed.document, options.slots, options.steps)
            seconds.append(time.perf_counter() - start)
            return np.stack(pairs)

        name = f"{llm.name}, {options.length} from {start}, {options.slots}, {options.steps} steps"
        measurements.append(measure(llm, probed, options.slots, parts.part(name, train)))
    record.finish({
        "model": llm.name,
        "length": options.length,
        "slots": options.slots,
        "steps": options.steps,
        "starts": options.starts,
        "training_seconds": seconds,
        "policies": [settings(len(probed.document), options.slots) for probed in cases],
        "variants": table(llm, measurements),
        "commits_of_parts": parts.commits,
    })  # fmt: skip


def lead(results: Results) -> dict[str, float]:
    """By kind of text and document, how far the best policy loses more than the learned pairs."""
    leads = {}
    for kind in KINDS:
        over = {
            name: row[kind]["over_full_by_document"] for name, row in results["variants"].items()
        }
        policies = [over[name] for name in over if name not in ("learned", "full", "no document")]
        best = np.min(policies, axis=0)
        for document, difference in enumerate((best - over["learned"]).tolist()):
            leads[f"{kind}, document {document}"] = difference
    return leads


CLAIMS = (
    Claim("not in the papers",
          "Trained keys and values lose over 0.02 nats less of a document than any compression to "
          "equal bytes", "learned_memory", above(lead, by=SAME)),
)  # fmt: skip


def report() -> str:
    """A row per variant: loss over full attention by kind of text, and facts."""
    results = read("learned_memory")["results"]
    lines = table_head("cache", "text after it", "spans of it", "facts in it", "facts recalled")
    for name, row in results["variants"].items():
        losses = (f"{row[kind]['over_full']:+.3f}" for kind in KINDS)
        label = f"`{name}`" if name in (*results["policies"][0], "full") else name
        recalled = f"{row['facts']['recalled']} of {row['facts']['of']}"
        lines.append(table_row(label, *losses, recalled))
    return (
        f"Loss minus that of full attention, mean of {len(results['starts'])} documents of "
        f"{results['length']} tokens, with {results['slots']} slots.\n\n" + "\n".join(lines) + "\n"
    )


TABLES = {"learned_memory": report}
POLICIES = ("snapkv", "pyramidkv", "keydiff", "balance", "uniform", "streaming")
PAGE = "docs/results/training.md"
STATEMENTS = (
    Statement(PAGE, "The learned pairs lose least of all caches of equal bytes", "learned_memory",
              [above(lead)]),
    Statement(PAGE, "only full attention recalls a single fact", "learned_memory",
              [within("variants/full/facts/recalled", "variants/full/facts/of"),
               *(within(f"variants/{name}/facts/recalled") for name in ("learned", *POLICIES))]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
