"""vLLM's fused layer of experts in Triton, where vllm is installed.

Its kernel reads the rows of each expert where the tokens are, in tiles that
`moe_align_block_size` lists, by the configuration that vLLM ships for the GPU and the sizes.
"""

from __future__ import annotations

import torch

from benchmarks.peers.libraries import imported, refusing

_MODULE = "vllm.model_executor.layers.fused_moe"


def _fused_moe(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """silu(gate) * up, with the arguments of `warploom.experts`; vLLM's ids are int32."""
    module = imported("vllm", _MODULE)
    found: torch.Tensor = module.fused_experts(hidden, gate_up, down, weights, ids.to(torch.int32))
    return found


fused_moe = refusing("vllm", _fused_moe)
