"""Runs for short loans of an accelerator, in the order of their worth.

`flash` comes first, then `rates`. Rates are in parts under out/evals: after `--minutes` no further
one begins, and the same command, with these parts in place, continues. Tests run each with tiny
sizes on a CPU.
"""
