# SPDX-License-Identifier: Apache-2.0
"""The klein family by name, and the defaults that follow from being distilled or not."""

from __future__ import annotations

from dataclasses import dataclass

ALIASES: dict[str, str] = {
    "klein-4b": "black-forest-labs/FLUX.2-klein-4B",
    "klein-9b": "black-forest-labs/FLUX.2-klein-9B",
    "klein-base-4b": "black-forest-labs/FLUX.2-klein-base-4B",
    "klein-base-9b": "black-forest-labs/FLUX.2-klein-base-9B",
    "klein-9b-kv": "black-forest-labs/FLUX.2-klein-9b-kv",
}
"""Short names and their repositories on the Hugging Face hub. `demo` is the packaged model."""

PIPELINE_CLASSES = ("Flux2KleinPipeline", "Flux2KleinKVPipeline", "Flux2KleinInpaintPipeline")
"""`_class_name` values of `model_index.json` that describe a klein model."""

KV_PIPELINE = "Flux2KleinKVPipeline"

MAX_SEQUENCE_LENGTH = 512
OUT_LAYERS = (9, 18, 27)
DEFAULT_SIZE = 1024
"""Used where `model_index.json` does not carry the key of the same name."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Sampling defaults. Distilled models make one pass per step and have no guidance."""

    is_distilled: bool
    num_inference_steps: int
    guidance_scale: float


DISTILLED = Variant(is_distilled=True, num_inference_steps=4, guidance_scale=1.0)
BASE = Variant(is_distilled=False, num_inference_steps=50, guidance_scale=4.0)


def variant(*, is_distilled: bool) -> Variant:
    return DISTILLED if is_distilled else BASE
