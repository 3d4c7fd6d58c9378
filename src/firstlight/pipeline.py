# SPDX-License-Identifier: Apache-2.0
"""The public pipeline: from a model's name to pictures. Holds all the package's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from PIL import Image

from firstlight import environment
from firstlight.compile import Compiler, Executable
from firstlight.engine import Clock, Engine, Picture, Weights
from firstlight.errors import ConfigError, FirstlightError, RequestError
from firstlight.executable_cache import ExecutableCache
from firstlight.models.params import DATA, MODEL, as_dtype
from firstlight.programs import Architecture, Programs
from firstlight.progress import Progress, silent
from firstlight.request import Limits, Request, complete
from firstlight.sharding import make_mesh, param_shardings, parse_mesh
from firstlight.tokenizer import Tokenizer
from firstlight.weights.folder import ModelFolder, open_model
from firstlight.weights.hub import resolve
from firstlight.weights.place import Counter, place

UNBUILT = (
    "image",
    "image_reference",
    "mask_image",
    "padding_mask_crop",
    "strength",
    "negative_prompt",
    "prompt_embeds",
    "negative_prompt_embeds",
    "sigmas",
    "callback_on_step_end",
)
"""Arguments of a call that are named already and raise until they do something."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a call made, in the order prompt 0 image 0, prompt 0 image 1, prompt 1 image 0, ...

    `images` is a list of PIL images ("pil"), or one array: (B, H, W, 3) float32 in [0, 1] ("np"),
    or (B, C, 2H/m, 2W/m) float32 latents, denormalised and unpatchified ("latent"). `metadata`
    has one JSON-able mapping per picture, which makes the picture again; `timings` are seconds.
    """

    images: Any
    seeds: list[int]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    timings: dict[str, float]


class Pipeline:
    """A loaded klein model. Make one with `from_pretrained`, then call it any number of times."""

    def __init__(
        self, model: ModelFolder, engine: Engine, progress: Progress, timings: dict[str, float]
    ) -> None:
        self.model = model
        self.load_timings = timings
        self._engine = engine
        self._progress = progress

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "demo",
        *,
        dtype: str = "bfloat16",
        mesh: str | Mesh | None = None,
        fsdp: bool = False,
        images_per_device: int = 1,
        revision: str | None = None,
        offline: bool = False,
        cache_dir: str | Path | None = None,
        is_distilled: bool | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        executable_cache: bool = True,
        progress: Progress = silent,
        transformer: Any = None,
        vae: Any = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        bundle: Any = None,
        offload: Any = None,
    ) -> Pipeline:
        """Load `model` and compile its programs at the same time; return when both are done.

        Args:
            model: `"demo"` (packaged), an alias (`"klein-4b"`, ...), a hub id, or a folder in
                diffusers' layout.
            dtype: `"bfloat16"`, or `"float32"` (everything float32 at the highest precision).
            mesh: `"data=2,model=4"`, or a mesh of these two axes; one device by default.
            images_per_device: pictures that one device makes in one call. Bits of a picture are
                the same for any batch as long as this is.
            revision, offline, cache_dir: as in huggingface_hub; offline opens no socket.
            is_distilled: overrides what `model_index.json` says.
            sizes: (height, width) pairs to compile for now; the model's default size if None.
                Other sizes are compiled when first asked for.
            executable_cache: keep compiled programs on disk for the next start.
            progress: called as `progress(stage, done, total)` from any thread.

        Raises:
            ConfigError: a setting is not usable. CheckpointError: the model's files are not;
                all their faults are listed, before any weight is read. RequestError: a size.
        """
        later = dict(
            fsdp=fsdp or None, transformer=transformer, vae=vae, text_encoder=text_encoder,
            tokenizer=tokenizer, bundle=bundle, offload=offload,
        )  # fmt: skip
        _refuse_unbuilt(later, ConfigError)
        clock = Clock()
        as_dtype(dtype)  # before anything is downloaded
        mesh = _mesh(mesh)
        batch = mesh.shape[DATA] * _positive("images_per_device", images_per_device)
        folder = _find(str(model), revision, offline, cache_dir, dtype, is_distilled, progress)
        programs = Programs(_architecture(folder), mesh, batch)
        clock.lap("resolve")
        compiler = Compiler(mesh, ExecutableCache.open() if executable_cache else None)
        try:
            compiling = _start_compiling(folder, programs, compiler, sizes)
            progress("compile", 0, len(compiling))
            reader = Tokenizer.from_folder(folder.tokenizer, folder.text_encoder.vocab_size)
            weights = _load(folder, mesh, progress)
            clock.lap("load")
            for done, future in enumerate(as_completed(compiling), 1):
                future.result()
                progress("compile", done, len(compiling))
            clock.lap("compile_wait")
        except BaseException:
            compiler.close()
            raise
        engine = Engine(
            programs=programs,
            compiler=compiler,
            scheduler=folder.scheduler,
            tokenizer=reader,
            weights=weights,
        )
        return cls(folder, engine, progress, clock.seconds)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        image: Any = None,
        image_reference: Any = None,
        mask_image: Any = None,
        padding_mask_crop: Any = None,
        strength: Any = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: Any = None,
        num_images_per_prompt: int = 1,
        seed: int | Sequence[int] | None = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        sigmas: Any = None,
        max_sequence_length: int | None = None,
        output_type: str = "pil",
        callback_on_step_end: Any = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> Result:
        """Make pictures. Arguments are named as in diffusers; defaults follow the model.

        Args:
            prompt: a text, or a list of texts that make one batch.
            height, width: pixels, multiples of the model's `pixel_multiple` (16 for klein).
            num_inference_steps: 4 for distilled models by default.
            num_images_per_prompt: pictures of each prompt.
            seed: picture i uses seed + i (0 to 2^32 - 1); a list gives one seed per picture;
                random if None, and reported.
            latents: starting noise (pictures, 4C, H/m, W/m) float32 instead of seeds.
            max_sequence_length: tokens of text, the chat text's own included.
            output_type: "pil", "np" or "latent" (see `Result`).

        Raises:
            RequestError: an argument is not usable, or not built yet. DeviceError: the values
                are not finite (no picture is made).
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return _merged(list(self.stream(**arguments)), output_type)

    def stream(
        self, prompt: str | Sequence[str] | None = None, **arguments: Any
    ) -> Iterator[Result]:
        """Like a call, with the same arguments, but yields each picture as soon as it is made.

        Every `Result` holds one picture, and the seconds since the one before it. Arguments are
        checked now, not at the first picture.
        """
        _refuse_unbuilt({name: arguments.pop(name, None) for name in UNBUILT}, RequestError)
        # The tensors a callback asks for mean nothing without the callback.
        arguments.pop("callback_on_step_end_tensor_inputs", None)
        request = complete(self.limits, prompt=prompt, **arguments)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Result]:
        clock = Clock()
        for picture in self._engine.run(request, self._progress, clock):
            seconds, clock.seconds = clock.seconds, {}
            yield Result(
                images=_images([picture.array], request.output_type),
                seeds=[picture.seed],
                prompts=[picture.prompt],
                metadata=[self._metadata(request, picture)],
                timings=dict(seconds, total=sum(seconds.values())),
            )

    @property
    def limits(self) -> Limits:
        """Sizes, defaults and text length that the loaded model implies."""
        return _limits(self.model)

    @property
    def programs_compiled(self) -> int:
        """Programs compiled by this pipeline so far (those taken from disk do not count)."""
        return self._engine.compiler.compiled

    def _metadata(self, request: Request, picture: Picture) -> dict[str, Any]:
        programs = self._engine.programs
        device = programs.mesh.devices.flat[0]
        data, model = programs.mesh.devices.shape
        return {
            "prompt": picture.prompt,
            "seed": picture.seed if request.latents is None else None,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "height": request.height,
            "width": request.width,
            "max_sequence_length": request.max_sequence_length,
            "model": self.model.name,
            "revision": self.model.revision,
            "dtype": self.model.dtype,
            "is_distilled": self.model.is_distilled,
            "images_per_device": programs.batch // data,
            "versions": environment.versions(),
            "device_kind": environment.device_kind(device),
            "cores": environment.usable_cores(),
            "mesh": f"data={data},model={model}",
        }


