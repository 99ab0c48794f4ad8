"""Reading models from GGUF files, the format of llama.cpp."""

from jaxkv.models.gguf.config import read_config
from jaxkv.models.gguf.header import read_header
from jaxkv.models.gguf.tokenizer import read_chat, read_tokenizer
from jaxkv.models.gguf.weights import load_weights

__all__ = ["load_weights", "read_chat", "read_config", "read_header", "read_tokenizer"]
