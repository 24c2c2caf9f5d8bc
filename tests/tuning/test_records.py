"""Records: what they say comes back from disk, and nothing damaged is taken or overwritten."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from disks import limited
from sweeps import GPU, environment

from warploom.cli import main
from warploom.errors import RecordsError, SpecificationError
from warploom.generator import records_file
from warploom.generator.epilogue import Bias, Residual, Scale
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.held_file import hold
from warploom.generator.records import Record, Records, Timed, from_plain, to_plain

PLAIN = GemmOperation("bf16", "bf16", "bf16")
FUSED = GemmOperation(
    "e4m3", "e5m2", "bf16", epilogue=(Scale("row"), Bias("fp32"), Residual("bf16"))
)
WIDE = GemmSchedule((128, 128, 64), 6, (2, 1), kernel_schedule="pingpong")
SLIM = GemmSchedule((64, 32, 64), 18, consumers=1)


EARLY, LATE = "2026-11-21T10:00:00+00:00", "2026-11-22T00:00:00+00:00"


def record(m: int = 512, seconds: float = 4e-5, measured: str = EARLY) -> Record:
    return Record(
        PLAIN,
        GemmShape(m, 6144, 4096),
        environment(),
        Timed(WIDE, seconds, 0.004),
        Timed(SLIM, 5e-5, 0.003),
        (Timed(replace(WIDE, swizzle_size=4), 4.1e-5, 0.002),),
        measured,
    )


ATTENTION = Record(
    AttentionOperation("bf16", 128, "causal"),
    AttentionShape(1, 64, 8, 8192, 8192, 128),
    environment("attention_forward"),
    Timed(AttentionSchedule(128, 128, scheduler="dynamic"), 1.5e-3, 0.001),
    None,
)

BACKWARD = Record(
    AttentionBackwardOperation("bf16", 64, "causal", deterministic=True),
    AttentionShape(32, 32, 32, 512, 512, 64),
    environment("attention_backward"),
    Timed(AttentionBackwardSchedule(96, 128), 6e-4, 0.001),
    Timed(AttentionBackwardSchedule(64, 128, overlap=False), 7e-4, 0.001),
)


# ---- What comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("one", [record(), replace(record(), operation=FUSED), ATTENTION, BACKWARD])
def test_a_record_comes_back_from_json_as_it_was(one: Record) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(one))), GPU) == one


def test_files_have_the_same_bytes_in_any_order_and_a_contender_to_a_line() -> None:
    listed = (record(16), record(2048), record(512), ATTENTION)
    texts = {records_file.text(Records(GPU, order)) for order in (listed, listed[::-1])}
    (text,) = texts
    assert max(map(len, text.splitlines())) < 420
    lines = [line for line in text.splitlines() if '"shape"' in line]
    assert [json.loads(f"{{{line.strip().rstrip(',')}}}")["shape"].get("m") for line in lines] == [
        *(None, 16, 512, 2048)  # by family, then numbers by their size, not their first digit
    ]
    changed = Records(GPU, (*listed[:3], replace(ATTENTION, noisy=True)))
    pairs = zip(text.splitlines(), records_file.text(changed).splitlines(), strict=True)
    assert [after for before, after in pairs if before != after] == ['   "noisy": true,']


def test_of_two_records_of_one_problem_the_later_stays() -> None:
    early, late = record(seconds=4e-5), record(seconds=5e-5, measured=LATE)
    for first, then in ((early, late), (late, early)):
        merged = Records(GPU, (first,)).merged([then])
        assert [one.best.seconds for one in merged] == [5e-5]


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("2026-11-22T09:00:00+09:00", "2026-11-22T01:00:00+00:00"),
        ("2026-11-22T12:00:00+00:00", "2026-11-22T12:00:00.5Z"),
        ("2026-11-22T12:00:00", "20261122T120001Z"),  # without an offset it is UTC
        ("", "1970-01-01"),
        ("yesterday", "2026-11-22"),
    ],
)
def test_dates_are_compared_as_times_and_one_that_cannot_be_read_is_the_oldest(
    early: str, late: str
) -> None:
    """As texts, a date with another offset won, and "yesterday" was later than any."""
    old, new = record(measured=early), record(seconds=5e-5, measured=late)
    for first, then in ((old, new), (new, old)):
        assert list(Records(GPU, (first,)).merged([then])) == [new]
        assert list(Records(GPU, (first, then))) == [new]


def test_of_dates_that_cannot_be_read_the_record_that_is_merged_stays() -> None:
    one, other = record(measured="yesterday"), record(seconds=5e-5, measured="31.12.2026")
    assert list(Records(GPU, (one,)).merged([other])) == [other]
    assert list(Records(GPU, (other,)).merged([one])) == [one]


@pytest.mark.parametrize("of", ["the user", "the package"])
def test_what_was_just_measured_is_kept_although_the_clock_ran_back(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune --again` measured for minutes, and the file kept the old record without a word."""
    path, came = tmp_path / "own.json", tmp_path / "came.json"
    old = record(seconds=4e-5, measured=LATE)
    records_file.update(path if of == "the user" else came, GPU, [old])
    monkeypatch.setattr(records_file, "shipped", lambda _: came if came.exists() else None)
    new = record(seconds=5e-5, measured="1970-01-01T00:00:09+00:00")
    kept = records_file.keep(path, GPU, new)
    assert kept == replace(new, measured=LATE) and list(records_file.read(path)) == [kept]
    assert list(Records(GPU, (old,)).merged([kept])) == [kept]  # as calls and `merge` read it


