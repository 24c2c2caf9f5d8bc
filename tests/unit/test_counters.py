"""What tools/counters.py tells of a table of Nsight Compute's."""

from __future__ import annotations

import counters

PIPE = "sm__pipe_tensor_type_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
TABLE = f"""==PROF== Connected to process 1
"ID","Kernel Name","{counters.TIME}","{PIPE}","a","b","c","d","e","f","g"
"","","us","%","","","","","","",""
"0","long","1,234.5","82.5","1","1","1","1","1","1","1"
"1","a list","2.5","0","1","1","1","1","1","1","1"
"""


def test_kernels_of_any_length_are_told_in_the_tables_own_units() -> None:
    """ncu chooses a unit by the times; commas are of thousands."""
    name, time, pipe = counters.shown(TABLE)
    assert name == "long"
    assert time.split() == [counters.TIME, "1,234.5", "us"]
    assert pipe.split() == [PIPE, "82.5", "%"]
