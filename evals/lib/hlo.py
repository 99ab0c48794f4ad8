"""Inspect the text of a compiled XLA module."""

from __future__ import annotations

import math
import re
from collections.abc import Collection


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = begin[1]
            found[name] = []
        elif name is not None:
            found[name].append(line)
    return found


def copies(text: str, sizes: Collection[int]) -> list[str]:
    """Lines anywhere in the program that copy arrays of these sizes."""
    lines = (line.strip() for of_one in computations(text).values() for line in of_one)
    return [line for line in lines if _copied(line) in sizes]


def copies_in_loops(text: str, sizes: Collection[int]) -> list[str]:
    """Lines in loop bodies, and in computations they call, that copy arrays of these sizes.

    Raises ValueError if the program has no loop.
    """
    lines = computations(text)
    todo = re.findall(r"\bbody=%?([\w.\-]+)", text)
    if not todo:
        raise ValueError("no loop in this program")
    seen: set[str] = set()
    found = []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in lines[name]:
            todo += re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
            for several in re.findall(r"\b(?:branch|called)_computations=\{([^}]*)\}", line):
                todo += [one.strip().lstrip("%") for one in several.split(",")]
            if _copied(line) in sizes:
                found.append(line.strip())
    return found


def _copied(line: str) -> int | None:
    """The elements of the array that a line copies, if it copies one."""
    array = re.search(r"= \(?\w+\[([\d,]*)\].* (?:copy|copy-start|transpose)\(", line)
    return array and math.prod(map(int, filter(None, array[1].split(","))))
