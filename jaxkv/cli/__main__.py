"""`python -m jaxkv.cli`, for a checkout that is not installed."""

import sys

from jaxkv.cli import program

sys.exit(program())