def test_of_a_file_that_has_a_problem_twice_the_later_is_read_wherever_it_stands(
    tmp_path: Path,
) -> None:
    """As of files that two people merged by hand, in which an old record came last and won."""
    early, late = record(seconds=4e-5), record(seconds=5e-5, measured=LATE)
    for order in ((early, late), (late, early)):
        document = {"schema": 1, "gpu": GPU, "records": [to_plain(one) for one in order]}
        (tmp_path / "twice.json").write_text(json.dumps(document))
        assert list(records_file.read(tmp_path / "twice.json")) == [late]


def test_a_new_revision_replaces_the_old_and_other_compilers_stay_beside_it() -> None:
    old = record()
    new = replace(old, environment=replace(old.environment, revision=2))
    other = replace(old, environment=replace(old.environment, nvrtc="13.1"))
    merged = Records(GPU, (old, other)).merged([new])
    assert sorted((r.environment.revision, r.environment.nvrtc) for r in merged) == [
        *((1, "13.1"), (2, "13.0"))
    ]
    assert len(merged.merged([old])) == 2  # and the old one does not come back


def test_without_a_compiler_the_newest_of_several_compilers_records_decides() -> None:
    old = record(seconds=4e-5, measured=LATE)
    new = record(seconds=5e-5)
    new = replace(new, environment=replace(new.environment, nvrtc="13.1"))
    assert new.measured < old.measured
    here = replace(environment(), nvrtc=None)
    found = Records(GPU, (old, new)).exact(PLAIN, old.shape, here)
    assert found == old
    later = replace(new, measured=LATE.replace("2026", "2027"))
    assert Records(GPU, (old, later)).exact(PLAIN, old.shape, here) == later


def test_every_difference_makes_a_record_stale_and_no_compiler_none() -> None:
    here = environment()
    for field, value in (("gpu", "NVIDIA H100"), ("multiprocessors", 114), ("revision", 2)):
        (told,) = replace(here, **{field: value}).differences(here)
        assert str(value) in told and field in told
    assert replace(here, nvrtc="13.1").differences(here) == ("nvrtc 13.1, here 13.0",)
    assert here.differences(replace(here, nvrtc=None)) == ()


def test_nearest_is_by_ratio_of_extents_prefers_what_is_not_stale_and_has_bounds() -> None:
    stale = replace(record(500), environment=replace(environment(), nvrtc="12.9"))
    records = Records(GPU, (record(256), record(1024), stale))

    def near(m: int) -> int | None:
        found = records.nearest(PLAIN, GemmShape(m, 6144, 4096), environment())
        return found.shape.m if found and isinstance(found.shape, GemmShape) else None

    assert (near(300), near(900), near(501)) == (256, 1024, 256)
    assert near(8192) is None  # eight times as many rows say nothing
    assert records.nearest(FUSED, GemmShape(256, 6144, 4096), environment()) is None
    only_stale = Records(GPU, (stale,))
    assert only_stale.nearest(PLAIN, GemmShape(512, 6144, 4096), environment()) is stale


