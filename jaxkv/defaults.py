"""Defaults that the library uses and that the command line states; nothing here imports JAX."""

POLICY = "streaming:sinks=4,window=252"

# Of an engine and its server:
MAX_BATCH = 16  # sequences that decode together, if memory holds so many
GROWING_LEN = (
    4096  # tokens of a sequence under growing caches, which reserve memory for all of them
)
MAX_CHUNK = 4096  # tokens: the last piece of a prompt may be padded to nearly a whole chunk
MAX_TOKENS = 2**17  # tokens of a prompt, and of an answer, if max_len sets no limit
MEMORY_SHARE = 0.9  # share of the free memory that an engine takes, without --memory
PREFIX_MEMORY = 2**29  # bytes for prefixes, without --memory and --prefix-memory
PREFIX_DIR_SIZE = 2**32  # bytes of a prefix folder, without --prefix-dir-size
# Of JSON that obeys a schema: one line, as in the texts that models read, so that no answer is
# white space. Options of llguidance.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
