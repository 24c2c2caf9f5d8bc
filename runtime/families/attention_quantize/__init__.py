"""Operands of attention in 8 bits, on torch tensors."""
