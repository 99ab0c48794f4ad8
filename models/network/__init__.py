"""The decoder: its config, its weights in floats and integers, its loss. Start at decoder.py."""
