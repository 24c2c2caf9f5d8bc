"""How tests are shared among several processes (pytest-xdist): a plugin of pytest.

A test that ends its process, as one that hangs does after faulthandler_timeout, is run once. xdist
gave it to each process that took the place of the one before: 16 times a quarter of an hour.
"""

from __future__ import annotations

from typing import Any

import pytest

# Files whose programs are forked by a process that takes 15 s to load all that they import: one
# worker has them, and starts one.
SHELL = ("unit/test_guide.py", "unit/test_gpu_tests.py", "integrations/test_sharding.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401
    """Give one worker the files of SHELL, and otherwise one file, or one group, at a time."""
    from xdist.scheduler import LoadGroupScheduling, LoadScopeScheduling

    kinds: dict[str, Any] = {"loadscope": LoadScopeScheduling, "loadgroup": LoadGroupScheduling}
    how = config.getoption("dist")
    if how not in kinds:
        return None

    class Scheduling(kinds[how]):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "shell" if how == "loadscope" and scope.endswith(SHELL) else scope

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
