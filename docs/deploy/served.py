"""One GEMM and one attention of a Llama 3 8B layer, by kernels that came with the image."""

import torch

import warploom

x = torch.randn(512, 4096, device="cuda").bfloat16()
weight = torch.randn(6144, 4096, device="cuda").bfloat16()
print(warploom.explain(x, weight.t()))
print(warploom.gemm(x, weight.t()).shape)

q, k, v = (torch.randn(1, heads, 2048, 128, device="cuda").bfloat16() for heads in (32, 8, 8))
print(warploom.explain(q, k, v, causal=True))
print(warploom.attention(q, k, v, causal=True).shape)
print(warploom.counters)  # compiles=0
