"""No source, page or record uses a replaced term."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# CHANGELOG and old_contract.py say what replaces an old name.
ALLOWED = {
    "CHANGELOG.md", "docs/glossary.md", "jaxkv/old_contract.py", "tests/test_language.py",
}  # fmt: skip
SOURCES = ("*.py", "*.md", "*.toml", "*.ipynb")
# Term -> replacement. Case is ignored, and a term ends at every character that is no letter, so
# `met` is found in `share_met` but not in `method`. Words that are also correct English, such as
# `behind` and `lane`, are matched in phrases. A space also matches `_` and `-`.
TERMS = {
    r"metstate|met\.py|things? met|(share|keys?) met|keys? (a query )?meets?": "sparse attention",
    r"thinned|thinning": "prompt compression, compressed",
    r"hashed\.py|zones?": "LSH index, unindexed tail",
    r"level?led|halved halves": "merge-and-reduce tree",
    r"slots\.py|exact\.py|as drawn": "ring, dense cache, per_head",
    r"(def|import|pieces\.) ?in pieces|pieces\.py": "chunked_scan",
    r"stack\.py|(re)?spell(ed|ing|s)?": "policy_spec, format_policy, policy string",
    r"\.reach|reach\(\)|policy\.least": "max_lookback, min_prompt",
    r"carry\.(share|fold|unfold)|(?<!loop_)carry\.py": "deduplicate_shared, flatten_heads",
    r"turn keys|re ?turned keys?|keys? (are|is) turned": "rotate_keys, rotated",
    r"(view )?by rank|ranks? among the": "cache-relative position",
    r"(un|re)?seal(s|ed|ing)?": "finish_prefill, prefill finished",
    r"behind(?! an http)": "after, during decode",
    r"settl(ed|ing)": "Leaf.page",
    r"prefill lanes?|(in|of|to) (a|the|its) lane": "prefill",
    r"(class|import) (told|asked|flight|ticket)": "step outputs, sequence parameters, handle",
    r"evict(ion)? (order )?(linked|nested)|junctions?": "LRU, deepest first, branch point",
    r"yardsticks?": "oracle baseline",
    r"no numbers?|without numbers": "NaN, not finite",
    r"held or read|nobody's hands": "KV budget, cached, in use",
    r"rivals?": "baseline",
    r"arms?": "variants",
    r"without end|fixed memory": "unbounded generation in constant memory",
    r"anew|afresh|befalls?|lest": "again, happens to, so that not",
    r"caches? that forgets?|what it is worth|memor(y|ies) that (grows?|forgets?)": "evicting cache",
    r"(decode|decoding|engine|snapshot|prefix|host) slots?": "batch entry, prefix entry",
}


def pattern(term: str) -> re.Pattern:
    spaced = term.replace(" ", "[ _-]")
    return re.compile(f"(?<![a-z])(?:{spaced})(?![a-z])", re.IGNORECASE)


@cache
def lines() -> tuple[tuple[str, str], ...]:
    """Path and text of each line. Stored outputs of notebooks count too."""
    run = ["git", "ls-files", "-z", *SOURCES]
    try:
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in done.stdout.split("\0") if name and name not in ALLOWED]
    found = [
        (name, line.strip())
        for name in names
        if (ROOT / name).is_file()
        for line in (ROOT / name).read_text("utf-8").splitlines()
        if len(line) < 10_000  # a longer line is a stored figure
    ]
    return tuple(found + list(recorded()))


def recorded() -> Iterator[tuple[str, str]]:
    """The field names and bars of the stored results. Texts that a model wrote do not count."""
    for path in sorted((ROOT / "evals" / "results").glob("*.json")):
        for word in sorted(set(words(json.loads(path.read_text("utf-8"))))):
            yield path.relative_to(ROOT).as_posix(), word


def words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from map(str, value)
        yield str(value.get("bar", ""))
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from words(item)


def hits(term: str) -> list[str]:
    matches = pattern(term).search
    return [f"{name}: {line}"[:150] for name, line in lines() if matches(line)]


@pytest.mark.parametrize("term", TERMS)
def test_no_source_uses_a_replaced_term(term):
    found = hits(term)
    assert not found, f"write {TERMS[term]} instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text, number",
    [("keys a query meets", 0), ("share_met", 0), ("THINNED = {}", 1), ("seconds_to_seal", 11),
     ("make_them_anew", 23), ("behind_a_prompt", 12), ("without_end", 22), ("Spelled", 6)],
)  # fmt: skip
def test_the_list_of_terms_finds_them(text, number):
    assert pattern(list(TERMS)[number]).search(text)


def test_the_list_of_terms_leaves_english_alone():
    text = "this method has a budget of tokens; the target is met; spelt; stellar; charms; kept"
    assert not [term for term in TERMS if pattern(term).search(text)]
