"""Whatever ran before: a call has the bits, the gradients and the errors that it has alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("warm_like_cold.py")


def test_a_call_answers_as_in_a_process_of_its_own() -> None:
    command = [sys.executable, str(SCRIPT), "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
