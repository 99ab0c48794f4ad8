"""Time and memory: decoding, start, server."""
