"""The rendered text of configs/smoke.yaml is tracked, so that a template change shows as a diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom.generator.render import render
from warploom.generator.space import expand_file

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "emitted" / "golden"
SPECS = {spec.name: spec for spec in expand_file(ROOT / "configs" / "smoke.yaml").specs}


@pytest.mark.parametrize("name", SPECS)
def test_a_template_change_is_seen(name: str, update_golden: bool) -> None:
    file = GOLDEN / f"{name}.cu"
    if update_golden:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render(SPECS[name]))
    assert file.is_file(), "missing: pytest tests/golden --update-golden writes it"
    assert file.read_text() == render(SPECS[name])


def test_no_kernel_that_is_gone_stays_behind(update_golden: bool) -> None:
    extra = [file for file in sorted(GOLDEN.iterdir()) if file.stem not in SPECS]
    if update_golden:
        for file in extra:
            file.unlink()
    else:
        assert extra == []
