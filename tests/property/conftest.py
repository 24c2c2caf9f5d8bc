"""What the property tests share: `strategies`, which is no test."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
