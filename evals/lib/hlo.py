"""Inspect the text of a compiled XLA module."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    "call", "after-all", "async-update", "partition-id", "replica-id",
}  # fmt: skip
COLLECTIVES = "all-", "reduce-scatter", "collective-"
COUNTS = "kernels", "copies", "moved_bytes", "host_conditions", "collectives"
PREFETCHES = {"copy-start", "slice-start"}
OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
BITS = {"pred": 8, "bf16": 16}  # of types whose name does not tell them


def step_of(text: str, scalars: int = 0, loop: bool = True) -> dict[str, Any]:
    """The kernels of a program: of the body of its largest loop, else of its entry.

    loop: whether a step is the body of a loop, if there is one.

    scalars: operations outside fusions with at most so many elements are no kernels: a TPU computes
    them beside these.

    kernels: their number. copies: kernels that only move an array. moved_bytes: of the operands and
    results of all kernels in the memory of the device. host_conditions: conditions and loops within
    a step, for which a GPU waits for the host; what stands in the branches of a condition is not
    counted, because it runs seldom. A loop within a step counts as often as it runs, if the program
    says how often. largest_float32: the shape of the largest array in float32 that
    a kernel writes to memory. collectives: kernels that exchange data between devices.
    """
    bodies = computations(text)
    loops = re.findall(r"\bbody=%?([\w.\-]+)", text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    step = max(loops, key=lambda name: len(bodies[name])) if loops and loop else entry[1]
    counts = dict.fromkeys(COUNTS, 0)
    largest: list[int] = []
    todo, seen = [(step, 1)], set()
    while todo:
        name, times = todo.pop()
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
            counts["host_conditions"] += times * (kind in ("while", "conditional"))
            if kind in ("while", "call"):
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                inner = times * int(trips[1]) if trips else times
                bodies_called = re.findall(r"\b(?:to_apply|body)=%?([\w.\-]+)", line)
                todo += [(body, inner) for body in bodies_called]
            if kind in FREE or kind.endswith("-done"):
                continue
            if kind in PREFETCHES:
                copied = [array for array in _arrays(result) if array[1] > 1]  # and a counter
                counts["moved_bytes"] += times * min(map(_bytes_of, copied), default=0)
                continue
            elements = max((size for _, size, _ in _arrays(result)), default=0)
            if kind not in ("fusion", "custom-call") and elements <= scalars:
                continue
            counts["kernels"] += times
            counts["collectives"] += times * kind.startswith(COLLECTIVES)
            counts["copies"] += times * (kind == "copy" or _only_moves(line, bodies))
            counts["moved_bytes"] += times * _moved(line, operation, results, bodies)
            for kind_of_array, sizes, _ in ARRAY.findall(result):
                if kind_of_array == "f32":
                    shape = [*map(int, filter(None, sizes.split(",")))]
                    largest = max(largest, shape, key=math.prod)
    return counts | {"largest_float32": largest}


def _moved(
    line: str,
    operation: re.Match[str],
    results: Mapping[str, str],
    bodies: Mapping[str, list[str]],
) -> int:
    """Bytes of the operands and the result of a kernel in the memory of the device.

    results: the types of earlier results, by name.
    """
    operands = [(name, results.get(name, "")) for name in _operands(line, operation)]
    whole = sum(map(_in_memory, (operation[2], *dict(operands).values())))
    called = re.search(r" fusion\(.*\bcalls=%?([\w.\-]+)", line)
    if called is None:
        return whole
    return whole - _unread(bodies[called[1]], [of_operand for _, of_operand in operands])


def _operands(line: str, operation: re.Match[str]) -> list[str]:
    return re.findall(r"%([\w.\-]+)", line[operation.end() :].partition(")")[0])


def _unread(body: Sequence[str], operands: Sequence[str]) -> int:
    """Bytes of the operands and results of a fusion that it does not touch.

    It reads only a part of an operand of which it takes slices, and writes only a part of one that
    it updates in place. operands: their types.
    """
    matches = [(line, match) for line in body if (match := OPERATION.match(line))]
    types = {match[1]: match[2] for _, match in matches}
    unread = 0
    for line, match in matches:
        number = re.search(r" parameter\((\d+)\)", line)
        if number is None or int(number[1]) >= len(operands):
            continue
        names, touched, in_place = {match[1]}, 0, False
        for using, use in matches:
            read = _operands(using, use)
            if not names & {*read}:
                continue
            if use[3] in ("bitcast", "reshape"):
                names.add(use[1])
            elif use[3] in ("dynamic-slice", "gather", "slice") and read[0] in names:
                touched += _in_memory(types[use[1]])
            elif use[3] == "dynamic-update-slice" and read[0] in names:
                in_place, touched = True, touched + _in_memory(types.get(read[1], ""))
            elif use[3] == "scatter" and read[0] in names:
                in_place, touched = True, touched + _in_memory(types.get(read[-1], ""))
            else:
                break
        else:
            size = _in_memory(operands[int(number[1])])
            unread += max(0, (1 + in_place) * size - touched) if size else 0
    return unread


def _in_memory(types: str) -> int:
    """The bytes of the arrays of a type in the memory of the device."""
    return sum(_bytes_of(array) for array in _arrays(types) if not array[2])


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
