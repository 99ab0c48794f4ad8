"""Bounds on long JSON, because Python's parser lets no other thread run until it ends.

Meanwhile every stream waits: half a second for a list of four million numbers. So members, lists
and objects are counted before parsing, and long lists of token ids are parsed in pieces.
"""

from __future__ import annotations

import json
import re
import time

from jaxkv.serve.http.faults import Fault

MEMBERS = 2**16  # commas, colons and opening brackets: parsed in some 20 ms
PIECE = 2**12  # ids of a piece: parsed in less than a millisecond
LONG = 64  # ids of a list that does not count as members
PAUSE = 1e-4  # seconds after each piece in which other threads run
# Pieces of a body, matched in less than a millisecond each. Outside of texts, a bracket is one.
OUTSIDE = re.compile(rb'[^"\[]{1,65536}+|[\["]')
INSIDE = re.compile(rb'(?:[^"\\]|\\.){1,65536}+|"', re.DOTALL)
ID = rb"[ \t\r\n]*+(?:0|[1-9]\d{0,9}+)[ \t\r\n]*+"
IDS = re.compile(rb"(?:%b,){1,%d}+" % (ID, PIECE))
LAST = re.compile(rb"%b\]" % ID)
PLACEHOLDER = b"NaN"  # no JSON, but the parser calls a function for it
STRUCTURE = (b",", b":", b"[", b"{")


def lift_ids(raw: bytes) -> tuple[bytes, list[list[int]]]:
    """The text with NaN in place of each long list of ids, and the lists in their order.

    A NaN of the text stays, so that there are more than lists. Raises Fault for more than MEMBERS
    in the rest.
    """
    if sum(map(raw.count, STRUCTURE)) <= MEMBERS:
        return raw, []
    rest: list[bytes] = []
    lists: list[list[int]] = []
    members = copied = position = 0
    inside = False  # a text
    while members <= MEMBERS and (match := (INSIDE if inside else OUTSIDE).match(raw, position)):
        piece, position = match[0], match.end()
        inside ^= piece == b'"'
        if inside:
            continue
        members += sum(map(piece.count, STRUCTURE))
        if piece == b"[":
            ids, end = _ids(raw, position)
            if len(ids) > LONG:
                rest += [raw[copied : match.start()], PLACEHOLDER]
                lists.append(ids)
                copied = position = end
    if members > MEMBERS:
        raise Fault(
            400,
            f"a body may have {MEMBERS} members of lists and objects besides token ids, got more; "
            "send several requests",
        )
    return b"".join([*rest, raw[copied:]]), lists


def _ids(raw: bytes, start: int) -> tuple[list[int], int]:
    """The ids of a list, and where it ends; no ids if it has anything else."""
    ids: list[int] = []
    end = start
    while match := IDS.match(raw, end):
        ids += json.loads(b"[%b]" % match[0][:-1])
        end = match.end()
        if len(ids) >= PIECE:
            time.sleep(PAUSE)
    last = LAST.match(raw, end)
    if last is None:
        return [], start
    return [*ids, int(last[0][:-1])], last.end()