def _limits(folder: ModelFolder) -> Limits:
    return Limits(
        variant=folder.variant,
        default_size=folder.default_size,
        pixel_multiple=folder.vae.pixel_multiple,
        token_channels=folder.transformer.in_channels,
        max_sequence_length=folder.max_sequence_length,
    )


def _find(
    model: str,
    revision: str | None,
    offline: bool,
    cache_dir: str | Path | None,
    dtype: str,
    is_distilled: bool | None,
    progress: Progress,
) -> ModelFolder:
    found = resolve(
        model, revision=revision, offline=offline, cache_dir=cache_dir, progress=progress
    )
    return open_model(
        found.path,
        dtype=dtype,
        is_distilled=is_distilled,
        name=found.name,
        revision=found.revision,
    )


def _architecture(folder: ModelFolder) -> Architecture:
    return Architecture(
        transformer=folder.transformer,
        text_encoder=folder.text_encoder,
        vae=folder.vae,
        dtype=folder.dtype,
    )


def _start_compiling(
    folder: ModelFolder,
    programs: Programs,
    compiler: Compiler,
    sizes: Sequence[tuple[int, int]] | None,
) -> list[Future[Executable]]:
    """Submit the programs of every size; sizes are checked before any is."""
    sizes = [(folder.default_size, folder.default_size)] if sizes is None else sizes
    for height, width in sizes:
        _limits(folder).check_size(height, width)
    length = folder.max_sequence_length
    wanted = [p for size in sizes for p in programs.text_to_image(*size, length, "pil")]
    return list(dict.fromkeys(compiler.submit(program) for program in wanted))


