"""JSON that someone else may have written: read whole or refused, never hung on, whatever is in it.

Records, journals and results of benchmarks are read by calls and commands that a bad file must not
end: not a pipe without a writer, a device without an end, nor numbers or nesting without limit.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAXIMUM_BYTES = 64 << 20


def content(path: Path, limit: int = MAXIMUM_BYTES) -> bytes:
    """Return what a regular file of at most `limit` bytes holds; OSError for any other."""
    with open(path, "rb", opener=_opened) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("must be a regular file")
        found = file.read(limit + 1)
    if len(found) > limit:
        raise OSError(f"must have at most {limit >> 20} MB")
    return found


def _opened(path: str, flags: int) -> int:
    """Open without a wait, as for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse(text: bytes) -> Any:  # noqa: ANN401 (whatever JSON holds)
    """Return what UTF-8 JSON stands for; ValueError, with a short reason, for what is none."""
    try:
        return json.loads(text.decode())
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {text[error.start]:#04x} at {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("lists or mappings are nested too deep") from error
    except MemoryError as error:
        raise ValueError("too large for this machine's memory") from error
    except ValueError as error:  # Python converts no more digits
        raise ValueError("an integer has thousands of digits") from error


def reason(error: Exception) -> str:
    """What is wrong with a file, in the words of the error that it raised, without its path.

    Args:
        error: Of the file (OSError), or of what is in it: a KeyError is of a field that it lacks.

    Returns:
        The reason, which messages put after the path.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"no {error}" if isinstance(error, KeyError) else str(error)
