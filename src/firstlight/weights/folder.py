# SPDX-License-Identifier: Apache-2.0
"""A model folder in diffusers' layout, checked as a whole before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from firstlight.errors import CheckpointError
from firstlight.models import variants
from firstlight.models.params import DType, as_dtype
from firstlight.models.specs import autoencoder, text_encoder, transformer
from firstlight.models.specs.fields import Fields
from firstlight.models.specs.scheduler import SchedulerConfig
from firstlight.weights import klein, klein_bfl
from firstlight.weights.component import Component, open_component, open_file, weight_files
from firstlight.weights.plan import Plan, plan
from firstlight.weights.quantised import bytes_by_dtype, find_quantised
from firstlight.weights.reader import short
from firstlight.weights.rules import Rule

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
"""What repositories of modular pipelines have instead."""

CONFIGS = {
    "scheduler": "scheduler/scheduler_config.json",
    "text_encoder": "text_encoder/config.json",
    "transformer": "transformer/config.json",
    "vae": "vae/config.json",
}
TOKENIZER = ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
REQUIRED = (INDEX, *CONFIGS.values(), *TOKENIZER)
"""Files that every model folder must have, besides its weights."""

STEMS = {
    "text_encoder": "model",
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
"""Names of the weight files of each component, without their endings."""

TEXT_ENCODER = "Qwen3ForCausalLM"
CLASSES = {
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "text_encoder": (TEXT_ENCODER,),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "transformer": ("Flux2Transformer2DModel",),
    "vae": ("AutoencoderKLFlux2",),
}
"""Classes that `model_index.json` may name."""

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A complete, consistent model on disk. `plans` read its weights; nothing is read yet."""

    path: Path
    name: str
    revision: str | None
    class_name: str
    dtype: DType
    is_distilled: bool
    max_sequence_length: int
    default_size: int
    transformer: transformer.TransformerConfig
    text_encoder: text_encoder.TextEncoderConfig
    vae: autoencoder.AutoencoderConfig
    scheduler: SchedulerConfig
    specs: Mapping[str, Any]
    plans: Mapping[str, Plan]
    tokenizer: Path
    stored_bytes: Mapping[str, Mapping[str, int]]
    """By component and dtype in the files: fp8 and nvfp4 are made whole while they are read."""

    @property
    def variant(self) -> variants.Variant:
        """Sampling defaults, from `is_distilled`."""
        return variants.variant(is_distilled=self.is_distilled)


@dataclass(frozen=True)
class _Index:
    """What `model_index.json` says. `out_layers` is None where it does not say it properly."""

    class_name: str
    is_distilled: bool
    max_sequence_length: int
    out_layers: tuple[int, ...] | None
    default_size: int


class _Faults(list[str]):
    """Collects the problems of steps that raise CheckpointError, so that later steps still run."""

    def attempt(self, step: Callable[[], Config]) -> Config | None:
        try:
            return step()
        except CheckpointError as error:
            self.extend(error.problems or (str(error),))
            return None


def missing_files(folder: Path) -> list[str]:
    """Files that a model folder must have and does not have, weight shards included."""
    names = list(REQUIRED)
    for component, stem in STEMS.items():
        try:
            names += [f"{component}/{file}" for file in weight_files(folder / component, stem)]
        except CheckpointError:
            continue  # an index that is there but damaged: `open_model` says so
    missing = [name for name in names if not (folder / name).is_file()]
    if (folder / MODULAR_INDEX).is_file():
        missing = [name for name in missing if name != INDEX]
    return missing


def open_model(
    path: str | Path,
    *,
    dtype: str,
    is_distilled: bool | None = None,
    name: str | None = None,
    revision: str | None = None,
    files: Mapping[str, Path] | None = None,
) -> ModelFolder:
    """Read every JSON file and weight header of the model in `path` and check that all fit.

    Args:
        dtype: the parameters' final dtype, `"bfloat16"` or `"float32"`.
        is_distilled: overrides `model_index.json`.
        name, revision: how the model is called in messages and metadata; the path by default.
        files: weights of components (`"transformer"`, `"vae"`, `"text_encoder"`) from elsewhere: a
            file in diffusers' or in Black Forest Labs' own layout, or a folder; `"tokenizer"`: a
            folder. Configurations still come from `path`.

    Raises:
        CheckpointError: lists every fault of every file. ConfigError: an unknown dtype.
    """
    path = Path(path)
    final_dtype = as_dtype(dtype)
    made = _Opening(path, final_dtype, dict(files or {}))
    if made.faults:
        raise CheckpointError(f"the model in {path} cannot be loaded", tuple(made.faults))
    index = made.index
    return ModelFolder(
        path=path,
        name=name or str(path),
        revision=revision,
        class_name=index.class_name,
        dtype=final_dtype,
        is_distilled=index.is_distilled if is_distilled is None else is_distilled,
        max_sequence_length=index.max_sequence_length,
        default_size=index.default_size,
        transformer=made.transformer,
        text_encoder=made.text_encoder,
        vae=made.vae,
        scheduler=made.scheduler,
        specs=made.specs,
        plans=made.plans,
        tokenizer=made.tokenizer,
        stored_bytes=made.stored,
    )


