"""No source and no page uses a replaced term."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {"CHANGELOG.md", "docs/glossary.md", "tests/test_language.py"}
SOURCES = ("*.py", "*.md", "*.toml", "*.ipynb")
# Fields of records and names of figures, which older records use.
RECORDED = re.compile(
    r"\"(thinned|thinning|seal|zone|spelled|anew)\"|(?<=/)(thinned|seal|zone)(?=/)|recall_thinned"
    r"|losses that are no numbers, of all|thinning a prompt of 32,768"
)
# Term -> replacement. Names are matched as whole words, so `met` does not match `method`. Words
# that are also correct English, such as `behind` and `lane`, are matched in phrases.
TERMS = {
    r"\bMetState\b|\bmet\.py\b|\bthings? met\b|\bkeys? (a query )?meets?\b": "sparse attention",
    r"\bthinned\b|\bthinning\b": "prompt compression, compressed",
    r"\bhashed\.py\b|\bzones?\b": "LSH index, unindexed tail",
    r"\bleveled\b|\bhalved halves\b": "merge-and-reduce tree",
    r"\bslots\.py\b|\bexact\.py\b|\bas drawn\b": "ring, dense cache, per_head",
    r"\bin_pieces\b": "chunked_scan",
    r"\bstack\.py\b|\bspell(ed|ing|s)?\b": "policy_spec, format_policy",
    r"\.reach\b|\breach\(\)|\b(policy|POLICY)\.least\b": "max_lookback, min_prompt",
    r"\bcarry\.(share|fold|unfold)\b|\bcarry\.py\b": "deduplicate_shared, flatten_heads",
    r"\bturn_keys\b|\bre-?turned keys?\b|\bkeys? (are|is) turned\b": "rotate_keys, rotated",
    r"\b(view_)?by_rank\b|\branks? among the\b": "cache-relative position",
    r"\b(un|re)?seal(s|ed|ing)?\b": "finish_prefill, prefill finished",
    r"\bbehind (a|the|every|each) prompt\b|\bbefore and behind\b": "after the prompt, in decode",
    r"\bsettl(ed|ing)\b": "Leaf.page",
    r"\bprefill lanes?\b|\b(in|of|to) (a|the|its) lane\b": "prefill",
    r"\b(Told|Asked|Flight|Ticket)\b(?! of)": "step outputs, sequence parameters, handle",
    r"\bjunctions?\b": "branch point",
    r"\byardsticks?\b": "oracle baseline",
    r"\bno numbers?\b|\bwithout numbers\b": "NaN, not finite",
    r"\bheld or read\b": "KV budget",
    r"\brivals?\b": "baseline",
    r"\bwithout end\b|\bfixed memory\b": "unbounded generation in constant memory",
    r"\banew\b|\bbefalls?\b|\blest\b": "again, happens to, so that not",
    r"\bcaches? that forgets?\b|\bwhat it is worth\b": "evicting cache, importance",
}


def tracked() -> list[Path]:
    run = ["git", "ls-files", "-z", *SOURCES]
    try:
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in done.stdout.split("\0") if name and name not in ALLOWED]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def hits(term: str) -> list[str]:
    """Every line with the term, as path:line: text. Stored outputs of notebooks count too."""
    found = []
    for path in tracked():
        # A longer line is a stored figure.
        lines = path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if len(line) < 10_000 and re.search(term, RECORDED.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


@pytest.mark.parametrize("term", TERMS)
def test_no_source_uses_a_replaced_term(term):
    found = hits(term)
    assert not found, f"write {TERMS[term]} instead:\n" + "\n".join(found)


def test_the_list_of_terms_finds_them():
    assert re.search(next(iter(TERMS)), "the keys a query meets")
    assert not any(re.search(term, "this method has a budget of tokens") for term in TERMS)
