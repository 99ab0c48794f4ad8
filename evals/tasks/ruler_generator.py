"""Samples of one task by a script of nvidia-long-context-eval; runs as a process of its own.

The scripts parse a command line when they are imported, and draw a sample again until it fits,
without end where none does. So they get a process, and it exits with UNFIT after `attempts` draws.
Two modules are replaced: the tokenizer, by that of the model, and nltk's sentence splitter, whose
data is a download. Sentences end after . ! or ?, so needles in essays stand at other sentences.

Standard input is one JSON object: script, words (its command line), tokenizer (a tokenizer.json),
attempts. The script writes its samples into the folder that its command line names. In each sample
SPLIT follows the context, and LEAD precedes the beginning of the answer. It imports no jaxkv.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from types import ModuleType
from typing import Any

SPLIT, LEAD = "\ue010", "\ue011"  # private-use characters, which no text has
UNFIT = 3  # exit code
DATA = "long_context_eval.data"


def main() -> None:
    request = json.load(sys.stdin)
    constants = importlib.import_module(f"{DATA}.synthetic.constants")
    mark(constants.TASKS)
    tokenizer = tokenizer_module(request["tokenizer"])
    splitter = module("nltk.tokenize", sent_tokenize=sentences)
    sys.modules |= {
        "constants": constants, "tokenizer": tokenizer, f"{DATA}.tokenizer": tokenizer,
        "nltk": module("nltk", tokenize=splitter), "nltk.tokenize": splitter,
    }  # fmt: skip
    task = constants.TASKS[request["script"]]
    prompt = task["template"] + task["answer_prefix"]  # as the package's `prepare.py`
    sys.argv = [request["script"], *request["words"], f"--template={prompt}"]
    script = importlib.import_module(f"{DATA}.synthetic.{request['script']}")
    draw, draws = script.generate_input_output, iter(range(request["attempts"]))

    def counted(*args: Any, **fields: Any) -> Any:
        if next(draws, None) is None:
            os._exit(UNFIT)  # the scripts catch every exception
        return draw(*args, **fields)

    script.generate_input_output = counted
    script.main()


def mark(tasks: dict[str, dict[str, Any]]) -> None:
    """Put the marks into the templates of the package's tasks."""
    for task in tasks.values():
        task["template"] = task["template"].replace("{context}", f"{{context}}{SPLIT}")
        task["answer_prefix"] = LEAD + task["answer_prefix"]


def tokenizer_module(path: str) -> ModuleType:
    """The package's module `tokenizer`, with the tokenizer of a file."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(path)

    class Counter:
        def text_to_tokens(self, text: str) -> list[int]:
            plain = text.replace(SPLIT, "").replace(LEAD, "")
            return backend.encode(plain, add_special_tokens=False).ids

    return module("tokenizer", select_tokenizer=lambda kind, path: Counter())


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


if __name__ == "__main__":
    main()
