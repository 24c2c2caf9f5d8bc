"""New keys and values written into caches, on torch tensors."""
