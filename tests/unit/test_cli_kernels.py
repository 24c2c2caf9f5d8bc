"""Every command that takes a kernel knows it by its name, a file, its digest and its store key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from warploom.cli import kernels, main
from warploom.errors import UnknownNameError
from warploom.generator import names
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.configurations import smoke
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store, key, source_digest

SPECS = expand_file(next(path for path in smoke() if path.parent.name == "gemm")).specs
SPEC = SPECS[3]
OLD = "gemm_sm90a_of_another_version_0badcafe"
OPTIONS = ("-std=c++17",)


def artifact(name: str, source: str) -> Artifact:
    digest, told = source_digest(source), {name: Resources(168, 0, 0)}
    return Artifact(name, "sm_90a", b"\x7fELF", digest, "nvrtc-13.0", OPTIONS, told, (), 0.1)


def key_of(name: str, source: str) -> str:
    return key(source, OPTIONS, "sm_90a", "nvrtc-13.0")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of this test's own with SPEC, and with a kernel of another version."""
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("WARPLOOM_CACHE_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    made = Store.default()
    for name, source in ((SPEC.name, render(SPEC)), (OLD, "of another version")):
        made.put(key_of(name, source), artifact(name, source))
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# ---- Commands, which return the name of the kernel that they took --------------------------------


def by_show(written: str) -> str:
    result = run("show", written, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["stored"] is True
    return str(told["name"])


def by_explain(*written: str) -> str:
    result = run("cache", "explain", *written, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["present"] is True, "`show` calls it stored"
    (name,) = (name for name, stored in Store.default().listed() if stored == told["key"])
    return name


def by_emit(written: str) -> str:
    result = run("emit", written, "--out", "out", "--json")
    assert result.exit_code == 0, result.stderr
    ((file, _),) = (row.values() for row in json.loads(result.stdout)["files"])
    return Path(file).stem


def by_compile(written: str) -> str:
    compiled: list[KernelSpec] = []

    def build_many(specs: list[KernelSpec], *_: object, **__: object) -> list[Artifact]:
        compiled.extend(specs)
        return [artifact(spec.name, render(spec)) for spec in specs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warploom.generator.build.build_many", build_many)
        result = run("compile", written, "--json")
    assert result.exit_code == 0, result.stderr
    (spec,) = compiled
    return spec.name


COMMANDS: dict[str, Callable[[str], str]] = {
    "show": by_show,
    "cache explain": by_explain,
    "cache explain --name": lambda written: by_explain("--name", written),
    "emit": by_emit,
    "compile": by_compile,
}
FORMS = {
    "name": SPEC.name,
    "file": f"{SPEC.name}.cu",
    "file elsewhere": f"some/where/{SPEC.name}.cubin",
    "digits of the name": SPEC.digest[:8],
    "more digits": SPEC.digest[:13],
    "digest": SPEC.digest,
    "digest in capitals": SPEC.digest.upper(),
    "key": key_of(SPEC.name, render(SPEC)),
    "first digits of the key": key_of(SPEC.name, render(SPEC))[:8],
}
REFUSED = {
    "few digits": (SPEC.digest[:7], "must have 8 to 64 digits"),
    "many digits": (SPEC.digest + "0", "must have 8 to 64 digits"),
    "unknown digest": (SPEC.digest[:6] + "00", f"near: {SPEC.digest[:8]}"),
    "unknown key": (key_of(SPEC.name, render(SPEC))[:40] + "0" * 24, "a key of the store"),
    "unknown name": (f"{SPEC.name[:-8]}00000000", "its digest is"),
    "malformed name": (SPEC.name.replace("bf16", "bf17"), f"near: {SPEC.name[:11]}"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_kernel_in_every_form(command: str, form: str) -> None:
    """`cache explain DIGEST` said `present: no` of a kernel that `show DIGEST` called stored."""
    assert COMMANDS[command](FORMS[form]) == SPEC.name


@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_what_is_no_kernel_and_says_what_is_near(command: str, form: str) -> None:
    written, told = REFUSED[form]
    result = run(*command.split(), written)
    assert (result.exit_code, result.stdout) == (1, "")
    assert written in result.stderr and told in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_digits_that_several_kernels_begin_with_are_refused_by_all(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key_of(SPEC.name, render(SPEC))
    stored = [(SPEC.name, first), (OLD, first[:12] + "0" * 52)]
    monkeypatch.setattr(Store, "listed", lambda self: stored)
    result = run(*command.split(), first[:10])
    assert result.exit_code == 1
    assert f"digest {first[:10]}: must be of one kernel; 2 begin so: " in result.stderr
    assert SPEC.name in result.stderr and OLD in result.stderr


@pytest.mark.parametrize("form", [OLD, OLD[-8:], f"{OLD}.cu", key_of(OLD, "of another version")])
def test_a_kernel_of_another_version_is_in_the_store_and_cannot_be_made(form: str) -> None:
    assert by_explain(form) == OLD
    for command in ("show", "emit", "compile"):
        result = run(command, form)
        assert result.exit_code == 1 and OLD in result.stderr, command


def test_a_kernel_that_is_not_stored_is_said_to_be_absent(store: Store) -> None:
    absent = SPECS[0]
    for form in (absent.name, absent.digest, absent.digest[:8]):
        told = json.loads(run("cache", "explain", form, "--json").stdout)
        assert told["present"] is False
        assert json.loads(run("show", form, "--json").stdout)["stored"] is False


def test_a_kernel_of_other_templates_is_not_stored_and_what_differs_is_told(store: Store) -> None:
    other = SPECS[0]
    store.put(key_of(other.name, "older"), artifact(other.name, "older"))
    told = json.loads(run("cache", "explain", other.digest[:8], "--json").stdout)
    assert told["present"] is False
    assert [row["field"] for row in told["nearest"]] == ["source_digest"]
    assert json.loads(run("show", other.digest[:8], "--json").stdout)["stored"] is False


def test_a_file_whose_name_was_cut_is_the_kernel_that_it_is_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_FILE", 48)
    written = names.file(SPEC.name, "cu")
    assert len(written) <= 48 and written != f"{SPEC.name}.cu"
    assert kernels.named(f"folder/{written}") == SPEC


def test_a_configuration_is_asked_first_and_a_file_is_no_kernel(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: bf16, b: bf16, d: bf16}]\n"
        "    schedules: [{tile: [64, 64, 64], consumers: 1, swizzle_size: 7}]\n"
    )
    (own,) = expand_file(path).specs
    with pytest.raises(UnknownNameError):
        kernels.named(own.digest)
    assert kernels.named(own.digest, path) == own
    digits = tmp_path / own.digest[:8]
    digits.write_text(path.read_text())
    assert kernels.listed(digits) == [own] == kernels.listed(path)
