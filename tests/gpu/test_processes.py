"""What needs a process of its own: forks and stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gemm_arena as arena
import gemm_cases as cases
import pytest
from gemm_cases import SIMPLE
from processes import run

import warploom
from warploom.errors import KernelMissingError
from warploom.generator.specification import KernelSpec

pytestmark = pytest.mark.gpu

START = """
import json, os, sys, torch, warploom
from warploom.errors import DeviceError
name = sys.argv[1]
a = torch.ones(67, 64, device="cuda", dtype=torch.bfloat16)
b, out = torch.ones(64, 72, device="cuda", dtype=torch.bfloat16).t().contiguous().t(), None
"""
COUNT = (
    START
    + """
d = warploom.gemm(a, b, spec=name)
assert (d == 64).all()
print(json.dumps(warploom.counters.as_dict()))
"""
)
FORK = (
    START
    + """
half, out = a[:32], torch.zeros(67, 72, device="cuda", dtype=torch.bfloat16)
plan = warploom.plan(a, b, out=out, spec=name)
plan(a, b, out)
warploom.gemm(a, b, out=out, spec=name)
q = torch.ones(1, 2, 67, 64, device="cuda", dtype=torch.bfloat16)
warploom.attention(q, q, q)
torch.cuda.synchronize()
calls = {
    "a warm call": lambda: warploom.gemm(a, b, out=out, spec=name),
    "a new call": lambda: warploom.gemm(half, b, spec=name),
    "a plan": lambda: plan(a, b, out),
    "a warm attention": lambda: warploom.attention(q, q, q),
}
child = os.fork()
if child == 0:
    said = {}
    for what, call in calls.items():
        try:
            call()
        except BaseException as error:
            said[what] = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (plan(a, b, out) == 64).all()
"""
)


@pytest.fixture(scope="module", autouse=True)
def built(build: Callable[[list[KernelSpec]], object]) -> None:
    """The kernel that processes run."""
    build([SIMPLE["tma"]])


def run_python(code: str, **environment: str) -> dict[str, object]:
    """Run code with a kernel's name, and return the JSON that it prints."""
    done = run(sys.executable, "-c", code, SIMPLE["tma"].name, **environment)
    assert done.returncode == 0, done.stderr
    printed: dict[str, object] = json.loads(done.stdout)
    return printed


def test_a_second_process_compiles_nothing_even_where_it_must_not(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    first = run_python(COUNT, WARPLOOM_CACHE_DIR=store)
    assert (first["compiles"], first["store_hits"], first["loads"]) == (1, 0, 1)
    second = run_python(COUNT, WARPLOOM_CACHE_DIR=store, WARPLOOM_COMPILE="forbid")
    assert (second["compiles"], second["store_hits"], second["loads"]) == (0, 1, 1)
    assert second["copies"] == 0


def test_a_kernel_that_must_not_be_compiled_is_a_typed_error_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = arena.call(cases.spec((128, 64), swizzle_size=99), 257, 136, 193)
    counters = warploom.counters.as_dict()
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    with pytest.raises(KernelMissingError, match=made.spec.name):
        made.run()
    assert warploom.counters.as_dict() == counters
    monkeypatch.delenv("WARPLOOM_COMPILE")
    arena.verify(made)


def test_a_fork_after_cuda_was_used_is_told_so_before_the_driver_is() -> None:
    said = run_python(FORK)
    assert set(said) == {"a warm call", "a new call", "a plan", "a warm attention"}
    for message in said.values():
        assert str(message).startswith("DeviceError: a process forked after CUDA"), said
