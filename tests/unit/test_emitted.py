"""What kernels are told apart by, for records of GPU tests: tokens, lines, launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from same_kernels import families, samples

from emitted import code, described, form, grid, tokens, unseen
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

SAME = {
    "comments": ("a = b;  // c\n", "a = b; /* d\n e */"),
    "white space": ("a=b ;", "a\n  =\tb;"),
    "a directive's white space": ("#define  A   1 // one\n", "#define A 1\n"),
    "a directive's lines": ("#define A \\\n 1\n", "#define A 1\n"),
}
OTHER = {
    "an operator": ("a - - b", "a -- b"),
    "words": ("ab", "a b"),
    "a number": ("1 .5", "1.5"),
    "a text's white space": ('"a  b"', '"a b"'),
    "a text that looks like a comment": ('f("//", a);', 'f("//", b);'),
    "a directive's end": ("#define A\nb", "#define A b"),
    "a macro's parameters": ("#define A(b) 1\n", "#define A (b) 1\n"),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_comments_and_white_space_are_no_tokens(one: str, other: str) -> None:
    assert tokens(one) == tokens(other) != []


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_what_a_compiler_tells_apart_has_other_tokens(one: str, other: str) -> None:
    assert tokens(one) != tokens(other)


SAME_FORM = {
    "a variable": ("int a = 1; f(a);", "int b = 1; f(b);"),
    "a type": ("struct A { int a; }; const A b{};", "struct B { int a; }; const B b{};"),
    "a pointer": ("const float* a = p; a[1];", "const float* b = p; b[1];"),
    "a parameter of a template": ("template <typename A> A f();", "template <typename B> B f();"),
}
OTHER_FORM = {
    "a condition on a size": ("int a = i * kDim;", "int a = i * kDim + (kDim == 512 ? 8 : 0);"),
    "another rounding": ("int a = kDim / 8;", "int a = (kDim + 7) / 8;"),
    "which variable": ("int a, b = 1; int c = a;", "int a, b = 1; int c = b;"),
    "two variables as one": ("int a; int b; a = b;", "int a; int a; a = a;"),
    "another function of a header": ("a = fmaxf(a, b);", "a = fminf(a, b);"),
    "what is returned of it": ("return fmaxf(a, b);", "return fminf(a, b);"),
    "its type": ("const half a = b;", "const bfloat a = b;"),
    "its namespace": ("using namespace one; int a;", "using namespace other; int a;"),
    "a keyword": ("int a = 1;", "long a = 1;"),
    "a directive": ("#define A 1\nint a;", "#define B 1\nint a;"),
    "a text": ('asm("a");', 'asm("b");'),
    "a variable that hides one of a header": (
        "int a = 1; f(a, threadIdx.x);",
        "int threadIdx = 1; f(threadIdx, threadIdx.x);",
    ),
}


@pytest.mark.parametrize(("one", "other"), SAME_FORM.values(), ids=SAME_FORM)
def test_another_name_of_what_a_text_declares_is_the_same_form(one: str, other: str) -> None:
    assert tokens(one) != tokens(other) and form(tokens(one)) == form(tokens(other))


@pytest.mark.parametrize(("one", "other"), OTHER_FORM.values(), ids=OTHER_FORM)
def test_more_than_a_name_is_another_form(one: str, other: str) -> None:
    assert form(tokens(one)) != form(tokens(other))


def test_no_token_of_a_kernel_is_lost() -> None:
    for spec in samples()[::10]:
        text = render(spec)
        kept = "".join(tokens(text)).replace(" ", "")
        bare = "".join("".join(line.partition("//")[0].split()) for line in text.splitlines())
        assert kept == bare


def test_a_kernel_is_told_by_text_and_launches_and_not_by_its_name() -> None:
    spec = next(s for s in samples() if s.operation.family == "gemm" and s.schedule.stages == 4)
    text = render(spec)
    one = described(spec, text)
    renamed = described(spec, text.replace(spec.name, "other"))
    assert renamed | {"text": one["text"], "form": one["form"]} == one
    assert described(spec, text + "// more\n") == one
    assert described(spec, text + ";")["text"] != one["text"]
    fewer = KernelSpec(spec.arch, spec.operation, replace(spec.schedule, stages=3))
    assert described(fewer, text)["launches"] != one["launches"]


def test_kernels_of_every_family_are_its_samples_and_others_near_them() -> None:
    for name in families():
        specs = grid(name)
        own = [spec for spec in samples() if spec.operation.family == name]
        assert {spec.operation.family for spec in specs} == {name}
        assert specs[: len({*own})] == list(dict.fromkeys(own))
        times = 1 if len(own) <= 6 else 2  # of few samples with one knob there are few others
        assert len({spec.digest for spec in specs}) == len(specs) > times * len(own)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Templates of a family that is there, `gemm`, and of another that is its own."""
    files = {
        "gemm/kernel.cu.jinja": '{% include "shared/part.cuh" %}\nint a = {{ a }};  // why\nb();\n',
        "gemm/whole.cuh": "b();\nc();\n",
        "shared/part.cuh": "d();\n",
        "other/part.cuh": "e();\n",
    }
    for name, text in files.items():
        path = tmp_path / "templates" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("int a = 1;\nb();\nc();\nd();\n", []),
        (  # whole.cuh has no Jinja: it is in no kernel as a whole
            "int a = 1;\nc();\nd();\n",
            ["gemm/kernel.cu.jinja: b();", "gemm/whole.cuh: b();", "gemm/whole.cuh: c();"],
        ),
        ("int a = 1;\nb();\nd();\n", ["gemm/whole.cuh: b();", "gemm/whole.cuh: c();"]),
        ("b();\nc();\nd();\n", ["gemm/kernel.cu.jinja: int a = {{ a }};"]),
        ("int a = 1;\nb();\nc();\n", ["shared/part.cuh: d();"]),
    ],
)
def test_lines_of_templates_that_no_kernel_has_count_by_themselves(
    text: str, lines: list[str], root: Path
) -> None:
    assert unseen("gemm", {*code(text)}, root) == [f"templates/{line}" for line in lines]
