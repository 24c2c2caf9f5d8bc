"""Tokens sorted by expert, on torch tensors."""
