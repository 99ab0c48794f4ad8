"""Levels and block of `balance-stream`: slots in use, errors of attention, losses, and holes.

The levels of a merge-and-reduce tree fill like the digits of a binary number, so at most times some
of them are empty. Trees of several sizes share equal slots with the window. The record compares
them with `streaming` of the same bytes, and some of them at an equal mean number of cached tokens.
The error is that of attention with absolute positions, as in the record `attention_error`, without
weights and with full ones.

Cache-relative positions have a hole while level 0 waits for the token of its newest group. A cache
without holes shows what they change. The commit of the record has its command.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import over_base, table
from jaxkv.evals.lib.verdict import Statement, above, below, claim, within

BASE, FULL = "streaming", "reservoir"  # the uniform sample uses all its slots, as no tree does
THREE, TWO = "3 x 64", "2 x 64"  # levels x block; the second is the default
CLAIMS = (
    claim("not claimed",
          "At equal bytes, a merge-and-reduce tree of two levels and a longer window cache more "
          "tokens than three levels",
          "tree_slots", above(f"rows/{TWO}/cached", f"rows/{THREE}/cached"), unit="tokens"),
    claim("not claimed", "Two levels and a longer window lose less than three levels",
          "tree_slots",
          below(f"rows/{TWO}/loss_over_base_by_text", f"rows/{THREE}/loss_over_base_by_text")),
    claim("not claimed", "Without holes in the cache-relative positions of a sample, the loss is "
          "lower", "tree_slots", below("holes/over_holes")),
)  # fmt: skip


def trees_table() -> str:
    """Slots, losses and errors of each tree."""
    results = read("tree_slots")["results"]
    rows, equal, errors = results["rows"], results["equal_tokens"], results["errors"]["rows"]
    heads = ("levels x block", "tree's slots in use", "tokens cached", "loss minus streaming's",
             "at equal tokens", "error of attention", "error, weighted")  # fmt: skip
    cached = {name: f"{row['cached']:.0f}" for name, row in rows.items()}
    cells = [
        ("`streaming`", "", cached[BASE], "0", "0", f"{errors[BASE]['error']:.3f}", ""),
        ("`reservoir`", "", cached[FULL], over_base(rows[FULL]), *3 * [""]),
    ]
    for name, size in results["trees"].items():
        equal_tokens = equal.get(name if name == THREE else f"{name}, equal tokens")
        cells.append((
            name, f"{size['used']:.0f} of {size['slots']}", cached[name], over_base(rows[name]),
            over_base(equal_tokens) if equal_tokens else "",
            *(f"{errors[f'{name}, {exponent}']['error']:.3f}" for exponent in (0, 1)),
        ))  # fmt: skip
    return table(heads, cells)


TABLES = {"tree_slots": trees_table}
STATEMENTS = (
    Statement("docs/policies.md", "Positions without holes do not change the loss of "
              "SmolLM2-135M", "tree_slots", [within("holes/over_holes", by=0.001)]),
    Statement("evals/NEGATIVE.md", "lose less than three levels, one or seven", "tree_slots",
              [below(f"rows/{TWO}/loss_over_base_by_text", f"rows/{name}/loss_over_base_by_text")
               for name in (THREE, "1 x 128", "7 x 32")]),
    Statement("evals/NEGATIVE.md", "at an equal number of cached tokens, every tree loses more "
              "than `streaming`", "tree_slots",
              [above("equal_tokens/3 x 64"), above("equal_tokens/1 x 128, equal tokens"),
               above("equal_tokens/2 x 64, equal tokens")]),
)  # fmt: skip
