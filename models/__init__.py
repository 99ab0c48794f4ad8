"""Llama-family decoders on JAX: published weights, generation in constant memory."""

from importlib.util import find_spec

if not find_spec("flax"):
    raise ModuleNotFoundError("jaxkv.models needs Flax; pip install 'jaxkv[models]'", name="flax")

from jaxkv.models.config import Config
from jaxkv.models.conversation import Conversation
from jaxkv.models.decoder import Decoder
from jaxkv.models.llm import Llm, load
from jaxkv.models.score import losses, score
from jaxkv.models.streams import Stream
from jaxkv.models.text import Answer, generate, stream
from jaxkv.sampling import Sampling

__all__ = [
    "Answer",
    "Config",
    "Conversation",
    "Decoder",
    "Llm",
    "Sampling",
    "Stream",
    "generate",
    "load",
    "losses",
    "score",
    "stream",
]
