"""What other libraries read of a quantised weight is what was packed for them."""

from __future__ import annotations

import pytest
import torch
from mixed_stand_in import as_packed, random_codes

from benchmarks.peers._mixed_codes import Codes, codes_of, words
from benchmarks.peers._mixed_problem import KINDS
from benchmarks.peers.libraries.humming import humming_tensors
from benchmarks.peers.libraries.machete import machete_words
from benchmarks.peers.libraries.marlin import marlin_scales, marlin_words, marlin_zeros
from benchmarks.peers.libraries.torch_kernels import offsets_of, packed_bytes

N, K = 192, 256


def fields(word: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """The numbers in words, from the lowest bits up."""
    return [word >> at & (1 << bits) - 1 for at in range(0, 32, bits)]


def held_by_warps(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, k] as the threads of a warp get them for operand B of mma.m16n8k16.

    A thread has, for each of four tiles of 16 x 16, two pairs of k for column lane / 4 and two for
    the column 8 further. Of 4 bits a pair is 16 bits apart in one word; of 8 bits a word has a
    column's two pairs, one pair's numbers 16 bits apart.
    """
    found = torch.full((N, K), -1, dtype=torch.int32)
    per_tile = bits // 4  # words of a thread
    table = tensor.view(K // 16, N // 64, 32, 4, per_tile)
    for lane in range(32):
        for tile in range(4):
            parts = [fields(table[:, :, lane, tile, word], bits) for word in range(per_tile)]
            for half in (0, 1):
                for high in (0, 1):
                    pair = high + (2 * half if bits == 4 else 0)
                    own = parts[0 if bits == 4 else half]
                    for element in (0, 1):
                        n = 16 * tile + 8 * half + lane // 4
                        k = 8 * high + 2 * (lane % 4) + element
                        at = pair + element * 16 // bits
                        found[n::64, k::16] = own[at].t()
    return found


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "mxfp4", "w4a16_zeros"])
def test_a_warp_of_marlin_gets_its_fragments(kind: str) -> None:
    codes = random_codes(KINDS[kind], N, K)
    packed = marlin_words(codes)
    assert packed.shape == (K // 16, N * codes.bits // 2)
    assert torch.equal(held_by_warps(packed, codes.bits), codes.codes.int())


def test_a_thread_of_marlin_finds_its_scales_and_zeros_side_by_side() -> None:
    codes = random_codes(KINDS["w4a16_zeros"], N, K)
    codes = Codes("uint4", codes.codes, codes.scales, codes.zeros.clamp(max=15))  # type: ignore[union-attr]
    scales, zeros = marlin_scales(codes), marlin_zeros(codes)
    assert zeros is not None and codes.zeros is not None and zeros.shape == (K // 128, N // 8)
    for column in range(8):  # lane / 4
        beside = slice(column, 64, 8)  # its columns of eight fragments
        ordered = scales.view(-1, 64)[:, 8 * column : 8 * column + 8]
        assert torch.equal(ordered, codes.scales.t().reshape(-1, 64)[:, beside])
        own = torch.stack(fields(zeros.reshape(-1, 8)[:, column], 4), 1)
        pairs = own[:, [0, 4, 1, 5, 2, 6, 3, 7]]  # a pair is 16 bits apart
        assert torch.equal(pairs, codes.zeros.t().reshape(-1, 64)[:, beside].int())


def test_a_thread_of_marlin_finds_the_scales_of_its_results() -> None:
    codes = random_codes(KINDS["w8a16"], N, K)
    found = marlin_scales(codes).float() * 2.0**-120
    for thread in range(4):  # lane % 4: columns 2 thread and the next, of four fragments
        own = [8 * j + 2 * thread + i for j in range(4) for i in (0, 1)]
        ordered = found.view(-1, 32)[:, 8 * thread : 8 * thread + 8]
        assert torch.equal(ordered, codes.scales.float().t().reshape(-1, 32)[:, own])


def test_exponents_of_marlin_lie_as_its_four_byte_conversion_takes_them() -> None:
    codes = random_codes(KINDS["mxfp4"], N, K)
    found = marlin_scales(codes)
    assert found.shape == (K // 32, N) and found.dtype == torch.uint8
    plain = marlin_scales(Codes("int4", codes.codes, codes.scales))
    assert torch.equal(found.view(-1, 4)[:, [0, 2, 1, 3]], plain.view(-1, 4))


def test_machete_takes_codes_along_k_column_by_column() -> None:
    codes = random_codes(KINDS["w4a16"], N, K)
    packed = machete_words(codes)
    assert packed.shape == (K // 8, N) and packed.stride() == (1, K // 8)
    assert torch.equal(torch.stack(fields(packed, 4), 1).reshape(K, N), codes.codes.t().int())


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "mxfp4", "w4a16_zeros"])
def test_humming_takes_codes_along_k_and_zeros_along_n(kind: str) -> None:
    codes = random_codes(KINDS[kind], N, K)
    if codes.zeros is not None:
        codes = Codes(codes.format, codes.codes, codes.scales, codes.zeros.clamp(max=15))
    found = humming_tensors(codes)
    read = torch.stack(fields(found["weight"], codes.bits), 2).view(N, K)
    assert torch.equal(read, codes.codes.int())
    assert found["weight_scale"].shape == (N, K // codes.group)
    if kind == "mxfp4":  # torch reads the same powers of two
        assert torch.equal(found["weight_scale"].double(), codes.factors())
    if codes.zeros is not None:
        packed = found["zero_point"]
        assert packed.shape == (N // 8, K // 128)
        read = torch.stack(fields(packed, 4), 1).view(N, -1)
        assert torch.equal(read, codes.zeros.int())


@pytest.mark.parametrize("packing", [marlin_zeros, humming_tensors])
def test_a_zero_point_that_does_not_fit_is_refused(packing: object) -> None:
    codes = random_codes(KINDS["w4a16_zeros"], N, K)
    assert codes.zeros is not None and int(codes.zeros.max()) == 16
    with pytest.raises(ValueError, match="16 does not fit"):
        packing(codes)  # type: ignore[operator]


def test_torch_reads_the_same_weight() -> None:
    codes = random_codes(KINDS["w4a16_zeros"], N, K)
    pairs = packed_bytes(codes)
    read = torch.stack((pairs >> 4, pairs & 15), 2).view(N, K)
    offsets = offsets_of(codes)
    grouped = (read.double() - 8).view(N, -1, 128) * codes.factors()[..., None]
    weight = (grouped + offsets.double()[..., None]).view(N, K)
    assert float((weight - codes.weight()).abs().max()) <= 2**-8 * float(offsets.abs().max())


# ---- What numbers stand for ----------------------------------------------------------------------


def test_numbers_stand_for_what_their_formats_say() -> None:
    def weight(name: str, code: int, scale: float, zero: int | None = None) -> float:
        scales = torch.tensor([[scale]])
        scales = scales.to(torch.uint8) if name == "mxfp4" else scales.bfloat16()
        zeros = None if zero is None else torch.tensor([[zero]], dtype=torch.uint8)
        return float(Codes(name, torch.tensor([[code]], dtype=torch.uint8), scales, zeros).weight())

    assert weight("int4", 0, 0.5) == -4 and weight("int4", 15, 0.5) == 3.5
    assert weight("uint4", 3, 0.5, 16) == -6.5 and weight("uint4", 15, -2.0, 0) == -30
    assert weight("e4m3", 0x7E, 2.0) == 896 and weight("e4m3", 0x81, 1.0) == -(2.0**-9)
    assert weight("mxfp4", 0b0111, 130) == 48 and weight("mxfp4", 0b1001, 0) == -(2.0**-128)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_gives_its_numbers(kind: str) -> None:
    codes = random_codes(KINDS[kind], N, K)
    found = codes_of(as_packed(codes, KINDS[kind]))
    assert (found.format, found.group, found.bits) == (codes.format, codes.group, codes.bits)
    assert torch.equal(found.codes, codes.codes) and torch.equal(found.scales, codes.scales)
    assert torch.equal(found.weight(), codes.weight())


def test_words_have_the_first_number_lowest() -> None:
    assert words(torch.arange(8, dtype=torch.uint8), 4).tolist() == [0x76543210]
    assert words(torch.arange(4, dtype=torch.uint8), 8).tolist() == [0x03020100]
