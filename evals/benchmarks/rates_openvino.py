"""The adapter of OpenVINO GenAI for rates.py; runs in the Python that has openvino-genai.

It imports nothing of jaxkv, and takes what it shares with the adapter of llama.cpp from that file.
Run it with `python -P`, as that one.

OpenVINO's own defaults apply, with three exceptions: the number of threads, the parts of a bounded
cache, and no cache of prefixes, which would skip the prompts that are measured again.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

SHARED = runpy.run_path(str(Path(__file__).with_name("rates_llama_cpp.py")))
SETTINGS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


class OpenvinoWorker:
    """One GGUF file in OpenVINO GenAI, with a cache that grows or a bounded one."""

    def load(
        self,
        model: str,
        cache: dict[str, int] | None,
        threads: int,
        prompts: Sequence[Sequence[int]],
        new: int,
        **_: Any,
    ) -> dict[str, Any]:
        """Load a file.

        cache: tokens of the parts of a bounded cache. prompts: to decode `new` tokens from; the
        losses of the first one are returned by quarter, before anything is evicted.
        """
        import numpy as np
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        if cache is not None:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                **cache, aggregation_mode=openvino_genai.AggregationMode.NORM_SUM
            )
        self.api, self.prompts = openvino_genai, prompts
        self.settings = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", self.settings
        )
        losses = np.array_split(self.losses(prompts[0]), 4)
        self.generate(prompts[0], new)
        return {
            "losses": [float(np.mean(quarter)) for quarter in losses],
            "weight_bytes": Path(model).stat().st_size,
            "cores": len(os.sched_getaffinity(0)),
            "cache": {"prompt": self.prompt_bytes, "decoding": self.decoding_bytes},
        }

    def about(self) -> dict[str, Any]:
        """Versions, and the defaults on this CPU that matter for speed."""
        import openvino

        empty = openvino.Model([openvino.op.Constant(openvino.Tensor([0.0]))], [])
        compiled = openvino.Core().compile_model(empty, "CPU", self.settings)
        settings = {name: compiled.get_property(name) for name in SETTINGS}
        return {
            "openvino_genai": self.api.__version__,
            "openvino": openvino.__version__,
            "settings": {name: getattr(x, "type_name", x) for name, x in settings.items()},
        }

    def prefill(self, tokens: Sequence[int]) -> dict[str, float]:
        """Seconds to read a prompt into an empty cache, up to the most probable next token."""
        _, (start, first) = self.generate(tokens, 1)
        return {"seconds": first - start}

    def decode(self, batch: int, new: int) -> dict[str, float]:
        """Seconds to generate tokens after the first prompt and the token that follows it."""
        _, times = self.generate(self.prompts[0], new + 1)
        return {"seconds": times[-1] - times[1]}

    def greedy(self, batch: int, new: int) -> dict[str, list[list[int]]]:
        """The first tokens after the first prompt."""
        return {"tokens": [self.generate(self.prompts[0], new)[0]]}

    def memory(self) -> dict[str, int]:
        return SHARED["memory"]()

    def losses(self, prompt: Sequence[int]) -> list[float]:
        """The losses of a prompt after its first token, in nats."""
        request = self.request(prompt, 1, logprobs=1, echo=True)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [-x for x in request.read_all()[0].generated_log_probs[1 : len(prompt)]]

    def request(self, prompt: Sequence[int], new: int, **options: Any) -> Any:
        """Ask for greedy tokens after a prompt; `step` of the pipeline computes them."""
        import numpy as np
        import openvino

        config = self.api.GenerationConfig(
            max_new_tokens=new, ignore_eos=True, do_sample=False, apply_chat_template=False,
            **options,
        )  # fmt: skip
        return self.pipeline.add_request(0, openvino.Tensor(np.array([prompt])), config)

    def generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, the time at the start, and that of each token.

        Keeps the bytes of the cache that are in use: of the prompt, and at the last token.
        """
        tokens: list[int] = []
        times = [perf_counter()]
        request = self.request(prompt, new)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            metrics = self.pipeline.get_metrics()
            self.decoding_bytes = round(metrics.cache_size_in_bytes * metrics.cache_usage / 100)
            if not tokens:  # the step of the first token caches the end of the prompt
                self.prompt_bytes = self.decoding_bytes
            if request.can_read():
                tokens += next(iter(request.read().values())).generated_ids
                times.append(perf_counter())
        return tokens, times


if __name__ == "__main__":
    SHARED["serve"](OpenvinoWorker())
