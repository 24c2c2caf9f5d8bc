"""Both passes of attention, packed sequences, and the host's time of calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

import warploom
from benchmarks.peers.public import Cell

Made = tuple[Callable[[], object], float]
DYNAMIC = (  # a kernel whose blocks take tiles from a counter
    "attention_forward_sm90a_bf16_dim64_causal_fixed_128x64_stages2_overlap_pingpong_dynamic"
    "_85bd0cd3"
)


def _tensors(*extents: int) -> list[torch.Tensor]:
    return [torch.randn(*extents, device="cuda").bfloat16() for _ in range(3)]


def _forward(extents: tuple[int, ...], causal: bool) -> Made:
    q, k, v = _tensors(*extents)
    return partial(warploom.attention, q, k, v, causal=causal), 4 * q.nbytes


def _gradients(extents: tuple[int, ...], causal: bool) -> Made:
    given = [tensor.requires_grad_() for tensor in _tensors(*extents)]
    out = warploom.attention(*given, causal=causal)
    dout = torch.randn_like(out)
    call = partial(torch.autograd.grad, out, given, dout, retain_graph=True)
    return call, 8 * given[0].nbytes


def _biased(extents: tuple[int, ...], *, hidden: int = 0, gradients: bool = False) -> Made:
    """With a bias of every head, which hides the first rows of the sequences."""
    q, k, v = _tensors(*extents)
    _, heads, seq, _ = extents
    bias = torch.randn(1, heads, seq, seq, device="cuda").bfloat16()
    bias[:, :, :hidden] = -1e9
    if not gradients:
        return partial(warploom.attention, q, k, v, bias=bias), 4 * q.nbytes + bias.nbytes
    given = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = warploom.attention(*given, bias=bias)
    dout = torch.randn_like(out)
    call = partial(torch.autograd.grad, out, given, dout, retain_graph=True)
    return call, 8 * q.nbytes + bias.nbytes


def _packed(lengths: tuple[int, ...]) -> Made:
    q, k, v = _tensors(sum(lengths), 16, 128)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    longest = max(lengths)
    told = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    most = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return partial(warploom.attention, q, k, v, causal=True, **told, **most), 4 * q.nbytes


def _host(what: str) -> Made:
    q, k, v = _tensors(1, 8, 256, 64)
    trained = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    rows = _tensors(512, 8, 64)
    ends = torch.tensor([0, 200, 512], dtype=torch.int32, device="cuda")
    told = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    most = {"max_seqlen_q": 512, "max_seqlen_k": 512}
    calls: dict[str, Callable[[], object]] = {
        "attention": lambda: warploom.attention(q, k, v),
        "dynamic attention": lambda: warploom.attention(q, k, v, causal=True, spec=DYNAMIC),
        "attention, varlen": partial(warploom.attention, *rows, causal=True, **told, **most),
        "attention, autograd": lambda: warploom.attention(*trained),
        "attention, both passes": lambda: torch.autograd.grad(
            warploom.attention(*trained), trained, q
        ),
    }
    return calls[what], 0.0


def _squares() -> list[Cell]:
    found = []
    sizes = ((512, 4), (512, 32), (2048, 8), (8192, 2))
    for dim, (seq, batch), causal in product((64, 128, 256), sizes, (False, True)):
        extents = (batch, 2048 // dim, seq, dim)
        name = f"dim {dim} {batch}x{seq} {'causal' if causal else 'full'}"
        found.append(Cell(f"attention {name}", partial(_forward, extents, causal)))
        if seq == 2048:
            found.append(Cell(f"gradients {name}", partial(_gradients, extents, causal)))
    return found


def _biases() -> list[Cell]:
    found = []
    for dim in (64, 128, 256):
        extents = (8, 2048 // dim, 2048, dim)
        name = f"dim {dim} 8x2048 bias"
        found.append(Cell(f"attention {name}", partial(_biased, extents)))
        found.append(Cell(f"gradients {name}", partial(_biased, extents, gradients=True)))
    hidden = partial(_biased, (8, 16, 2048, 128), hidden=1024, gradients=True)
    return [*found, Cell("gradients dim 128 8x2048 bias, half of the rows hidden", hidden)]


CELLS = [
    *_squares(),
    *_biases(),
    *(
        Cell(f"attention packed of {len(lengths)}", partial(_packed, lengths))
        for lengths in ((300, 1700, 20, 4000, 900), (1024,) * 8)
    ),
    *(
        Cell(f"host {what}", partial(_host, what), host=True)
        for what in (
            *("attention", "dynamic attention", "attention, varlen"),
            *("attention, autograd", "attention, both passes"),
        )
    ),
]
