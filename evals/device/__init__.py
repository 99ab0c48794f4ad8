"""Runs for short loans of an accelerator, in the order of their worth.

`python -m jaxkv.evals.device` names the first run without a record, and `--run` starts it. A run
ends after `--minutes`; the parts that it computed are under out/evals, and the same command, with
these parts in place, continues it. Tests run each with tiny sizes on a CPU.
"""
