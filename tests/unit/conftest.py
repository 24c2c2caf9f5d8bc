"""What the unit tests share: `attention_calls` and `samplers`, which are no tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
