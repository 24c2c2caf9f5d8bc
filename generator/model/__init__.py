"""The cost model: seconds that a kernel should take, from its spec and shape, without a GPU.

The arithmetic is the families' own (`Family.seconds`); what a GPU kind is like lies in constants,
fitted from measurements (`fit.py`) and kept in configs/model, a file for each kind; a kind without
uses another's, rescaled (`borrow.py`). The model ranks
schedules of one problem and carries a measured time to a near shape; it is no promise of a time.
"""

from __future__ import annotations

from warploom.generator.model.borrow import load, rescaled
from warploom.generator.model.constants import Constants, shipped
from warploom.generator.model.predict import Prediction, predict, proposals, rank

__all__ = [
    "Constants",
    "Prediction",
    "load",
    "predict",
    "proposals",
    "rank",
    "rescaled",
    "shipped",
]
