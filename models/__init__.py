"""Llama-family decoders on JAX: loading as published, generation in a fixed memory."""

from jaxkv.sampling import Sampling
from models.config import Config
from models.conversation import Conversation
from models.decoder import Decoder
from models.llm import Llm, load
from models.score import losses, score
from models.streams import Stream
from models.text import Answer, generate, stream

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
