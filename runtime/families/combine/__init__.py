"""Between the order of tokens and that of experts, on torch tensors."""
