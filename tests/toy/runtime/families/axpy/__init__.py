"""d = alpha x + y on torch tensors."""
