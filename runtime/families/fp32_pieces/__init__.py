"""16-bit pieces of fp32 matrices, on torch tensors."""
