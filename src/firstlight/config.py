# SPDX-License-Identifier: Apache-2.0
"""Every setting a user may make, with its default, its help text and what is allowed.

The command line, the environment (FIRSTLIGHT_*) and YAML files all fill these classes, and the
reference pages in docs/ are written from them. Imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from firstlight.errors import ConfigError

MAX_SEED = 2**32 - 1
DEFAULT_NAME = "{prompt}-{seed}.png"


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What a setting may be: a test, and the words that complete "... is needed"."""

    test: Callable[[Any], bool]
    words: str


def whole_number(minimum: int, maximum: int | None = None) -> Allowed:
    """Allow integers from `minimum` to `maximum`, both included; True and False are none."""

    def test(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value >= minimum and (maximum is None or value <= maximum)

    upper = f" and at most {maximum}" if maximum is not None else ""
    return Allowed(test, f"a whole number of at least {minimum}{upper}")


def one_of(*names: str) -> Allowed:
    """Allow exactly these strings."""
    return Allowed(lambda value: value in names, " or ".join(repr(name) for name in names))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value >= 0


TEXT = Allowed(_is_text, "text that is not blank")
PATH = Allowed(lambda value: isinstance(value, (str, Path)) and bool(str(value)), "a path")
FLAG = Allowed(lambda value: isinstance(value, bool), "true or false")
FRACTION = Allowed(lambda value: _is_number(value) and value <= 1, "a number from 0 to 1")
NUMBER = Allowed(_is_number, "a finite number of at least 0")
NAMES = Allowed(_are_texts, "names of pictures (and a text), none of them blank,")
PROMPTS = Allowed(_are_texts, "a list of prompts, none of them blank,")


def setting(default: Any, allowed: Allowed, text: str, *, keyword: bool = True) -> Any:
    """Return a dataclass field that carries its own help text and what it may be."""
    metadata = {"help": text, "allowed": allowed}
    return dataclasses.field(default=default, kw_only=keyword, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the configuration classes: every field is checked when an object is made.

    Raises `ConfigError` naming the field, what was given and what is allowed. None means "not
    set" where it is the default.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            allowed: Allowed = field.metadata["allowed"]
            if not (value is None and field.default is None) and not allowed.test(value):
                raise ConfigError(f"{field.name} is {value!r}; {allowed.words} is needed")


COMPONENT_FILES = ("transformer", "vae", "text_encoder", "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Which model, and how its files are found and read."""

    model: str = setting(
        "demo",
        TEXT,
        "The model: `demo` (packaged), klein-4b, klein-9b, klein-base-4b, klein-base-9b, "
        "klein-9b-kv, a repository on the Hugging Face hub, or a folder.",
        keyword=False,
    )
    revision: str | None = setting(
        None, TEXT, "Branch, tag or commit of the repository. Default: its main branch."
    )
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16",
        one_of("bfloat16", "float32"),
        "Precision of weights and arithmetic; float32 is slower and closest to the reference.",
    )
    is_distilled: bool | None = setting(
        None,
        FLAG,
        "Treat the model as distilled (4 steps, no guidance) or not (50 steps, guidance 4). "
        "Default: what its model_index.json says.",
    )
    offline: bool = setting(False, FLAG, "Never open a connection; use files already here.")
    cache_dir: Path | None = setting(  # noqa: RUF009
        None, PATH, "Where downloaded models are kept. Default: the hub's own cache."
    )

    transformer: Path | None = setting(  # noqa: RUF009
        None,
        PATH,
        "Take the transformer's weights from this safetensors file (diffusers' names or Black "
        "Forest Labs' own, fp8 and nvfp4 included) or folder.",
    )
    vae: Path | None = setting(  # noqa: RUF009
        None, PATH, "Take the autoencoder's weights from this file or folder."
    )
    text_encoder: Path | None = setting(  # noqa: RUF009
        None, PATH, "Take the text encoder's weights from this file or folder."
    )
    tokenizer: Path | None = setting(None, PATH, "Take the tokenizer from this folder.")  # noqa: RUF009

    @property
    def files(self) -> dict[str, Path | None]:
        """Components that come from elsewhere than the model, by name."""
        return {name: getattr(self, name) for name in COMPONENT_FILES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelConfig):
    """The model that runs, and how it lies on the devices."""

    images_per_device: int = setting(
        1,
        whole_number(1),
        "Pictures made at a time on each device. Pictures are equal bit for bit only between "
        "runs with the same value.",
    )
    mesh: str | None = setting(
        None,
        TEXT,
        "Devices to use: data=N,model=M splits the batch over N and the weights over M. "
        "Default: one device.",
    )
    executable_cache: str | None = setting(
        None,
        TEXT,
        "Folder of compiled programs, kept for the next start, or off. Default: "
        "firstlight/executables in the user's cache folder.",
    )
    offload: Literal["text_encoder"] | None = setting(
        None,
        one_of("text_encoder"),
        "Free the text encoder's memory after encoding; it is read again for the next prompt. "
        "Default: where the parameters do not fit in memory.",
    )
    vae_tiling: bool | None = setting(
        None,
        FLAG,
        "Decode large pictures in overlapping tiles: less memory, a slightly different picture. "
        "Default: where decoding would take more than 6 GiB.",
    )
    staging_bytes: int = setting(
        1 << 30,
        whole_number(1 << 20),
        "Host memory for weights on their way to an accelerator, in bytes.",
    )


# What is given without a flag comes first among the fields, so first among the bases' fields.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompts(Settings):
    """What is drawn."""

    prompt: tuple[str, ...] = setting(
        (), PROMPTS, "What to draw. Several prompts are drawn as one batch.", keyword=False
    )
    prompt_file: Path | None = setting(  # noqa: RUF009
        None,
        PATH,
        "Read prompts from this text file, one a line. Blank lines and lines that begin with # "
        "are skipped. Not together with prompts.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs(Settings):
    """What is edited."""

    inputs: tuple[str, ...] = setting(
        (),
        NAMES,
        "One or more pictures, in order, and what to do with them: the last one is the text.",
        keyword=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureConfig(Settings):
    """What every picture is drawn with, and where it is saved."""

    output: str = setting(
        DEFAULT_NAME,
        TEXT,
        "File name of the pictures, ending in .png, .webp (without loss) or .jpg; {prompt} "
        "(shortened), {seed} and {index} (position in the run, from 0) may stand in it. A name "
        "already taken gets -1, -2, ... appended. A folder keeps the default name inside that "
        "folder.",
    )
    overwrite: bool = setting(False, FLAG, "Replace files that exist.")
    compression: int = setting(
        1, whole_number(0, 9), "Effort of PNG compression: 0 is none, 9 the smallest files."
    )
    width: int | None = setting(None, whole_number(1), "Pixels. Default: the model's own size.")
    height: int | None = setting(None, whole_number(1), "Pixels. Default: the model's own size.")
    steps: int | None = setting(
        None, whole_number(1), "Denoising steps. Default: 4 if the model is distilled, else 50."
    )
    guidance: float | None = setting(
        None, NUMBER, "How strongly the prompt binds; models that are distilled ignore it."
    )
    negative_prompt: str | None = setting(
        None, TEXT, "What to steer away from; needs a base model (guidance above 1)."
    )
    time_shift: Literal["reference", "constant"] = setting(
        "reference",
        one_of("reference", "constant"),
        "Schedule: the reference's, which depends on the size and jumps at 4300 tokens (about "
        "1049x1049 pixels), or the same for all sizes.",
    )
    seed: int | None = setting(
        None,
        whole_number(0, MAX_SEED),
        "Starting noise; picture i of a run uses seed + i. Default: a random one, printed.",
    )
    num_images: int = setting(1, whole_number(1), "Pictures of each prompt.")
    max_sequence_length: int | None = setting(
        None, whole_number(1), "Prompt tokens that are read. Default: the model's own limit."
    )
    repeat: int = setting(
        1, whole_number(1), "Make the same pictures this many times and report each time taken."
    )
    preview: Path | None = setting(  # noqa: RUF009
        None,
        PATH,
        "Write a small picture of what is being drawn to this folder after every step: "
        "PICTURE-STEP.png, both from 0.",
    )
    profile: Path | None = setting(  # noqa: RUF009
        None, PATH, "Write a JAX profiler trace of the drawing (not the loading) to this folder."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(PictureConfig, _Prompts):
    """What is drawn, how, and where it is saved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditConfig(PictureConfig, _Inputs):
    """What is edited, how, and where it is saved."""

    mask: Path | None = setting(  # noqa: RUF009
        None,
        PATH,
        "Repaint the (only) picture where this one is white and keep it where it is black.",
    )
    strength: float | None = setting(
        None,
        FRACTION,
        "How far the picture is taken back into noise, 0 to 1: with a mask 0.8, else not at all "
        "(it is a reference).",
    )
    padding_mask_crop: int | None = setting(
        None,
        whole_number(0),
        "Work on the masked part with this many pixels around it, enlarged, and paste it back.",
    )
    reference: tuple[str, ...] = setting(
        (), NAMES, "Further pictures to go by, with --mask or --strength."
    )
    paste_back: bool = setting(
        True, FLAG, "Keep pixels bit for bit where the mask is black, at sharp edges."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """What is told on the terminal."""

    json: bool = setting(False, FLAG, "Print one JSON document instead of lines.")
    quiet: bool = setting(False, FLAG, "Tell nothing but results and errors.")
    verbose: bool = setting(
        False, FLAG, "Tell more: every step and where the time went; of a model, every parameter."
    )
    debug: bool = setting(False, FLAG, "Show the traceback of an error.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quiet and self.verbose:
            raise ConfigError("quiet and verbose exclude each other; give one of them")


CONFIGS = (EngineConfig, GenerateConfig, EditConfig, ReportConfig)

OTHER_VARIABLES = {
    "FIRSTLIGHT_EXECUTABLE_CACHE_BYTES": "The most that the folder of compiled programs may hold; "
    "what was used longest ago is removed. Default: 10 GiB.",
}
"""Environment variables that are no setting of the command line."""


def check_keys(given: Iterable[object], allowed: Iterable[str], source: str) -> None:
    """Raise `ConfigError` for the first key that is no setting, naming the nearest one that is."""
    names = sorted(allowed)
    for key in given:
        name = str(key).replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(names)}"
            raise ConfigError(f"{source}: unknown setting {key!r}; {hint}")
