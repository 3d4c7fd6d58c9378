# SPDX-License-Identifier: Apache-2.0
"""The public pipeline: from a model's name to pictures. Holds all the package's state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from PIL import Image

from firstlight import environment
from firstlight.callbacks import StepCallback
from firstlight.engine import Engine, OnStep, Picture
from firstlight.errors import ConfigError, FirstlightError
from firstlight.progress import Progress, silent
from firstlight.request import Limits, Request, complete
from firstlight.start import Layout, limits, start
from firstlight.timeline import Timeline, by_name
from firstlight.weights.folder import ModelFolder
from firstlight.weights.load import STAGING_BYTES
from firstlight.weights.loading import Loading


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a call made, in the order prompt 0 image 0, prompt 0 image 1, prompt 1 image 0, ...

    `images` is a list of PIL images ("pil"), or one array: (B, H, W, 3) float32 in [0, 1] ("np"),
    or (B, C, 2H/m, 2W/m) float32 latents, denormalised and unpatchified ("latent"). `metadata`
    has one JSON-able mapping per picture, which makes the picture again; `timings` are seconds.
    `index` is the place of a streamed picture in its request.
    """

    images: Any
    seeds: list[int]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    timings: dict[str, float]
    index: int = 0


class Pipeline:
    """A loaded klein model. Make one with `from_pretrained`, then call it any number of times."""

    def __init__(
        self, model: ModelFolder, engine: Engine, progress: Progress, timeline: Timeline
    ) -> None:
        self.model = model
        self.timeline = timeline
        self.load_timings = by_name(timeline.critical_path())
        self._engine = engine
        self._progress = progress
        self._interrupt = False

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
        executable_cache: bool | str | Path | None = True,
        progress: Progress = silent,
        transformer: str | Path | None = None,
        vae: str | Path | None = None,
        text_encoder: str | Path | None = None,
        tokenizer: str | Path | None = None,
        bundle: Any = None,
        offload: str | None = None,
        staging_bytes: int = STAGING_BYTES,
        vae_tiling: bool | None = None,
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
            transformer, vae, text_encoder, tokenizer: weights from elsewhere than `model`, whose
                configurations still count: a safetensors file (diffusers' names or Black Forest
                Labs' own; fp8 and nvfp4 are made whole), or a folder; of the tokenizer a folder.
            executable_cache: keep compiled programs on disk for the next start: in this folder,
                in the user's cache folder (True), or nowhere (False).
            offload: `"text_encoder"` frees the text encoder's memory after encoding and reads it
                again for the next prompt; by itself where the parameters do not fit.
            staging_bytes: host memory for weights on their way to an accelerator.
            vae_tiling: decode (and encode) pictures larger than the autoencoder's `sample_size` in
                overlapping tiles, which needs less memory and gives a slightly different picture;
                by itself where decoding would take more than 6 GiB.
            progress: called as `progress(stage, done, total)` from any thread.

        Raises:
            ConfigError: a setting is not usable. CheckpointError: the model's files are not;
                all their faults are listed, before any weight is read. RequestError: a size.
                DeviceError: the parameters do not fit in memory.
        """
        _refuse_unbuilt(dict(fsdp=fsdp or None, bundle=bundle), ConfigError)
        loading = Loading(
            model,
            dtype=dtype,
            revision=revision,
            offline=offline,
            cache_dir=cache_dir,
            is_distilled=is_distilled,
            staging_bytes=staging_bytes,
            files={
                "transformer": transformer,
                "vae": vae,
                "text_encoder": text_encoder,
                "tokenizer": tokenizer,
            },
            progress=progress,
        )
        layout = Layout(
            mesh=mesh,
            images_per_device=images_per_device,
            sizes=sizes,
            executable_cache=executable_cache,
            offload=offload,
            vae_tiling=vae_tiling,
        )
        return cls.from_loading(loading, layout, progress)

    @classmethod
    def from_loading(
        cls, loading: Loading, layout: Layout, progress: Progress = silent
    ) -> Pipeline:
        """Like `from_pretrained`, for a model whose loading has begun (before jax was imported)."""
        folder, engine = start(loading, layout, progress)
        return cls(folder, engine, progress, loading.timeline)

    def warm_up(self, sizes: Sequence[tuple[int, int]] | None = None) -> None:
        """Run every program once for each (height, width), the default size if None.

        What a process does for the first time (memory, threads, tables) takes a moment that the
        first request would otherwise wait for; afterwards it is as fast as any. A server calls
        this before it says that it is ready.

        Raises RequestError: a size.
        """
        side = self.model.default_size
        requests = [
            complete(self.limits, prompt="x", height=h, width=w, num_inference_steps=1, seed=0)
            for h, w in ([(side, side)] if sizes is None else sizes)
        ]
        with self.timeline.span("warm-up"):
            for request in requests:
                list(self._engine.run(request, silent, Timeline.from_now()))

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
        time_shift: str = "reference",
    ) -> Result:
        """Make pictures. Arguments are named as in diffusers; defaults follow the model.

        Args:
            prompt: a text, or a list of texts that make one batch.
            height, width: pixels, multiples of the model's `pixel_multiple` (16 for klein).
            num_inference_steps: 4 for distilled models by default.
            num_images_per_prompt: pictures of each prompt.
            image: references for editing: one picture, or an ordered list of them for all prompts;
                a list of lists gives each prompt its own. PIL images, uint8 arrays (H, W, 3), or
                paths. Larger ones are reduced to one megapixel; sides are cut to multiples. The
                first one's size is the picture's unless height and width are given.
            mask_image: repaint `image` (one picture) where this is white, keep it where it is
                black; the picture is a reference of its own, `image_reference` are further ones.
            strength: how far the source is taken back into noise, 0 to 1 (0.8 with a mask). Without
                a mask, all of `image` is changed by that much.
            padding_mask_crop: work on the masked part with this many pixels around it, enlarged,
                and paste it back: pixels where the mask is black stay as they are, bit for bit.
            guidance_scale: how strongly the prompt binds (base models; 4.0 by default, 1.0 is one
                pass per step without guidance). Distilled models ignore it, with a warning.
            negative_prompt: what to steer away from; one text, or one for each prompt.
            seed: picture i uses seed + i (0 to 2^32 - 1); a list gives one seed per picture;
                random if None, and reported.
            latents: starting noise (pictures, 4C, H/m, W/m) float32 instead of seeds.
            prompt_embeds, negative_prompt_embeds: text states (prompts, T, J) instead of prompts,
                as `encode_prompt` returns them.
            sigmas: noise levels of the steps before the schedule shifts them, falling from at most
                1; an end at 0 is appended.
            max_sequence_length: tokens of text, the chat text's own included.
            callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after every
                step of every batch of pictures; returns a dict of those it replaces. `tensors` has
                what `callback_on_step_end_tensor_inputs` names: "latents" (B, N, 4C) float32,
                "prompt_embeds" (B, T, J), and "preview", a list of PIL images of an eighth of the
                size that show what the pictures are becoming. Setting `pipe.interrupt` skips the
                remaining steps.
            time_shift: "reference", whose schedule depends on the picture's size and jumps at 4300
                tokens (about 1049 x 1049), or "constant", the same for all sizes.
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
        callback = arguments.pop("callback_on_step_end", None)
        # The tensors a callback asks for mean nothing without the callback.
        names = arguments.pop("callback_on_step_end_tensor_inputs", ("latents",))
        request = complete(self.limits, prompt=prompt, **arguments)
        watch = None
        if callback is not None:
            size = (request.height, request.width)
            watch = StepCallback(self, self._engine, callback, names, size)
        return self._stream(request, watch)

    def encode_prompt(
        self, prompt: str | Sequence[str], *, max_sequence_length: int | None = None
    ) -> np.ndarray:
        """Text states of prompts, to be given as `prompt_embeds` any number of times.

        Returns (prompts, T, J) in the model's dtype. Raises RequestError as a call does.
        """
        request = complete(self.limits, prompt=prompt, max_sequence_length=max_sequence_length)
        return self._engine.encode_prompts(request, self._progress)

    @property
    def interrupt(self) -> bool:
        """Whether the remaining steps of the running call are skipped; a callback may set it."""
        return self._interrupt

    @interrupt.setter
    def interrupt(self, value: bool) -> None:
        self._interrupt = value

    def _stream(self, request: Request, watch: OnStep | None) -> Iterator[Result]:
        timeline = Timeline.from_now()
        self._interrupt = False
        for picture in self._engine.run(request, self._progress, timeline, watch):
            seconds = by_name(timeline.critical_path())
            timeline.restart()
            yield Result(
                images=_pasted(_images([picture.array], request.output_type), request),
                seeds=[picture.seed],
                prompts=[picture.prompt],
                metadata=[self._metadata(request, picture)],
                index=picture.index,
                timings=dict(seconds, total=sum(seconds.values())),
            )

    @property
    def limits(self) -> Limits:
        """Sizes, defaults and text length that the loaded model implies."""
        return limits(self.model)

    @property
    def programs_compiled(self) -> int:
        """Programs compiled by this pipeline so far (those taken from disk do not count)."""
        return self._engine.compiler.compiled

    @staticmethod
    def _of_conditions(request: Request, picture: Picture) -> dict[str, Any]:
        """What a picture was made from besides its prompt, where it was."""
        made: dict[str, Any] = {}
        if request.negative_prompts:
            made["negative_prompt"] = request.negative_prompts[picture.index]
        if request.references and request.references[picture.index]:
            made["references"] = [_digest(p) for p in request.references[picture.index]]
        if request.inpaint is not None:
            made["strength"] = request.inpaint.strength
            made["source"] = _digest(request.inpaint.source)
        if request.sigmas is not None:
            made["sigmas"] = list(request.sigmas)
        if request.time_shift != "reference":
            made["time_shift"] = request.time_shift
        if request.prompt_embeds is not None:
            made["prompt"] = None
        return made

    def _metadata(self, request: Request, picture: Picture) -> dict[str, Any]:
        programs = self._engine.programs
        device = programs.mesh.devices.flat[0]
        data, model = programs.mesh.devices.shape
        return {
            "prompt": picture.prompt,
            "seed": picture.seed if request.latents is None else None,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            **self._of_conditions(request, picture),
            **({"vae_tiling": True} if programs.tiled(request.height, request.width) else {}),
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


def _pasted(images: Any, request: Request) -> Any:
    if request.inpaint is None or request.inpaint.pasting is None:
        return images
    return [request.inpaint.pasting(image) for image in images]


def _digest(picture: np.ndarray) -> str:
    """Of a reference's pixels as the autoencoder gets them."""
    return hashlib.sha256(repr(picture.shape).encode() + picture.tobytes()).hexdigest()


def _images(arrays: Sequence[np.ndarray], output_type: str) -> Any:
    if output_type == "pil":
        return [Image.fromarray(array) for array in arrays]
    return np.stack(arrays)


def _merged(results: list[Result], output_type: str) -> Result:
    results = sorted(results, key=lambda result: result.index)
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


def _refuse_unbuilt(arguments: dict[str, Any], error: type[FirstlightError]) -> None:
    """An argument that has no effect yet must raise, never be ignored."""
    for name, value in arguments.items():
        if value is not None:
            raise error(f"{name} is not supported yet; leave it out")
