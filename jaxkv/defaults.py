"""Defaults that the library uses and that the command line states; nothing here imports JAX."""

POLICY = "streaming:sinks=4,window=252"

# Of an engine and its server:
MAX_BATCH = 16  # sequences, where neither they nor memory set fewer
GROWING_LEN = 4096  # tokens of a sequence under growing caches, which reserve memory for them
MAX_TOKENS = 2**17  # of a prompt, and of an answer, where max_len sets no limit
MEMORY_SHARE = 0.9  # of the free memory, where none is given
PREFIX_MEMORY = 2**29  # bytes for prefixes, where neither they nor memory are given
PREFIX_DIR_SIZE = 2**32  # bytes of a folder of prefixes, where none are given
