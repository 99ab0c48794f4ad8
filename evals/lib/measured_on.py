"""The model and the number of texts of a record, for the column `model` of CLAIMS.md."""

from __future__ import annotations

from typing import Any

REAL, DEFAULT, STORIES = "SmolLM2-135M", "default model", "stories260K"
FILES = {"SmolLM2-135M": REAL, "models/default/": DEFAULT, "stories260K": STORIES}  # in a path
TRAINED, RANDOM, SYNTHETIC = "models trained here", "random weights", "synthetic data"
# Records that name no file of a model, or measure others too.
OTHERS = {
    "agreement": f"{STORIES}, {RANDOM}",
    "agents": DEFAULT,
    "backcopy": TRAINED,
    "compiled": "shapes of three models",
    "default_model": DEFAULT,
    "emergence": TRAINED,
    "kernels_gpu": SYNTHETIC,
    "kernels_tpu": SYNTHETIC,
    "known_answers": SYNTHETIC,
    "latency": f"{STORIES}, {RANDOM} (110M)",
    "long_rollouts": RANDOM,
    "lookup": SYNTHETIC,
    "mfu": RANDOM,
    "mfu_gpu": RANDOM,
    "mfu_tpu": RANDOM,
    "prefix_replay": "no model",
    "recall": TRAINED,
    "rehearsal": TRAINED,
    "remat": RANDOM,
    "rollouts": TRAINED,
    "sampling": f"{REAL}, {SYNTHETIC}",
    "sink_tables": TRAINED,
    "sparse_tokens": f"{RANDOM} (110M)",
    "startup": f"{DEFAULT}, {REAL}, {RANDOM}",
}


def measured_on(name: str, record: dict[str, Any], model: str = "") -> str:
    """The model of a record, and whether it read only one novel.

    name: name of the record. model: replaces what the record says, for a claim about a part of it.
    Raises ValueError for a record of which nothing says the model.
    """
    data = record.get("data", {})
    files = [shown for part, shown in FILES.items() if any(part in path for path in data)]
    shown = model or OTHERS.get(name) or ", ".join(files)
    if not shown:
        raise ValueError(f"{name} names no file of a model; add it to OTHERS")
    novels = [path for path in data if path.endswith(".txt") and "tinystories" not in path]
    alone = len(novels) == 1 and any(file in shown for file in FILES.values())
    return f"{shown}, one novel" if alone else shown
