# SPDX-License-Identifier: Apache-2.0
"""Making a picture again from the settings stored in it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from firstlight.config import EngineConfig, PictureConfig
from firstlight.environment import differences
from firstlight.errors import FirstlightWarning, RequestError
from firstlight.image import read_metadata

# What a picture stores -> the setting that asks for it. The mesh is not among them: the devices
# of another machine may not be here, and a difference is only worth a warning.
SETTINGS = {
    "prompt": "prompt",
    "seed": "seed",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "negative_prompt": "negative_prompt",
    "vae_tiling": "vae_tiling",
    "time_shift": "time_shift",
    "width": "width",
    "height": "height",
    "max_sequence_length": "max_sequence_length",
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "is_distilled": "is_distilled",
    "images_per_device": "images_per_device",
}
# What a picture only names, by a digest or not at all.
_NOT_STORED = {
    "references": "reference pictures",
    "source": "another picture",
    "sigmas": "noise levels of its own",
    "prompt": "text states",
}
_OF_THE_MODEL = ("revision", "is_distilled", "max_sequence_length")
_ABSENT = "not recorded"


def settings_of(path: str, *, other_model: bool) -> dict[str, Any]:
    """Return the settings stored in a picture; with `other_model`, none that belong to its model.

    Raises `RequestError` if the picture carries none, or was not made from a seed.
    """
    metadata = read_metadata(path)
    if "seed" in metadata and metadata["seed"] is None:
        raise RequestError(
            f"{path} was made from starting noise given by its maker, not from a seed; "
            "it cannot be made again from its settings"
        )
    for key, what in _NOT_STORED.items():
        if key in metadata and (key != "prompt" or metadata[key] is None):
            raise RequestError(f"{path} was made from {what}, which it does not contain")
    return {
        name: metadata[key]
        for key, name in SETTINGS.items()
        if metadata.get(key) not in (None, "") and not (other_model and key in _OF_THE_MODEL)
    }


def warn_of_differences(
    path: str, made: Mapping[str, Any], engine: EngineConfig, picture: PictureConfig
) -> None:
    """Warn once, naming everything that differs from the picture but was not asked to differ."""
    stored = read_metadata(path)
    asked = {**vars(engine), **vars(picture)}
    wanted = {
        key
        for key, name in SETTINGS.items()
        if _plain(asked[name]) != ([stored.get(key)] if key == "prompt" else stored.get(key))
    }
    found = [
        f"{name} {before} then, {now} now"
        for name, before, now in differences(stored, _plain(dict(made)), absent=_ABSENT, joint=" ")
        if name not in wanted
    ]
    if found:
        warnings.warn(
            f"the picture may differ in some bits from {path}: {'; '.join(found)}",
            FirstlightWarning,
            stacklevel=2,
        )


def _plain(value: Any) -> Any:
    """Return `value` as it looks after a round trip through the picture's JSON."""
    return json.loads(json.dumps(value, default=str))