def test_records_of_the_same_layer_are_nearest_and_others_may_be_too_far() -> None:
    """A call of a tuned weight was decided by another weight's record, or by the model alone."""
    own = record(64)
    other = replace(own, shape=GemmShape(200, 6144, 4352))
    shape, here = GemmShape(200, 6144, 4096), environment()
    assert Records(GPU, (own, other)).nearest(PLAIN, shape, here) is own
    assert Records(GPU, (own,)).nearest(PLAIN, shape, here, within=0) is own
    assert Records(GPU, (other,)).nearest(PLAIN, shape, here, within=0.1) is other
    assert Records(GPU, (other,)).nearest(PLAIN, shape, here, within=0.05) is None
    assert Records(GPU, (record(16),)).nearest(PLAIN, shape, here) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"operation": {"family": "convolution"}}, "convolution"),
        ({"shape": {"m": 1, "n": 2}}, "k"),
        ({"shape": {"m": 1.5, "n": 2, "k": 3}}, "1.5"),
        ({"best": {"seconds": 0, "spread": 0, "schedule": {}}}, "seconds 0"),
        ({"best": {"seconds": 1.0, "spread": 0.0, "schedule": {"tile": [1], "stages": 2}}}, "tile"),
        (
            {"environment": {"multiprocessors": 0, "nvrtc": "13.0", "revision": 1}},
            "0 SMs",
        ),
        ({"environment": {"multiprocessors": 1}}, "nvrtc"),
    ],
)
def test_what_is_no_record_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(SpecificationError, match=named):
        from_plain({**to_plain(record()), **change}, GPU)


# ---- Files ---------------------------------------------------------------------------------------


