"""How tests are shared among several processes (pytest-xdist): a plugin of pytest.

A test that ends its process, as one that hangs does after faulthandler_timeout, is run once. xdist
gave it to each process that took the place of the one before: 16 times a quarter of an hour.
"""

from __future__ import annotations

from typing import Any

import pytest

# Files that one worker has, since they share what takes long to make: a process of 15 s that has
# loaded all that programs import, and forks for each; and the texts of all sample kernels.
TOGETHER = {
    "unit/test_guide.py": "shell",
    "unit/test_gpu_tests.py": "shell",
    "integrations/test_sharding.py": "shell",
    "compile/test_smoke.py": "texts",
    "golden/test_golden.py": "texts",
    "golden/test_live.py": "texts",
    "golden/test_uncalled.py": "texts",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401
    """Give one worker what is in TOGETHER, and otherwise one file, or one group, at a time."""
    from xdist.scheduler import LoadGroupScheduling, LoadScopeScheduling

    kinds: dict[str, Any] = {"loadscope": LoadScopeScheduling, "loadgroup": LoadGroupScheduling}
    how = config.getoption("dist")
    if how not in kinds:
        return None

    class Scheduling(kinds[how]):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            file = "/".join(scope.split("/")[-2:])
            return TOGETHER.get(file, scope) if how == "loadscope" else scope

        def remove_node(self, node: object) -> str | None:
            """Count the test at which a process ended as done, and return it."""
            units = self.assigned_work.get(node, {}).values()
            for unit in units:
                for test, done in unit.items():
                    if not done:
                        unit[test] = True
                        super().remove_node(node)
                        return str(test)
            last: str | None = super().remove_node(node)
            return last

    return Scheduling(config, log)
