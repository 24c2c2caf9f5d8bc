"""Emitted kernels define only functions that they call."""

from __future__ import annotations

import pytest
from emitted_functions import uncalled
from goldens import texts


def test_kernels_call_what_they_define() -> None:
    assert {kernel: found for kernel, text in texts().items() if (found := uncalled(text))} == {}


KERNEL = """
struct Item {
  int first{0};
  __device__ __forceinline__ Item(int x) : first{x} { count(); }
  __device__ __forceinline__ int number() const { return whole() ? first : 0; }
  template <int kBy> __device__ __forceinline__ bool whole() const { return first == kBy; }
  __device__ __forceinline__ static void load() {}
  __device__ __forceinline__ int count() const { return own; }
  int own = start();  // not number()
  __device__ __forceinline__ int start() const { return 0; }
};
__device__ __forceinline__ void load(Item& item) { asm volatile("number(); {" ::); }
__device__ __forceinline__ int again(int x) { return x ? again(x - 1) : 0; }
__device__ constexpr int two() { return 2; }
extern "C" __global__ void kernel() { Item item(two()); USE; }
"""


@pytest.mark.parametrize(
    ("use", "names"),
    [
        ("", ["Item::number", "Item::whole", "Item::load", "load", "again"]),
        # What is called by a function that is called is, too; one that calls itself is not.
        ("item.number()", ["Item::load", "load", "again"]),
        ("item.whole<3>()", ["Item::number", "Item::load", "load", "again"]),
        # A member and a function of one name are two.
        ("load(item)", ["Item::number", "Item::whole", "Item::load", "again"]),
        ("Item::load()", ["Item::number", "Item::whole", "load", "again"]),
        ("again(item.number)", ["Item::number", "Item::whole", "Item::load", "load"]),
    ],
)
def test_what_is_not_called_is_found(use: str, names: list[str]) -> None:
    assert uncalled(KERNEL.replace("USE", use)) == names
