"""Adds the ids of the installed transformers to the record that test_text_to_ids.py reads."""

import json
import tempfile
from pathlib import Path

from tests.models.test_text_to_ids import CASES, RECORD, TEXTS


def transformers_ids(folder: Path) -> list[list[int]]:
    import transformers

    coder = transformers.AutoTokenizer.from_pretrained(folder)
    return [coder.encode(text, add_special_tokens=False) for text in TEXTS]


def record() -> None:
    """Add the ids of the installed transformers to the record."""
    import transformers

    versions = json.loads(RECORD.read_text())
    with tempfile.TemporaryDirectory() as root:
        folders = {case: write(Path(root, str(n))) for n, (case, write) in enumerate(CASES.items())}
        versions[transformers.__version__] = {c: transformers_ids(f) for c, f in folders.items()}
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f"  {json.dumps(case)}: {json.dumps(ids)}" for case, ids in cases.items())
        + "\n }"
        for version, cases in sorted(versions.items())
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
