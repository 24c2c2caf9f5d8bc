"""Attention of few query rows over long caches of keys and values, on torch tensors."""
