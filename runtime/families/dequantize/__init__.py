"""Dense 16-bit weights of quantized ones, on torch tensors."""
