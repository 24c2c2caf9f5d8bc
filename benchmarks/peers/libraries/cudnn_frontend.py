"""cuDNN's attention on e4m3, by its frontend for Python (`nvidia-cudnn-frontend`).

On Hopper its output is e4m3, too, and an operand has one scale.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from benchmarks.peers._attention_quantized import Bound, Quantized
from benchmarks.peers.libraries import imported

NAME = "cuDNN, e4m3"
_WEIGHTS = 256.0  # of e4m3's 448: what weights are multiplied by, as our kernels do
_OUTPUT = 64.0  # what the output is multiplied by: values up to 7 fit
_ONE = (1, 1, 1, 1)


@cache
def _handle() -> tuple[Any, Any]:
    """Its module, and a handle."""
    cudnn = imported("cuDNN", "cudnn")
    return cudnn, cudnn.create_handle()


def cudnn_8bit(one: Quantized) -> Bound:
    """Bind operands: a call writes the output in e4m3, which is converted to be checked."""
    cudnn, handle = _handle()
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    _on_this_stream(cudnn, handle)
    graph = cudnn.pygraph(
        io_data_type=e4m3,
        intermediate_data_type=fp32,
        compute_data_type=fp32,
        handle=handle,
    )
    given: dict[Any, torch.Tensor] = {}

    def described(name: str, tensor: torch.Tensor, kind: Any) -> Any:  # noqa: ANN401
        sizes, strides = list(tensor.shape), list(tensor.stride())
        found = graph.tensor(name=name, dim=sizes, stride=strides, data_type=kind)
        given[found] = tensor
        return found

    operands = {name: getattr(one, name) for name in ("q", "k", "v")}
    scales = {f"descale_{name}": getattr(one, f"{name}_descale")[:1, :1] for name in operands}
    scales |= {
        name: torch.full((1,), value, device=one.q.device)
        for name, value in (
            ("descale_s", 1 / _WEIGHTS),
            ("scale_s", _WEIGHTS),
            ("scale_o", _OUTPUT),
        )
    }
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        **{name: described(name, tensor, e4m3) for name, tensor in operands.items()},
        **{name: described(name, tensor.view(_ONE), fp32) for name, tensor in scales.items()},
        generate_stats=False,
        attn_scale=one.scale,
        use_causal_mask=one.causal,
        name="attention",
    )
    result = torch.empty_like(one.out, dtype=torch.float8_e4m3fn)
    out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
    given[out.set_data_type(e4m3)] = result
    for each in (amax_s, amax_o):
        each.set_output(True).set_dim(list(_ONE)).set_stride(list(_ONE)).set_data_type(fp32)
        given[each] = torch.empty(_ONE, device=one.q.device)
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except Exception as error:  # its own classes
        raise RuntimeError(f"cuDNN: {error}") from error
    room = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=one.q.device)

    def call() -> None:
        _on_this_stream(cudnn, handle)
        graph.execute(given, room, handle=handle)

    return Bound(call, lambda: result.float() / _OUTPUT, 2.0**-4, 2.0**-10 / _OUTPUT)


def _on_this_stream(cudnn: Any, handle: Any) -> None:  # noqa: ANN401
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
