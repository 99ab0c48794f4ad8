"""Text and losses from a loaded model, in constant memory. Start at text.py and streams.py."""
