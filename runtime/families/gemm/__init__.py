"""The product of two matrices and its epilogue, on torch tensors."""
