"""Bytes as people write and read them: `500MB`, `2GiB`, `1.2 MB`."""

from __future__ import annotations

import re
from fractions import Fraction

import click

_WRITTEN = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?(?:([kmgt])(i)?)?b?", re.IGNORECASE)


class Bytes(int):
    """A number of bytes: with a unit in text, plain in JSON."""

    def __str__(self) -> str:
        from rich.filesize import decimal

        return decimal(self)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` names: alone, or in kB (1000), KiB (1024) and so on.

    A usage error for anything else.
    """
    if not (match := _WRITTEN.fullmatch(text.strip())):
        raise click.BadParameter(
            f"{text!r}: must be a number of bytes, alone or with a unit: 500MB, 2GiB"
        )
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    return int(Fraction(number) * (1024 if binary else 1000) ** power)
