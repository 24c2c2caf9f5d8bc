"""torch's fp32 matmuls on tensor cores, as exact as torch's own: see `activate`."""

from __future__ import annotations

from warploom.integrations.fp32 import LEAST, PRECISIONS, Activation, activate, precision_of, takes

__all__ = ["LEAST", "PRECISIONS", "Activation", "activate", "precision_of", "takes"]
