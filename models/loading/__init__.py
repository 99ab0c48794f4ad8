"""Published models: folders of Hugging Face, GGUF files, tokenizers, templates. Start at llm.py."""
