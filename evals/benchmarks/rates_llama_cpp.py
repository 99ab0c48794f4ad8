"""The adapter of llama.cpp for rates.py; runs in the Python that has llama-cpp-python.

It imports nothing of jaxkv. Each line of standard input is one JSON object whose `do` names a
method of `LlamaCppWorker`, with its arguments; the answer is one line of JSON on standard output.
Run it with `python -P`: the folder of this file has a module of the name of the package.

llama.cpp's own defaults apply, with two exceptions: the number of threads and the context length.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

ERROR = 4  # the log level of llama.cpp's errors
LOGS: list[Any] = []
SETTINGS = ("n_batch", "n_ubatch", "flash_attn_type", "type_k", "type_v", "kv_unified")


def serve(worker: Any) -> None:
    """Answer requests until standard input ends; libraries that print go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(worker, asked.pop("do"))(**asked)
        print(json.dumps(answer), file=answers, flush=True)


def memory(process: int | str = "self") -> dict[str, int]:
    """Resident bytes of a process, now and at most."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kilobytes = {field: int(fields[field].split()[0]) for field in ("VmRSS", "VmHWM")}
    return {"resident": 1024 * kilobytes["VmRSS"], "peak": 1024 * kilobytes["VmHWM"]}


class LlamaCppWorker:
    """One GGUF file in llama.cpp, with one context per batch size."""

    def quantise(self, source: str, target: str, form: str, threads: int) -> dict[str, Any]:
        """Write another form of a GGUF file, such as Q8_0 or F16."""
        import llama_cpp

        quiet()
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form}")
        parameters.nthread, parameters.allow_requantize = threads, True
        failed = llama_cpp.llama_model_quantize(
            source.encode(), target.encode(), ctypes.byref(parameters)
        )
        if failed:
            raise RuntimeError(f"llama_model_quantize of {form} returned {failed}")
        return {}

    def load(
        self, model: str, threads: int, prompts: Sequence[Sequence[int]], room: int, **_: Any
    ) -> dict[str, Any]:
        """Load a file. prompts: to decode from, one per sequence; room: tokens of a sequence."""
        import llama_cpp

        quiet()
        llama_cpp.llama_backend_init()
        self.threads, self.prompts, self.room = threads, prompts, room
        self.contexts: dict[int, Context] = {}
        self.model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {Path(model).name}")
        description = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.model, description, 128)
        return {
            "weight_bytes": llama_cpp.llama_model_size(self.model),
            "description": description.value.decode(),
            "cores": len(os.sched_getaffinity(0)),
        }

    def about(self) -> dict[str, Any]:
        """Versions, instructions that the build uses, and defaults that matter for speed."""
        import llama_cpp

        folder = Path(llama_cpp.__file__).parent / "lib"
        version = ctypes.CDLL(str(folder / "libggml-base.so")).ggml_version
        version.restype = ctypes.c_char_p
        parameters = llama_cpp.llama_context_default_params()
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "ggml": version().decode(),
            "build": llama_cpp.llama_print_system_info().decode().strip(" |"),
            "settings": {name: getattr(parameters, name) for name in SETTINGS},
        }

    def prefill(self, tokens: Sequence[int]) -> dict[str, float]:
        """Seconds to read a prompt into an empty cache, up to the most probable next token."""
        context = self.context(1)
        context.clear()
        start = perf_counter()
        context.read(0, tokens)
        return {"seconds": perf_counter() - start}

    def decode(self, batch: int, new: int) -> dict[str, float]:
        """Seconds to generate tokens for the first sequences, after their prompts."""
        context = self.context(batch)
        context.to_prompts(self.prompts[:batch])
        start = perf_counter()
        context.generate(new)
        return {"seconds": perf_counter() - start}

    def greedy(self, batch: int, new: int) -> dict[str, list[list[int]]]:
        """The tokens that `decode` generates."""
        context = self.context(batch)
        context.to_prompts(self.prompts[:batch])
        return {"tokens": context.generate(new)}

    def memory(self) -> dict[str, int]:
        return memory()

    def context(self, batch: int) -> Context:
        """The context of this many sequences."""
        if batch not in self.contexts:
            self.contexts[batch] = Context(self.model, batch, self.room, self.threads)
        return self.contexts[batch]


class Context:
    """A llama_context of some sequences and their cache."""

    def __init__(self, model: Any, batch: int, room: int, threads: int):
        import llama_cpp

        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = batch * room, batch
        parameters.n_threads = parameters.n_threads_batch = threads
        self.api, self.batch, self.largest = llama_cpp, batch, parameters.n_batch
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no context of {batch} sequences of {room} tokens")
        self.cache = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.tokens = llama_cpp.llama_batch_init(self.largest, 0, 1)
        self.clear()

    def clear(self) -> None:
        """Empty the cache."""
        self.api.llama_memory_clear(self.cache, False)
        self.prompts: list[Sequence[int]] = []
        self.next: list[int] = []

    def to_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Let the cache hold these prompts and nothing else."""
        if self.prompts == list(prompts):
            for sequence, prompt in enumerate(prompts):
                if not self.api.llama_memory_seq_rm(self.cache, sequence, len(prompt), -1):
                    raise RuntimeError("llama.cpp cannot remove the end of a sequence")
            return
        self.clear()
        self.next = [self.read(sequence, prompt) for sequence, prompt in enumerate(prompts)]
        self.prompts = list(prompts)

    def read(self, sequence: int, tokens: Sequence[int]) -> int:
        """Append tokens to an empty sequence; the most probable next token."""
        for begin in range(0, len(tokens), self.largest):
            part = tokens[begin : begin + self.largest]
            last = begin + len(part) == len(tokens)
            for index, token in enumerate(part):
                needs_logits = last and index == len(part) - 1
                self.put(index, token, begin + index, sequence, needs_logits)
            self.run(len(part))
        return self.top(len(part) - 1)

    def generate(self, new: int) -> list[list[int]]:
        """Greedy tokens of every sequence, from the end of the prompts."""
        tokens, steps = list(self.next), []
        for step in range(new):
            for sequence, token in enumerate(tokens):
                self.put(sequence, token, len(self.prompts[sequence]) + step, sequence, True)
            self.run(self.batch)
            steps.append(tokens)
            tokens = [self.top(sequence) for sequence in range(self.batch)]
        return [list(sequence) for sequence in zip(*steps, strict=True)]

    def put(self, index: int, token: int, position: int, sequence: int, needs_logits: bool) -> None:
        """Set one token of the next run. wanted: its logits are computed."""
        batch = self.tokens
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.logits[index] = needs_logits

    def run(self, count: int) -> None:
        self.tokens.n_tokens = count
        failed = self.api.llama_decode(self.context, self.tokens)
        if failed:
            raise RuntimeError(f"llama_decode of {count} tokens returned {failed}")

    def top(self, index: int) -> int:
        """The most probable token after a token of the last run."""
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def quiet() -> None:
    """Print llama.cpp's errors only."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _: object) -> None:
        if level == ERROR:
            print(text.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    LOGS.append(log)  # llama.cpp keeps only a pointer
    llama_cpp.llama_log_set(log, ctypes.c_void_p())


if __name__ == "__main__":
    serve(LlamaCppWorker())
