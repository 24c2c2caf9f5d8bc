"""The gradient of an activation, and that of the bias before it, on torch tensors."""
