"""What differs between the texts of two versions is shown, and once where many kernels share it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from golden_diff import Texts, hunks, main, rendered_at, shared

OLD: Texts = {
    "d1": ("one_00000001", "// one_00000001\nint a;\nint b;\n"),
    "d2": ("two_00000002", "// two_00000002\nint a;\nint b;\n"),
    "d3": ("three_00000003", "// three_00000003\nint c;\n"),
    "gone": ("four_00000004", "int d;\n"),
}


def test_a_change_that_kernels_share_is_shown_once_with_their_names() -> None:
    new = {
        "d1": ("one_00000001", "// one_00000001\nint a;\nlong b;\n"),
        "d2": ("two_00000002", "// two_00000002\nint a;\nlong b;\n"),
        "d3": ("three_00000003", "// three_00000003\nlong c;\n"),
    }
    (first, names), (second, others) = shared(OLD, new)
    assert first == " // KERNEL\n int a;\n-int b;\n+long b;"
    assert sorted(names) == ["one_00000001", "two_00000002"]
    assert second.endswith("-int c;\n+long c;") and others == ["three_00000003"]


def test_a_kernel_that_has_only_another_name_does_not_differ() -> None:
    new = {"d1": ("other_00000001", "// other_00000001\nint a;\nint b;\n")}
    assert shared(OLD, new) == []


def test_changes_that_are_far_apart_are_two() -> None:
    old = "\n".join(map(str, range(30)))
    new = old.replace("\n3\n", "\nthree\n").replace("\n25\n", "\nxxv\n")
    assert ["three" in hunk for hunk in hunks("kernel", old, new)] == [True, False]


def test_what_is_no_commit_is_named() -> None:
    result = CliRunner().invoke(main, ["no-such-commit"])
    assert result.exit_code == 1
    assert "no-such-commit: must be a commit" in result.output


def test_the_last_commit_can_be_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison runs another version's code: HEAD's, compared with no kernels."""
    old = rendered_at("HEAD")
    monkeypatch.setattr("golden_diff.rendered", dict)
    monkeypatch.setattr("golden_diff.rendered_at", {"HEAD": old}.__getitem__)
    for arguments in ([], ["--stat"]):
        result = CliRunner().invoke(main, ["HEAD", *arguments])
        assert result.exit_code == 0, result.output
        assert result.output.count(": only there") == len(old) > 100
