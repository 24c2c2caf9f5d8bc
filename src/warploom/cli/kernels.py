"""Finding a kernel by what a person has of it: a name, a file of that name, or a digest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from warploom.errors import StoreError, UnknownNameError
from warploom.generator.specification import KernelSpec, parse_name

_DIGEST = re.compile(r"[0-9a-fA-F]{8,64}")


def named(written: str, path: Path | None = None) -> KernelSpec:
    """Return the kernel that `written` means, or raise UnknownNameError.

    That is a name; a path whose last part is one, with or without a suffix; or a digest, of 8
    digits or more, of a kernel of the configuration at `path`, the package's, or the store.
    """
    name = Path(written).name
    name = name.removesuffix(Path(name).suffix)
    if not _DIGEST.fullmatch(name):
        return parse_name(name)
    digest = name.lower()
    for spec in _known(path, digest):
        if spec.digest.startswith(digest):
            return spec
    where = f"{path}, " if path else ""
    raise UnknownNameError(
        f"digest {digest}",
        rule=f"must be that of a kernel of {where}the package's configurations or the store",
        fix="give the kernel's name, or with --in the configuration that it is of",
    )


def _known(path: Path | None, digest: str) -> Iterator[KernelSpec]:
    """Every kernel that a digest may be of, those that are soonest listed first."""
    from warploom.generator import configurations
    from warploom.generator.space import expand_file
    from warploom.generator.store import Store

    if path:
        yield from expand_file(path).specs
    with suppress(StoreError):  # which is no reason not to look elsewhere
        for name in Store.default().names():
            if name.endswith(digest[:8]):
                with suppress(UnknownNameError):  # of another version
                    yield parse_name(name)
    for shipped in configurations.every():
        yield from expand_file(shipped).specs
