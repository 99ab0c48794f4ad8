"""`python -m jaxkv`: the command line."""

import sys

from jaxkv.cli import program

sys.exit(program())
