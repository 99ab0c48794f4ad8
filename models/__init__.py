"""Llama-family decoders on JAX: published weights, generation in constant memory."""

from importlib.util import find_spec

if not find_spec("flax"):
    raise ModuleNotFoundError("jaxkv.models needs Flax; pip install 'jaxkv[models]'", name="flax")

from jaxkv.models.generation.conversation import Conversation
from jaxkv.models.generation.grammar import Grammar
from jaxkv.models.generation.score import losses, score
from jaxkv.models.generation.streams import Stream
from jaxkv.models.generation.text import Answer, generate, stream
from jaxkv.models.loading.llm import Llm, load
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Decoder
from jaxkv.sampling import Sampling

__all__ = [
    "Answer",
    "Config",
    "Conversation",
    "Decoder",
    "Grammar",
    "Llm",
    "Sampling",
    "Stream",
    "generate",
    "load",
    "losses",
    "score",
    "stream",
]
