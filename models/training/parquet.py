"""Documents of Parquet files: one a row, read in batches with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.errors import UserError, first_few

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ROWS = 64  # rows decoded at a time: a batch of long documents must fit into memory


def row_groups(path: Path, column: str) -> list[int]:
    """The bytes of the column in each row group.

    Raises UserError for a file that is not Parquet, and for one without a column of strings of
    this name.
    """
    from pyarrow import types

    with _open(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(
                f"{path} has no column {column!r}, its columns are {first_few(map(repr, names))}; "
                "name one with --column"
            )
        kind = file.schema_arrow.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise UserError(
                f"column {column!r} of {path} must hold strings, got {kind}; name another with "
                "--column"
            )
        groups = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
        leaf = next(n for n in range(len(file.schema)) if file.schema.column(n).path == column)
        return [group.column(leaf).total_uncompressed_size for group in groups]


def documents(path: Path, column: str, start: int, stop: int) -> Iterator[str]:
    """The texts of row groups `start` to `stop`, without nulls."""
    import pyarrow

    try:
        with _open(path) as file:
            for batch in file.iter_batches(ROWS, range(start, stop), [column]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise _unreadable(path, error) from None


def _open(path: Path) -> ParquetFile:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a whole Parquet file: {error}; write it again")
