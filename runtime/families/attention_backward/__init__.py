"""The gradients of an attention on torch tensors."""
