"""Partial results of attention merged, on torch tensors."""
