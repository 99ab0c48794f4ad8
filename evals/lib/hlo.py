"""Inspect the text of a compiled XLA module."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation."""
    bodies: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = begin[1]
            bodies[name] = []
        elif name is not None:
            bodies[name].append(line)
    return bodies


def copies(text: str, sizes: Collection[int]) -> list[str]:
    """Lines anywhere in the program that copy arrays of these sizes."""
    lines = (line.strip() for of_one in computations(text).values() for line in of_one)
    return [line for line in lines if _copied(line) in sizes]


def copies_in_loops(text: str, sizes: Collection[int]) -> list[str]:
    """Lines in loop bodies, and in computations they call, that copy arrays of these sizes.

    Raises ValueError if the program has no loop.
    """
    return [line.strip() for line in _in_loops(text, True) if _copied(line) in sizes]


def floats_in_loops(text: str, min_floats: int) -> list[str]:
    """Lines in loop bodies whose result has a float array of at least so many elements.

    The inside of a fusion is left out, because its values need no memory of their own.
    Raises ValueError if the program has no loop.
    """
    return [line.strip() for line in _in_loops(text, False) if _largest_float(line) >= min_floats]


def _in_loops(text: str, in_fusions: bool) -> Iterator[str]:
    """The lines of loop bodies and of the computations that they call, of fusions if asked for."""
    lines = computations(text)
    todo = re.findall(r"\bbody=%?([\w.\-]+)", text)
    if not todo:
        raise ValueError("no loop in this program")
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in lines[name]:
            if in_fusions or " fusion(" not in line:
                todo += re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
            for several in re.findall(r"\b(?:branch|called)_computations=\{([^}]*)\}", line):
                todo += [name.strip().lstrip("%") for name in several.split(",")]
            yield line


def _largest_float(line: str) -> int:
    """The elements of the largest float array in the result of a line."""
    result = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) [\w\-]+\(", line)
    arrays = re.findall(r"\b(?:bf16|f\d+\w*)\[([\d,]*)\]", result[1]) if result else []
    return max(map(_size, arrays), default=0)


def _size(sizes: str) -> int:
    return math.prod(map(int, filter(None, sizes.split(","))))


def _copied(line: str) -> int | None:
    """The elements of the array that a line copies, if it copies one."""
    array = re.search(r"= \(?\w+\[([\d,]*)\].* (?:copy|copy-start|transpose)\(", line)
    return array and _size(array[1])
