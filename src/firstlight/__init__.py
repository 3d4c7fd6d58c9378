# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 [klein] image generation in JAX.

The names below are imported when first used, so that `import firstlight` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` calls so; importing that would cost more than all the rest
if TYPE_CHECKING:
    from typing import Any

    from firstlight.errors import (
        CheckpointError,
        ConfigError,
        DeviceError,
        FirstlightError,
        FirstlightWarning,
        OverloadedError,
        RequestError,
    )
    from firstlight.pipeline import Pipeline, Result

    __version__: str

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "FirstlightError",
    "FirstlightWarning",
    "OverloadedError",
    "Pipeline",
    "RequestError",
    "Result",
    "__version__",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("firstlight")
    elif name in __all__:
        home = "pipeline" if name in ("Pipeline", "Result") else "errors"
        value = getattr(importlib.import_module(f"firstlight.{home}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