def test_damaged_newer_and_foreign_files_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    whole = records_file.text(Records(GPU, (record(),)))
    bad = {
        "cut short": (whole[: len(whole) // 2], "damaged or cut short"),
        "newer": (whole.replace('"schema": 1', '"schema": 2', 1), "upgrade warploom"),
        "older": (whole.replace('"schema": 1', '"schema": 0', 1), "tune again"),
        "unknown field": (whole.replace('"stages"', '"stagez"', 1), "stagez"),
        "another file": ('{"benchmark": 1}', "no schema"),
        "a list": ("[]", "no schema"),
        "no records": ('{"schema": 1, "gpu": "x"}', "no gpu or no records"),
        "bytes": ("\x00\x01", "damaged"),
    }
    for name, (content, told) in bad.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        with pytest.raises(RecordsError, match=told):
            records_file.read(path)
        with pytest.raises(RecordsError, match=told):
            records_file.update(path, GPU, [record(16)])
        assert path.read_text() == content, name


def test_records_of_another_gpu_are_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    records_file.update(path, GPU, [record()])
    before = path.read_bytes()
    other = replace(record(), environment=environment(gpu="NVIDIA H100"))
    with pytest.raises(RecordsError, match="a file for each GPU"):
        records_file.update(path, GPU, [other])
    assert path.read_bytes() == before


def test_a_file_in_use_is_waited_for_and_not_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.json"
    records_file.update(path, GPU, [record()])
    before = path.read_bytes()
    monkeypatch.setattr(records_file, "WAIT_SECONDS", 0.1)
    held = hold(path, 0)
    with pytest.raises(RecordsError, match="in use"):
        records_file.update(path, GPU, [record(16)])
    os.close(held)
    assert path.read_bytes() == before
    records_file.update(path, GPU, [record(16)])
    assert list(tmp_path.iterdir()) == [path]  # no lock beside it


def test_what_cannot_be_written_is_not_made_and_the_old_file_stays(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    records_file.update(old, GPU, [record()])
    before = old.read_bytes()
    for path in (old, new):
        with limited(len(before) + 10), pytest.raises(RecordsError, match="cannot be written"):
            records_file.update(path, GPU, [record(16), record(32), ATTENTION])
    assert list(tmp_path.iterdir()) == [old] and old.read_bytes() == before


def test_a_file_that_its_maker_takes_away_again_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that waited for it made an empty one, which was damaged to all from then on."""
    path, hold = tmp_path / "records.json", records_file.hold

    def taken_away(held: Path, *given: Any, **options: Any) -> int:
        monkeypatch.setattr(records_file, "hold", hold)
        path.unlink()  # by another process, which could not write what it had
        return hold(held, *given, **options)

    monkeypatch.setattr(records_file, "hold", taken_away)
    assert [*records_file.update(path, GPU, [record()])] == [record()]
    assert [*records_file.read(path)] == [record()]


def test_a_link_stays_a_link_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    link, path = tmp_path / "link.json", tmp_path / "records.json"
    link.symlink_to(path)
    records_file.update(link, GPU, [record()])
    assert link.is_symlink() and len(records_file.read(path)) == 1


@pytest.mark.parametrize("target", ["/proc/none.json", "/dev/full"])
def test_a_place_that_takes_no_files_is_refused(target: str) -> None:
    """The first was tried for ever, the second could be replaced."""
    with pytest.raises(RecordsError, match=target):
        records_file.update(Path(target), GPU, [record()])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="WARPLOOM_RECORDS_DIR"):
        records_file.update(tmp_path / "file" / "records.json", GPU, [record()])


def _add(path: Path, first: int) -> None:
    for m in range(first, first + 10):
        records_file.update(path, GPU, [record(m)])


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=_add, args=(path, 100 * index)) for index in range(1, 5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(records_file.read(path)) == 40


def _add_on(path: Path, first: int) -> None:
    for m in itertools.count(first):
        records_file.update(path, GPU, [record(m)])


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    path, held = tmp_path / "records.json", 0
    for index in range(5):
        child = multiprocessing.get_context("fork").Process(
            target=_add_on, args=(path, 1 + 1000 * index)
        )
        child.start()
        while child.is_alive():
            if path.exists() and len(records_file.read(path)) > held + 5:
                break
            time.sleep(0.003)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        held = len(records_file.read(path))
    assert held > 25


# ---- Commands ------------------------------------------------------------------------------------


def test_show_and_merge(tmp_path: Path) -> None:
    one, other, target = (tmp_path / f"{name}.json" for name in ("one", "other", "target"))
    records_file.update(one, GPU, [record(16), ATTENTION])
    records_file.update(other, GPU, [record(512)])
    done = CliRunner().invoke(main, ["records", "merge", str(target), str(one), str(other)])
    assert done.exit_code == 0, done.stderr
    assert "records: 3" in done.stdout
    shown = CliRunner().invoke(main, ["records", "show", str(target)])
    assert "512x6144x4096" in shown.stdout and "1.25" in shown.stdout
    assert "seq_q8192" in shown.stdout
    as_json = json.loads(
        CliRunner().invoke(main, ["records", "show", str(target), "--json"]).stdout
    )
    assert len(as_json[str(target)]["records"]) == 3


def test_show_takes_records_of_a_family_a_type_a_shape_and_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    fused = replace(record(16), operation=FUSED)
    slow = replace(record(2048), best=Timed(WIDE, 7.646e-2, 0.001))
    records_file.update(path, GPU, [record(512), slow, fused, ATTENTION, BACKWARD])

    def shown(*options: str) -> list[str]:
        done = CliRunner().invoke(main, ["records", "show", str(path), *options])
        assert done.exit_code == 0, done.stderr
        return done.stdout.splitlines()  # the file is told on standard error

    assert len(shown()) == 5
    assert len(shown("--family", "attention_backward")) == 1
    assert len(shown("--type", "e5m2")) == 1
    assert len(shown("--type", "bf16", "--shape", "*x6144x4096")) == 3
    (line,) = shown("--shape", "2048x6144x4096")
    assert line.startswith("76460\t")  # microseconds, without an exponent
    assert len(shown("--gpu", "h200")) == 5
    assert CliRunner().invoke(main, ["records", "show", str(path), "--gpu", "h100"]).stdout == (
        "no records of these\n"
    )
    for option, told in (
        ("--family", "family 'none': must be one of "),
        ("--type", "element type 'none': known types: "),
    ):
        done = CliRunner().invoke(main, ["records", "show", str(path), option, "none"])
        assert done.exit_code == 1 and told in done.stderr


def test_merge_reads_all_before_it_writes(tmp_path: Path) -> None:
    good, bad, target = (tmp_path / f"{name}.json" for name in ("good", "bad", "target"))
    records_file.update(good, GPU, [record(16)])
    bad.write_text("{")
    done = CliRunner().invoke(main, ["records", "merge", str(target), str(good), str(bad)])
    assert done.exit_code == 1
    assert "cut short" in done.stderr and not target.exists()


def test_shipped_records_are_whole() -> None:
    for path in records_file.every():
        records = records_file.read(path)
        assert path.read_text() == records_file.text(records), f"{path} is not in its order"
