"""Values in 8 bits with scales, on torch tensors."""
