"""What the benchmarks make of times: arithmetic, records."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import machine, tables
from benchmarks.protocol import Record, read, summary
from warploom.runtime.contest import Cell, Contender, Entry, Floor, compete
from warploom.runtime.measure import (
    SAMPLE_SECONDS,
    Sampler,
    Timing,
    interleave,
    laps_for,
)
from warploom.runtime.trial import buffer_sets
from warploom.tuning.bench import as_json, ratio, sound

PROBLEM = {"type": "bf16", "m": 1024, "n": 1024, "k": 1024}
FLOOR = Floor(1e-6, "flops")


def cell(ours: float | None, peer: float | None, share: float = 0.5) -> Cell:
    def entry(name: str, seconds: float | None) -> Entry:
        if seconds is None:
            return Entry(name, absent="no such thing")
        return Entry(name, seconds, spread=0.01, error_share=share)

    entries = (entry("warploom", ours), entry("torch.mm", peer))
    return Cell("bf16 cubed", PROBLEM, entries, FLOOR)


# ---- Arithmetic ----------------------------------------------------------------------------------


def test_buffers_in_turn_outlast_the_cache_twice() -> None:
    l2 = 50 * 2**20
    assert buffer_sets(200 * 2**20, l2) == 1
    assert buffer_sets(100 * 2**20, l2) == 1
    assert buffer_sets(99 * 2**20, l2) == 2
    assert buffer_sets(2**20, l2) == 100


def test_a_timing_is_a_median_and_not_moved_by_one_outlier() -> None:
    timing = Timing((1.0, 1.1, 0.9, 1.0, 50.0))
    assert timing.median == 1.0
    assert timing.spread == pytest.approx(0.1)


def test_nothing_is_collected_while_calls_are_captured() -> None:
    """A graph of an earlier cell that was destroyed then ended the capture, and the whole run."""
    seen: list[bool] = []

    def sampler(calls: object) -> Callable[[], float]:
        seen.append(gc.isenabled())
        return lambda: 1e-6

    compete("cell", {}, [Contender("warploom", []), Contender("peer", [])], sampler=sampler)
    assert seen == [False, False]
    assert gc.isenabled()


def test_contenders_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    def sampler(name: str) -> Sampler:
        def sample() -> float:
            order.append(name)
            return float(len(order))

        return sample

    names = ["a", "b", "c"]
    timings = interleave({name: sampler(name) for name in names}, rounds=40, discarded=2)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(one) == names for one in rounds)
    assert [len(timings[name].rounds) for name in names] == [38] * 3
    assert timings["a"].rounds[0] == 3 * 2 + rounds[2].index("a") + 1
    # None always runs just after the same one: a GPU at its power limit would favour it or not.
    followed = Counter(pairwise(order))
    assert min(followed[x, y] for x in names for y in names if x != y) >= 10


def test_a_sample_lasts_long_enough_to_be_timed() -> None:
    assert laps_for(SAMPLE_SECONDS / 10) == 10
    assert laps_for(1.0) == 1


@pytest.mark.parametrize(
    ("ours", "peer", "verdict"),
    [
        (1.0, 1.03, "won"),
        (1.0, 1.01, "tied"),
        (1.0, 0.99, "tied"),
        (1.0, 0.97, "lost"),
        (1.0, None, "absent"),
        (None, 1.0, "absent"),
    ],
)
def test_two_percent_decide_a_cell(ours: float | None, peer: float | None, verdict: str) -> None:
    assert cell(ours, peer).verdict == verdict


def test_a_fast_wrong_result_is_no_win() -> None:
    assert cell(1.0, 9.0, share=1.5).verdict == "wrong"


def test_a_summary_takes_the_geometric_mean_of_the_cells_that_have_a_ratio() -> None:
    cells = [cell(1.0, 4.0), cell(1.0, 1.0), cell(2.0, 1.0), cell(1.0, None)]
    told = summary(one.as_json() for one in cells)
    assert told.pop("geometric_mean") == pytest.approx(2 ** (1 / 3))
    assert told.pop("percentile_5") == pytest.approx(0.55)
    assert told == {"cells": 4, "won": 1, "tied": 1, "lost": 1, "absent": 1, "wrong": 0}


def test_a_wrong_result_has_no_part_in_any_mean_and_no_rate() -> None:
    """A kernel that computes nothing is 9 times as fast as its baseline."""
    right, wrong = cell(1.0, 1.5), cell(1.0, 9.0, share=1.5)
    problem = {**PROBLEM, "family": "gemm", "cells": "squares"}
    cells = [{**one.as_json(), "problem": problem} for one in (right, wrong)]
    assert summary(cells)["geometric_mean"] == pytest.approx(1.5)
    assert tables.figures(cells) == ("1.500", "1.500", "1.500")
    _, (_, row) = tables.of_cells(cells)
    assert row[2] == "wrong" and row[4:7] == ("-", "-", "wrong"), row


def test_the_ratio_of_a_wrong_result_is_in_no_document_and_no_summary(tmp_path: Path) -> None:
    """`Cell.ratio` of our wrong kernel over a right baseline was in the JSON: 9.0."""
    right = cell(1.0, 1.5)
    ours, peer = cell(1.0, 9.0).entries
    for share in (1.5, math.inf, math.nan):
        wrong = sound(replace(right, entries=(replace(ours, error_share=share), peer)))
        assert ratio(wrong) is None and wrong.verdict == "wrong"
        record = Record(tmp_path / "some.json", "gemm", {})
        record.add(wrong)
        (read_back,) = read(tmp_path / "some.json")["cells"]
        assert (read_back["ratio"], read_back["verdict"]) == (None, "wrong")
        assert tables.figures([read_back, as_json(right)]) == ("1.500", "1.500", "1.500")
        assert summary([as_json(wrong), as_json(right)])["geometric_mean"] == pytest.approx(1.5)


# ---- Records -------------------------------------------------------------------------------------


def test_a_record_is_on_disk_after_every_cell_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gemm.json"
    record = Record(path, "gemm_squares", {"torch": "2.13"})
    for count in (1, 2):
        record.add(cell(1.0, 1.5))
        assert len(read(path)["cells"]) == count
    found = read(path)
    assert set(found) == {"schema", "benchmark", "machine", "states", "cells"}
    assert set(found["cells"][0]) == {"name", "problem", "entries", "floor", "ratio", "verdict"}
    assert set(found["cells"][0]["entries"][0]) == set(Entry.__slots__)
    assert (found["cells"][0]["ratio"], found["cells"][0]["verdict"]) == (1.5, "won")


def test_a_record_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match="schema 0, not 1"):
        read(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"schema": 1, "cells": [', "old.json: .*: measure anew, or restore it"),
        ("[]", "old.json: schema None, not 1"),
        ('{"schema": 1, "cells": []}', "old.json: no cells"),
    ],
)
def test_a_damaged_document_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read(path)


def test_nvidia_smi_is_read_by_name_and_what_is_not_available_stays_text() -> None:
    found = machine.parse_nvidia_smi("580.159.04, 1980, 3201, 652.13, [N/A], 61\n")
    assert found == {
        "driver": "580.159.04",
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "power_watts": 652.13,
        "power_limit_watts": "[N/A]",
        "temperature_celsius": 61.0,
    }


def test_a_machine_without_a_gpu_still_names_its_versions() -> None:
    assert {"date", "python", "torch", "warploom", "toolchain NVRTC"} <= set(machine.machine())
