# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: the sample or the whole matrix, and no trace in the user's caches."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the `full` matrix out unless `-m` speaks of it."""
    if "full" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def private_executable_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("executables")
        patch.setenv("FIRSTLIGHT_EXECUTABLE_CACHE", str(folder))
        yield folder
