"""Tables, claims and statements of the task records, for docs/results and CLAIMS.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import mean

from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import (
    Comparison,
    Derived,
    Results,
    Statement,
    above,
    below,
    claim,
    within,
)
from jaxkv.evals.tasks.budgets import CALIBRATED, EQUAL, NAMES, SCORED
from jaxkv.evals.tasks.score import GATE, wilson

ANSWERS = {"needle": "needles", "passkey": "pass keys"}  # what a task asks for
SPARSE = NAMES[NAMES.index("topk") :]  # they cache every token
UNEQUAL = ("retrieval", CALIBRATED, *SCORED)  # their KV heads have unequal budgets
SAMPLED = tuple(name for name in NAMES if name not in (*SPARSE, *UNEQUAL, *EQUAL, "keydiff"))
LENGTHS = {"tasks": "1,024", "tasks_2048": "2,048", "tasks_4096": "4,096"}  # of a record
MEASURED = ("1024", "2048", "4096")  # lengths of the records of needles
BUDGETED = "needles_calibrated"  # adaptive and calibrated budgets at all lengths
LONG_SAMPLED = "needles_4096_sampled"
# With equal numbers of samples. A later record replaces rows of earlier ones.
NEEDLES = ("needles", "tasks", "needles_1024", "needles_4096", "needles_4096_quarter",
           "needles_equal", LONG_SAMPLED, BUDGETED)  # fmt: skip
BY_HEAD = ("keydiff", *UNEQUAL, *EQUAL)  # those whose heads answer_heads compares
AT_QUESTION = ("window", "snapkv", "pyramidkv", "keydiff")  # some select by it
MISSING = "–"  # in a cell of several numbers, one that is not measured
QUARTER, EIGHTH = "0.25", "0.125"  # of the context
LOSS = 0.1  # of all answers: a smaller loss counts as none


def cases(results: Results) -> Iterator[tuple[str, str, Results]]:
    """Task, length and results of every case, in the order of the record."""
    for task, by_length in results["tasks"].items():
        for length, case in by_length.items():
            yield task, length, case


def gates() -> str:
    """A row per task: the right answers of full attention by length of the context."""
    by_task: dict[str, dict[str, str]] = {}
    for record in ("task_gates", "task_gates_4096", "lines_gates"):
        results = read(record, RESULTS)["results"]
        for task, length, case in cases(results):
            full = case["full"]
            cell = f"{full['score']:.0%} ({full['right']} of {full['samples']})"
            by_task.setdefault(task, {})[length] = cell
    lengths = list(dict.fromkeys(length for row in by_task.values() for length in row))
    heads = ("task", *(f"{int(length):,} tokens" for length in lengths))
    cells = ((task, *(row.get(length, "") for length in lengths)) for task, row in by_task.items())
    caption = "Right answers of full attention; in parentheses, samples with all parts right."
    return table(heads, cells, caption)


def query_aware() -> str:
    """A row per policy that selects by the question, and others beside it: right answers."""
    results = read("tasks_query_aware", RESULTS)["results"]
    solved = {task: case for task, _, case in cases(results) if case["scored"]}
    shares = list(next(iter(solved.values()))["ratios"])
    budgets = " / ".join(f"{100 * float(share):g}" for share in shares) + " %"
    count = results["samples"]
    rows = [("`full`", *(case["full"]["right"] for case in solved.values()))]
    for name in AT_QUESTION:
        scores = [[x["ratios"][share][name]["score"] for share in shares] for x in solved.values()]
        rows.append((f"`{name}`", *(
            " / ".join(f"{count * score:.0f}" for score in by_share) for by_share in scores
        )))  # fmt: skip
    low, high = wilson(0.5, count)
    caption = (
        f"Right answers of {count} in contexts of 1,024 tokens. If half are right, the 95 % "
        f"interval is {100 * low:.0f} to {100 * high:.0f} %."
    )
    return table(("policy", *(f"{ANSWERS[task]} at {budgets}" for task in solved)), rows, caption)


def needle_results() -> Results:
    """The results of NEEDLES as those of one record; a later record replaces rows of earlier ones.

    Raises ValueError where they have different numbers of samples.
    """
    merged, *later = (read(name, RESULTS)["results"] for name in NEEDLES)
    for results in later:
        if results["samples"] != merged["samples"]:
            raise ValueError("the records of needles must have equal numbers of samples")
        for task, length, case in cases(results):
            of_merged = merged["tasks"][task][length]
            of_merged["full"] = case["full"]
            for share, rows in of_merged["ratios"].items():
                rows |= case["ratios"].get(share, {})
    return merged


def needles(field: str, policies: Sequence[str] = NAMES) -> str:
    """A row per policy: a share by task and budget, a number for each length.

    field: `score`, as right answers, or `answer_heads`, in per cent.
    """
    results = needle_results()
    tasks = {task: [*by_length.values()] for task, by_length in results["tasks"].items()}
    lengths = " / ".join(f"{int(length):,}" for length in next(iter(results["tasks"].values())))
    first = next(iter(tasks.values()))[0]["ratios"]
    columns = [(task, share) for task in tasks for share in first]
    heads = ("policy", *(f"{ANSWERS[task]}, {100 * float(s):g} %" for task, s in columns))
    count = results["samples"]
    scale = count if field == "score" else 100
    numbers = lambda shares: " / ".join(
        MISSING if share is None else f"{scale * share:.0f}" for share in shares
    )
    lines = []
    if field == "score":
        lines.append(("`full`", *(numbers(x["full"]["score"] for x in tasks[task])
                                  for task, _ in columns)))  # fmt: skip
    for name in policies:
        rows = {(task, share): [x["ratios"][share].get(name, {}).get(field) for x in tasks[task]]
                for task, share in columns}  # fmt: skip
        if any(value is not None for row in rows.values() for value in row):
            lines.append((f"`{name}`", *map(numbers, rows.values())))
    counted = {
        "score": f"Right answers of {count}",
        "answer_heads": "KV heads of all layers that cache the whole answer, in per cent,",
    }
    caption = (
        f"{counted[field]} in contexts of {lengths} tokens, by the share cached; {MISSING} is not "
        "measured."
    )
    return table(heads, lines, caption)


def solved_rows(results: Results) -> Iterator[tuple[str, Results, float, dict[str, Results]]]:
    """Every task that full attention solves, at every budget: its name, the results of full
    attention, the budget as a share of the context, and the results by policy."""
    for task, _, case in cases(results):
        for share, by_policy in case["ratios"].items():
            if case["scored"]:
                yield f"{task}, {100 * float(share):g} %", case["full"], float(share), by_policy


def full_scores(*tasks: str) -> Derived:
    """Right answers of full attention, as a share, in these tasks or in all."""
    return lambda results: {
        f"{task}, {length}": case["full"]["score"]
        for task, length, case in cases(results)
        if task in tasks or not tasks
    }


def scores(policies: Sequence[str], tasks: Sequence[str] = tuple(ANSWERS)) -> Derived:
    """Right answers as a share, by policy and case."""
    return lambda results: {
        f"{policy}, {name}": by_policy[policy]["score"]
        for name, _, _, by_policy in solved_rows(results)
        for policy in by_policy.keys() & set(policies)
        if name.startswith(tuple(tasks))
    }


def over_full(policy: str) -> Derived:
    """Right answers minus those of full attention, as shares."""
    return lambda results: {
        name: by_policy[policy]["score"] - full["score"]
        for name, full, _, by_policy in solved_rows(results)
        if policy in by_policy
    }


def evicted_scores(*policies: str) -> Derived:
    """Right answers about the parts of the context that a window of the budget has evicted."""
    return lambda results: {
        f"{policy}, {name}": mean(depths[: int(len(depths) * (1 - share))])
        for name, _, share, by_policy in solved_rows(results)
        for policy in by_policy.keys() & set(policies)
        for depths in [by_policy[policy]["by_depth"]]
    }


def keydiff_lead(results: Results) -> dict[str, float]:
    """Right answers of keydiff minus the most of any other policy that evicts or compresses."""
    return {
        name: by_policy["keydiff"]["score"]
        - max(by_policy[x]["score"] for x in by_policy.keys() & set(SAMPLED))
        for name, _, _, by_policy in solved_rows(results)
    }


def retrieval_lead(results: Results) -> dict[str, float]:
    """The needles that retrieval finds with an eighth, minus four times those of any other."""
    return {
        length: row["retrieval"]["score"]
        - 4 * max(row[x]["score"] for x in ("streaming", "snapkv", "keydiff"))
        for length, case in results["tasks"]["needle"].items()
        for row in [case["ratios"][EIGHTH]]
    }


def of_needles(
    task: str, length: str, share: str, policy: str = "retrieval", field: str = "score"
) -> str:
    """The path of a figure in a record of needles."""
    return f"tasks/{task}/{length}/ratios/{share}/{policy}/{field}"


def bars(length: str) -> list[Comparison]:
    """Which bars of `retrieval` are met at a length, and which are missed."""
    return [
        below(of_needles(task, length, share), bar)
        if (task, length, share) in MISSED
        else within(of_needles(task, length, share), 1, by=1 - bar)
        for share, bar in BAR.items()
        for task in ANSWERS
    ]


def kl_over_window(*policies: str) -> Derived:
    """Divergence from full attention minus that of a window."""
    return lambda results: {
        f"{policy}, {name}": by_policy[policy]["kl"] - by_policy["window"]["kl"]
        for name, _, _, by_policy in solved_rows(results)
        for policy in policies
    }


def as_full(policy: str) -> tuple:
    """A policy answers as full attention does."""
    return (above(over_full(policy), by=-LOSS),)


RULER = "RULER, Table 3: models of 7 billion weights and more, 4,096 tokens"
PAN = "Pan et al., section 7"
CLAIMS = (
    *(claim(RULER, "Full attention gives at least 90 % right answers", record,
            within(full_scores(), 1, by=1 - GATE), unit="share")
      for record in ("task_gates", "task_gates_4096")),
    *(claim(f"{PAN}: it loses accuracy where a task needs long-term memory",
            f"A streaming cache answers less than 10 % about evicted text, in {length} tokens",
            record, below(evicted_scores("streaming"), LOSS), unit="share")
      for record, length in LENGTHS.items()),
    *(claim(f"{PAN}: accuracy improves",
            "With a reservoir sample of the evicted text, the score is under 10 points below full "
            f"attention's, in {length} tokens", record, *as_full("reservoir"), unit="points")
      for record, length in LENGTHS.items()),
    *(claim("SnapKV, needle in a haystack, with the question in the prompt",
            "With SnapKV and the question after the prompt, the score is under 10 points below "
            f"full attention's, in {length} tokens", record, *as_full("snapkv"), unit="points")
      for record, length in LENGTHS.items()),
    claim("SnapKV, needle in a haystack",
          "With SnapKV and the question in the prompt, the score is under 10 points below full "
          "attention's", "tasks_query_aware", *as_full("snapkv"), unit="points"),
    *(claim("MagicPIG, Figure 1: retrieval works",
            "On single facts, the score of top-k attention is under 10 points below full "
            f"attention's, in {length} tokens", record, *as_full("topk"), unit="points")
      for record, length in LENGTHS.items()),
    claim("MagicPIG, Figure 1: aggregation does not work",
          "On common and frequent words, the score of top-k attention is over 10 points below full "
          "attention's",
          "task_gates", needs="a model whose full attention solves these tasks"),
    claim("RULER, multi-key needles; not claimed for conversations",
          "Caches are told apart by several needles at once, and by judged conversations", "",
          needs="a model of billions of weights: SmolLM2-135M solves no task that combines several "
          "places of a text"),
)  # fmt: skip

TABLES = {
    "task_gates": gates,
    "needles": partial(needles, "score"),
    "answer_heads": partial(needles, "answer_heads", BY_HEAD),
    "tasks_query_aware": query_aware,
}
PAGE = "docs/results/tasks.md"
BAR = {QUARTER: 0.95, EIGHTH: 0.8}  # of `retrieval`, by share of the context
MISSED = (("passkey", "2048", QUARTER), ("passkey", "4096", QUARTER), ("needle", "1024", EIGHTH))
OTHER_TASKS = ("variable-tracking", "common-words", "frequent-words")
STATEMENTS = (
    Statement(PAGE, "full attention solves needles and pass keys, and none of the other three "
              "tasks", "task_gates",
              [within(full_scores(*ANSWERS), 1, by=1 - GATE),
               below(full_scores(*OTHER_TASKS), 0.5)]),
    Statement(PAGE, "Nor does it solve the lines of LongEval", "lines_gates",
              [below(full_scores("lines"), 0.1)]),
    Statement(PAGE, "Of the other policies that evict or compress, `keydiff` answers most in 1,024 "
              "tokens", "tasks", [above(keydiff_lead)]),
    Statement(PAGE, "The others recall little more than what their window still holds", "tasks",
              [below(evicted_scores(*SAMPLED), 0.2)]),
    Statement(PAGE, "Policies that cache every token answer at least three quarters", "tasks",
              [above(scores(SPARSE), 0.75)]),
    Statement(PAGE, "Their predictions come nearer to those of full attention than those of a "
              "window do, but at most a third of their answers is right", "tasks_query_aware",
              [below(kl_over_window("snapkv", "pyramidkv")),
               below(scores(["snapkv", "pyramidkv"]), 0.34)]),
    Statement(PAGE, "With a quarter of the tokens, `retrieval` finds every needle", BUDGETED,
              [within(of_needles("needle", length, QUARTER), 1) for length in MEASURED]),
    Statement(PAGE, "in 1,024 and 2,048 tokens it gives as many pass keys as full attention, or "
              "one less", BUDGETED,
              [within(of_needles("passkey", length, QUARTER),
                      f"tasks/passkey/{length}/full/score", by=0.05) for length in MEASURED[:2]]),
    Statement(PAGE, "In 4,096 tokens `retrieval` gives every pass key with an eighth of the "
              "tokens, and fewer with a quarter", BUDGETED,
              [within(of_needles("passkey", "4096", EIGHTH), 1),
               below(of_needles("passkey", "4096", QUARTER), 1)]),
    Statement(PAGE, "With an eighth it misses some needles", BUDGETED,
              [below(of_needles("needle", length, EIGHTH), 1) for length in MEASURED]),
    Statement(PAGE, "and still finds over four times as many as `streaming`, `snapkv` and "
              "`keydiff`", "needles", [above(retrieval_lead)]),
    Statement(PAGE, "It misses the bar with a quarter for pass keys in 2,048 and 4,096 tokens, "
              "and with an eighth for needles in 1,024 tokens", BUDGETED,
              [comparison for length in MEASURED for comparison in bars(length)]),
    Statement(PAGE, "With calibrated budgets it meets all of these bars in 1,024 and 4,096 tokens",
              BUDGETED,
              [within(of_needles(task, length, share, CALIBRATED), 1, by=1 - bar)
               for share, bar in BAR.items() for task in ANSWERS for length in ("1024", "4096")]),
    Statement(PAGE, "In 2,048 tokens it then finds every needle, but misses both bars for pass "
              "keys", BUDGETED,
              [comparison for share, bar in BAR.items() for comparison in (
                  within(of_needles("needle", "2048", share, CALIBRATED), 1),
                  below(of_needles("passkey", "2048", share, CALIBRATED), bar))]),
    Statement(PAGE, "Compressed once, at the end of prefill (`every=none`), `tova`, `rkv`, `vase` "
              "and `triattention` find at most 3 of 20 needles in 1,024 tokens", "needles_1024",
              [below(of_needles("needle", "1024", share, name), 0.151)
               for share in BAR for name in ("tova", "rkv", "vase", "triattention")]),
    Statement(PAGE, "In 4,096 tokens, with a quarter, `kvzip` and `kvzap` find every needle too",
              LONG_SAMPLED,
              [within(of_needles("needle", "4096", QUARTER, name), 1) for name in SCORED]),
    Statement(PAGE, "Samples of the evicted text find 2 of 20 there", LONG_SAMPLED,
              [within(of_needles("needle", "4096", QUARTER, name), 2 / 20)
               for name in ("reservoir", "stratified", "balance-stream")]),
    Statement(PAGE, "no policy finds more than 4 of 20 needles there, and all but "
              "`keydiff` give at most 7 of 20 pass keys", "needles_4096_quarter",
              [below(f"tasks/{task}/4096/ratios/{QUARTER}/{{policy}}/score", limit)
               for task, limit in (("needle", 0.201), ("passkey", 0.351))]),
    Statement(PAGE, "With equal budgets in all KV heads, `retrieval` finds 14 and 16 of 20 needles "
              "with a quarter of 1,024 and 2,048 tokens", "needles_equal",
              [within(of_needles("needle", length, QUARTER, "retrieval-equal"), right / 20)
               for length, right in (("1024", 14), ("2048", 16))]),
    Statement(PAGE, "and 15 of 20 in 4,096 tokens", LONG_SAMPLED,
              [within(of_needles("needle", "4096", QUARTER, "retrieval-equal"), 15 / 20)]),
    Statement(PAGE, "Scoring keys before their rotation alone makes `keydiff` find as many in the "
              "shorter texts", "needles_equal",
              [within(of_needles("needle", length, QUARTER, "keydiff-unrotated"),
                      of_needles("needle", length, QUARTER, "retrieval-equal"))
               for length in ("1024", "2048")]),
    Statement(PAGE, "In 4,096 tokens, with a quarter, `retrieval` has the pass key in more heads "
              "than with calibrated budgets, and gives fewer", BUDGETED,
              [above(of_needles("passkey", "4096", QUARTER, field="answer_heads"),
                     of_needles("passkey", "4096", QUARTER, CALIBRATED, "answer_heads")),
               below(of_needles("passkey", "4096", QUARTER),
                     of_needles("passkey", "4096", QUARTER, CALIBRATED))]),
    *(Statement(page, says, BUDGETED,
                [within(of_needles("needle", length, QUARTER), 1) for length in MEASURED[:2]])
      for page, says in (
          ("README.md", "with a quarter of 1,024 tokens, finds every needle"),
          ("docs/which_cache.md",
           "From a quarter of 1,024 or 2,048 tokens, `retrieval` answers all needles"),
      )),
    Statement("evals/NEGATIVE.md", "With adaptive budgets `retrieval` misses a third of the pass "
              "keys with a quarter of 4,096 tokens cached, and a third of the needles with an "
              "eighth of 1,024", BUDGETED,
              [within(of_needles("passkey", "4096", QUARTER), 2 / 3, by=0.1),
               within(of_needles("needle", "1024", EIGHTH), 2 / 3, by=0.1)]),
    Statement("evals/NEGATIVE.md", "With calibrated budgets it misses over half of the pass keys "
              "with an eighth of 2,048 tokens", BUDGETED,
              [below(of_needles("passkey", "2048", EIGHTH, CALIBRATED), 0.5)]),
    Statement("README.md", "with a quarter of 1,024 tokens, they find at most a fifth of "
              "the needles and pass keys", "tasks",
              [within(f"tasks/{task}/1024/ratios/{QUARTER}/{policy}/score", 0, by=0.2)
               for task in ANSWERS
               for policy in ("snapkv", "pyramidkv", "expected-attention", "balance", "uniform")]),
)  # fmt: skip