class _Opening:
    """The checks of `open_model`, in order. No attribute is None if there are no `faults`."""

    index: Any = None
    transformer: Any = None
    text_encoder: Any = None
    vae: Any = None
    scheduler: Any = None

    def __init__(self, path: Path, dtype: DType, files: dict[str, Path]) -> None:
        self.path = path
        self.files = files
        self.tokenizer = files.get("tokenizer", path / "tokenizer")
        self.stored: dict[str, dict[str, int]] = {}
        self.dtype: DType = dtype
        self.faults = _Faults()
        self.specs: dict[str, Any] = {}
        self.plans: dict[str, Plan] = {}
        if not path.is_dir():
            self.faults.append(f"{path} is {'not a folder' if path.exists() else 'not there'}")
            return
        if not any((path / name).exists() for name in (INDEX, MODULAR_INDEX, *CLASSES)):
            self.faults.append(f"{path} holds no model in diffusers' layout: {INDEX} is missing")
            return
        attempt = self.faults.attempt
        self.index = attempt(lambda: _read_index(path, self.faults))
        names = (self.tokenizer / Path(name).name for name in TOKENIZER)
        self.faults += [f"{short(name)} is missing" for name in names if not name.is_file()]
        self.transformer = attempt(
            lambda: transformer.TransformerConfig.from_json(self._json("transformer"))
        )
        self.text_encoder = attempt(self._text_encoder)
        self.vae = attempt(lambda: autoencoder.AutoencoderConfig.from_json(self._json("vae")))
        self.scheduler = attempt(lambda: SchedulerConfig.from_json(self._json("scheduler")))
        self._check_fit()
        self._plan()

    def _json(self, component: str) -> dict[str, Any]:
        return _read_json(self.path / CONFIGS[component])

    def _text_encoder(self) -> text_encoder.TextEncoderConfig | None:
        data = self._json("text_encoder")
        f = Fields(data, CONFIGS["text_encoder"])
        f.only("architectures", (TEXT_ENCODER,), default=(TEXT_ENCODER,))
        self.faults += f.problems
        out_layers = self.index.out_layers if self.index else None
        # Without them, all but the number of layers that are needed can be checked.
        config = text_encoder.TextEncoderConfig.from_json(data, out_layers or (0,))
        return config if out_layers else None

    def _check_fit(self) -> None:
        """The three networks must speak of the same widths."""
        tf, te, vae = self.transformer, self.text_encoder, self.vae
        if tf and te and te.output_width != tf.joint_attention_dim:
            self.faults.append(
                f"the text encoder does not fit the transformer: {len(te.out_layers)} taps x "
                f"hidden_size {te.hidden_size} = {te.output_width}; joint_attention_dim is "
                f"{tf.joint_attention_dim}"
            )
        if tf and vae and vae.token_channels != tf.in_channels:
            self.faults.append(
                f"the vae does not fit the transformer: 4 x latent_channels "
                f"{vae.latent_channels} = {vae.token_channels}; in_channels is {tf.in_channels}"
            )

    def _plan(self) -> None:
        tables = (
            ("text_encoder", text_encoder, klein.text_encoder_rules, klein.text_encoder_unread),
            ("transformer", transformer, klein.transformer_rules, lambda cfg: ()),
            (
                "vae", autoencoder, klein.autoencoder_rules,
                lambda cfg: klein.AUTOENCODER_UNREAD,
            ),
        )  # fmt: skip
        for component, module, rules, unread in tables:
            files = self._component(component)
            self.stored[component] = bytes_by_dtype(files)
            cfg = getattr(self, component)
            if cfg is None:
                self.faults += files.problems
                continue
            self.specs[component] = module.spec(cfg, self.dtype)
            table = _own_names(component, files) or rules
            made = plan(self.specs[component], table(cfg), files, unread(cfg))
            self.faults += made.problems
            self.plans[component] = made

    def _component(self, name: str) -> Component:
        where = self.files.get(name, self.path / name)
        single = name in self.files and not where.is_dir()
        made = open_file(where) if single else open_component(where, STEMS[name])
        find_quantised(made)
        return made


def _own_names(component: str, files: Component) -> Callable[[Any], list[Rule]] | None:
    """The table of Black Forest Labs' own names, if the file has them."""
    if component == "transformer" and klein_bfl.is_transformer(files.tensors):
        return klein_bfl.transformer_rules
    if component == "vae" and klein_bfl.is_autoencoder(files.tensors):
        return klein_bfl.autoencoder_rules
    return None


def _read_index(path: Path, faults: list[str]) -> _Index:
    """Faults of single keys go to `faults`; raises CheckpointError if there is no JSON object."""
    modular = (path / MODULAR_INDEX).is_file() and not (path / INDEX).is_file()
    file = MODULAR_INDEX if modular else INDEX
    f = Fields(_read_json(path / file), file)
    # Modular ones name blocks instead of a pipeline, and components by repository and folder.
    class_name = variants.PIPELINE_CLASSES[0] if modular else f.data.get("_class_name")
    if class_name not in variants.PIPELINE_CLASSES:
        f.fault(
            "_class_name", class_name, f"one of {', '.join(variants.PIPELINE_CLASSES)} is needed"
        )
    for component, allowed in CLASSES.items():
        named = f.data.get(component)
        if (
            component in f.data
            and not modular
            and not (isinstance(named, list) and len(named) == 2 and named[1] in allowed)
        ):
            f.fault(component, named, f"one of {', '.join(allowed)} is needed")
    others = len(f.problems)
    out_layers = f.integers("text_encoder_out_layers", variants.OUT_LAYERS, minimum=0)
    index = _Index(
        class_name=str(class_name),
        out_layers=out_layers if len(f.problems) == others else None,
        is_distilled=f.flag("is_distilled", class_name == variants.KV_PIPELINE),
        max_sequence_length=f.integer("max_sequence_length", variants.MAX_SEQUENCE_LENGTH),
        default_size=f.integer("default_size", variants.DEFAULT_SIZE),
    )
    faults += f.problems
    return index


def _read_json(path: Path) -> dict[str, Any]:
    where = path.name if path.name in (INDEX, MODULAR_INDEX) else short(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is no JSON object")
    return content
