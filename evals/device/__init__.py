"""Runs for short loans of an accelerator, in the order of their worth.

`python -m jaxkv.evals.device` names the first run without a record, and `--run` starts it. Rates
are in parts under out/evals: after `--minutes` no further one begins, and the same command, with
these parts in place, continues. Tests run each with tiny sizes on a CPU.
"""