def _load(folder: ModelFolder, mesh: Mesh, progress: Progress) -> Weights:
    """Stream the parameters of text to image onto the devices."""
    plans = dict(folder.plans, vae=folder.plans["vae"].only("decoder", "stats"))
    specs = dict(folder.specs, vae=dataclasses.replace(folder.specs["vae"], encoder=None))
    total = sum(plan.nbytes for plan in plans.values())
    progress("load", 0, total)
    counter = Counter(lambda count: progress("load", count, total))
    trees = {
        name: place(plans[name], param_shardings(specs[name], mesh), on_bytes=counter.add)
        for name in ("text_encoder", "transformer", "vae")
    }
    return Weights(**trees)


def _images(arrays: Sequence[np.ndarray], output_type: str) -> Any:
    if output_type == "pil":
        return [Image.fromarray(array) for array in arrays]
    return np.stack(arrays)


def _merged(results: list[Result], output_type: str) -> Result:
    images = [image for result in results for image in result.images]
    timings: dict[str, float] = {}
    for result in results:
        for stage, seconds in result.timings.items():
            timings[stage] = timings.get(stage, 0.0) + seconds
    return Result(
        images=images if output_type == "pil" else np.stack(images),
        seeds=[seed for result in results for seed in result.seeds],
        prompts=[prompt for result in results for prompt in result.prompts],
        metadata=[entry for result in results for entry in result.metadata],
        timings=timings,
    )


def _mesh(mesh: str | Mesh | None) -> Mesh:
    if isinstance(mesh, Mesh):
        if tuple(mesh.axis_names) != (DATA, MODEL):
            raise ConfigError(f"mesh has axes {mesh.axis_names}; ('data', 'model') are needed")
        return mesh
    return make_mesh(*parse_mesh(mesh or ""))


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; a whole number of at least 1 is needed")
    return value


def _refuse_unbuilt(arguments: dict[str, Any], error: type[FirstlightError]) -> None:
    """An argument that has no effect yet must raise, never be ignored."""
    for name, value in arguments.items():
        if value is not None:
            raise error(f"{name} is not supported yet; leave it out")
