"""Problems that are drawn: the same everywhere, of the sizes that are meant, and all measurable."""

from __future__ import annotations

import pytest

from benchmarks.problems import BYTES, FLOPS, RESULT, products


def test_a_seed_draws_the_same_products_in_every_version_of_python() -> None:
    """Written down once: a judgement on other problems than those that were fitted must stay so."""
    assert ["x".join(map(str, shape)) for shape in products("gemm bf16", 16, 1, 6)] == [
        "8192x496x432",
        "2071x7680x6144",
        "6678x1024x1536",
        "11x3584x896",
        "256x1768x368",
        "31x24576x8192",
    ]


def test_seeds_and_types_have_problems_of_their_own() -> None:
    drawn = [set(products(*which)) for which in (("a", 16, 1), ("a", 16, 2), ("b", 16, 1))]
    assert [len(shapes) for shapes in drawn] == [60] * 3
    assert max(len(one & other) for one in drawn for other in drawn if one is not other) < 3


@pytest.mark.parametrize(("bits", "unit"), [(16, 8), (8, 16)])
def test_products_have_peers_and_fit_memory_and_time(bits: int, unit: int) -> None:
    shapes = [shape for seed in range(10) for shape in products("any", bits, seed)]
    for m, n, k in shapes:
        assert n % unit == 0 and k % unit == 0
        assert 2.0 * m * n * k <= FLOPS and m * n <= RESULT
        assert (m + n) * k * bits // 8 + 4 * m * n <= BYTES


def test_rows_are_of_every_size_and_often_round() -> None:
    rows = [m for seed in range(10) for m, _, _ in products("any", 16, seed)]
    assert {m.bit_length() for m in rows} >= set(range(1, 15))
    tidy = [m for m in rows if m % 64 == 0 or m & (m - 1) == 0]
    assert 0.3 < len(tidy) / len(rows) < 0.5


def test_weights_are_of_models_and_some_of_none() -> None:
    shapes = [shape for seed in range(10) for shape in products("any", 16, seed)]
    strange = [n for _, n, k in shapes if n % 64 and k % 64]
    assert 0.05 < len(strange) / len(shapes) < 0.3
    assert max(n for _, n, _ in shapes) > 100_000
    assert min(k for _, _, k in shapes) < 512 < 65_536 < max(k for _, _, k in shapes)
