"""D = epilogue(A W') on torch tensors, W a PackedWeight."""
