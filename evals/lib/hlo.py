"""Inspect the text of a compiled XLA module."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any


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


# Operations that are no kernel, and those that prefetch while others run.
FREE = {
    "parameter", "bitcast", "constant", "get-tuple-element", "tuple", "while", "conditional",
    "call", "after-all", "copy-done", "slice-done", "all-reduce-done", "partition-id", "replica-id",
}  # fmt: skip
PREFETCHES = {"copy-start", "slice-start"}
OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
BITS = {"pred": 8, "bf16": 16}  # of types whose name does not tell them


def step_of(text: str, scalars: int = 0) -> dict[str, Any]:
    """The kernels of a program: of the body of its largest loop, else of its entry.

    scalars: operations outside fusions with at most so many elements are no kernels: a TPU computes
    them beside these.

    kernels: their number. copies: kernels that only move an array. moved_bytes: of the operands and
    results of all kernels in the memory of the device, counted whole also where a kernel reads a
    part. host_conditions: conditions and loops within a step, for which a GPU waits for the host;
    what stands in the branches of a condition is not counted, because it runs seldom.
    largest_float32: the shape of the largest array in float32 that a kernel writes to memory.
    """
    bodies = computations(text)
    loops = re.findall(r"\bbody=%?([\w.\-]+)", text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    step = max(loops, key=lambda name: len(bodies[name])) if loops else entry[1]
    counts = {"kernels": 0, "copies": 0, "moved_bytes": 0, "host_conditions": 0}
    largest: list[int] = []
    todo, seen = [step], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        results: dict[str, str] = {}
        for line in bodies[name]:
            operation = OPERATION.match(line)
            if operation is None:
                continue
            label, result, kind = operation.groups()
            results[label] = result
            counts["host_conditions"] += kind in ("while", "conditional")
            if kind in ("while", "call"):
                todo += re.findall(r"\b(?:to_apply|body)=%?([\w.\-]+)", line)
            if kind in FREE:
                continue
            if kind in PREFETCHES:
                counts["moved_bytes"] += min(map(_bytes_of, _arrays(result)), default=0)
                continue
            elements = max((size for _, size, _ in _arrays(result)), default=0)
            if kind not in ("fusion", "custom-call") and elements <= scalars:
                continue
            counts["kernels"] += 1
            counts["copies"] += kind == "copy" or _only_moves(line, bodies)
            operands = re.findall(r"%([\w.\-]+)", line[operation.end() :].partition(")")[0])
            moved = [result, *(results.get(operand, "") for operand in {*operands})]
            counts["moved_bytes"] += sum(
                _bytes_of(array) for types in moved for array in _arrays(types) if not array[2]
            )
            for kind_of_array, sizes, _ in ARRAY.findall(result):
                if kind_of_array == "f32":
                    shape = [*map(int, filter(None, sizes.split(",")))]
                    largest = max(largest, shape, key=math.prod)
    return counts | {"largest_float32": largest}


def _arrays(types: str) -> list[tuple[str, int, bool]]:
    """The arrays in a type, such as (f32[2,3]{1,0}, s32[]): kind, elements, and whether the array
    is in the fast memory of a TPU."""
    return [(kind, _size(sizes), "S(" in layout) for kind, sizes, layout in ARRAY.findall(types)]


def _bytes_of(array: tuple[str, int, bool]) -> int:
    kind, elements, _ = array
    return elements * (BITS.get(kind) or int(re.sub(r"\D", "", kind)[:2] or 8)) // 8


def _only_moves(line: str, bodies: Mapping[str, list[str]]) -> bool:
    """Whether a line is a fusion whose result is a copied or transposed array."""
    called = re.search(r" fusion\(.*\bcalls=%?([\w.\-]+)", line)
    operations = [m[3] for m in map(OPERATION.match, bodies[called[1]]) if m] if called else []
    moves = [kind for kind in operations if kind not in FREE]
    return bool(moves) and set(moves) <= {"copy", "transpose"}


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
