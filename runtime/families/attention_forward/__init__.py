"""Attention on torch tensors: the forward pass, and how autograd differentiates it."""
