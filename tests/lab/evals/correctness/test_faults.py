"""The faults that `evals/correctness/faults.py` inserts."""

import ast

from jaxkv.evals.correctness import faults


def test_every_fault_changes_one_place_of_a_file_that_stays_python():
    assert len(faults.FAULTS) >= 40
    for fault in faults.FAULTS:
        text = (faults.ROOT / fault.file).read_text("utf-8")
        assert text.count(fault.old) == 1, fault
        ast.parse(text.replace(fault.old, fault.new))
