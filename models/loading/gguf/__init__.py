"""Reading models from GGUF files, the format of llama.cpp."""

from jaxkv.models.loading.gguf.config import described, read_config
from jaxkv.models.loading.gguf.header import read_header
from jaxkv.models.loading.gguf.tokenizer import read_chat, read_tokenizer
from jaxkv.models.loading.gguf.weights import model_tensors, read_weight

__all__ = [
    "described",
    "model_tensors",
    "read_chat",
    "read_config",
    "read_header",
    "read_tokenizer",
    "read_weight",
]
