"""The run-time check of shapes and types: an int passes where a float is asked (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
