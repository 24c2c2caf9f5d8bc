"""Every number against torch's stable sort, over pairs that no warp divides."""

from __future__ import annotations

import pytest
import route_cases as cases
import torch
from route_cases import KINDS, short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
EXTENTS = [(1, 1, 1), (1, 8, 128), (3, 3, 8), (129, 8, 60), (1000, 3, 1024), (4097, 8, 128)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_pair_has_its_row(kernel: KernelSpec, kind: str) -> None:
    for index, (tokens, k, experts) in enumerate(EXTENTS):
        first = (0, 7, -3)[index % 3]
        cases.made(kernel, cases.drawn(kind, tokens, k, experts) + first, experts, first).verify()


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_a_prompt_of_32768_tokens_is_routed(kernel: KernelSpec) -> None:
    for kind in ("uniform", "skewed"):
        cases.made(kernel, cases.drawn(kind, 32_768, 8, 128), 128).verify()


def test_ids_at_the_ends_of_their_type_are_skipped() -> None:
    for name in ("int64", "int32"):
        kernel = next(one for one in cases.EVERY if one.operation.ids == name)  # type: ignore[attr-defined]
        ids = cases.drawn("uniform", 40, 4, 8)
        dtype = getattr(torch, name)
        ids[0, 0], ids[1, 1] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        cases.made(kernel, ids, 8).verify()


@pytest.mark.parametrize("kernel", cases.SMOKE, ids=short)
def test_ids_of_any_strides_are_read(kernel: KernelSpec) -> None:
    ids = cases.drawn("skipping", 513, 4, 8)
    for view in (
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x * 0 - 9], -1)[..., 0],
        lambda x: torch.cat([x, x], 1)[:, 2:6],
        lambda x: x[:1].expand(513, 4),
    ):
        made = cases.made(kernel, ids, 8)
        made.call.ids = view(made.call.ids)
        made.verify()


def test_the_gpu_computes_what_the_reference_does() -> None:
    ids = cases.drawn("skipping", 700, 6, 33)
    for one, held in zip(
        *(warploom.route(one, 33, first_expert=0) for one in (ids, ids.cpu())), strict=True
    ):
        assert torch.equal(one.cpu(), held)
