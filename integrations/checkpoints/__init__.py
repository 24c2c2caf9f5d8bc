"""Whole checkpoints: quantized while they load, saved and loaded back, or read from others."""
