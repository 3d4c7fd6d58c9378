# SPDX-License-Identifier: Apache-2.0
"""The engine's programs: what is compiled, for which shapes.

Each call makes B = data devices x images per device pictures. m is the pixel multiple.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from firstlight import sampling
from firstlight.compile import Program
from firstlight.models import autoencoder, text_encoder, transformer
from firstlight.models.params import DATA, MODEL, DType
from firstlight.request import Request
from firstlight.sharding import abstract_params

Grids = tuple[tuple[int, int], ...]
"""Rows and columns of image tokens of each reference."""


DECODE_BYTES = {"bfloat16": 20, "float32": 28}
"""Temporaries of decoding for each pixel and channel of the finest level, as XLA plans them."""

UNTILED_BYTES = 6 << 30
"""A picture whose decoding would need more is decoded in tiles."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The three networks of one model, and the dtype they run in."""

    transformer: transformer.TransformerConfig
    text_encoder: text_encoder.TextEncoderConfig
    vae: autoencoder.AutoencoderConfig
    dtype: DType

    @property
    def identity(self) -> dict[str, Any]:
        """All of it as JSON-able data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Programs:
    """Declares each program; `batch` is the number of pictures of one call over all devices.

    `tiling` says whether the autoencoder works in tiles: None leaves it to the size.
    """

    arch: Architecture
    mesh: Mesh
    batch: int
    tiling: bool | None = None

    def tiled(self, height: int, width: int) -> bool:
        """Whether a picture is decoded in tiles. The size alone decides, not the memory that is
        free: the same request must give the same picture."""
        cfg = self.arch.vae
        if max(height, width) <= cfg.sample_size:
            return False
        if self.tiling is not None:
            return self.tiling
        per_pixel = DECODE_BYTES[self.arch.dtype] * cfg.decoder_block_out_channels[0]
        return height * width * per_pixel > UNTILED_BYTES

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens of a picture in pixels."""
        multiple = self.arch.vae.pixel_multiple
        return height // multiple, width // multiple

    def noise(self, height: int, width: int) -> Program:
        """seeds (B,) uint32 -> token rows (B, N, 4C) float32."""
        rows, columns = self.grid(height, width)
        channels = self.arch.transformer.in_channels

        def function(seeds_B: Array) -> tuple[Array]:
            return (sampling.pack(sampling.noise(seeds_B, channels, rows, columns)),)

        return self._program(
            f"noise {width}x{height}", function, (self._array((self.batch,), "uint32"),)
        )

    def pack(self, height: int, width: int) -> Program:
        """Given latents (B, 4C, H/m, W/m) float32 -> token rows (B, N, 4C)."""
        rows, columns = self.grid(height, width)
        latents = self._array((self.batch, self.arch.transformer.in_channels, rows, columns))
        return self._program(f"pack {width}x{height}", lambda x: (sampling.pack(x),), (latents,))

    def encode(self, length: int) -> Program:
        """params, ids and mask (B, T) int32 -> text states (B, T, J) in the model's dtype."""
        cfg = self.arch.text_encoder

        def function(params: Any, ids_BT: Array, mask_BT: Array) -> tuple[Array]:
            return (text_encoder.encode(params, cfg, ids_BT, mask_BT),)

        ids = self._array((self.batch, length), "int32")
        params = abstract_params(text_encoder.spec(cfg, self.arch.dtype), self.mesh)
        return self._program(f"encode {length}", function, (params, ids, ids))

    def denoise(
        self,
        height: int,
        width: int,
        length: int,
        references: Grids = (),
        *,
        guided: bool = False,
        cached: bool = False,
    ) -> Program:
        """params, x (B, N, 4C) float32, text states, cos and sin of each joint token, the step's
        (timestep, sigma, next sigma, guidance) as float32 (4,), the tokens of each reference
        (B, Nk, 4C), and the text states to steer away from -> x after the step.

        If `cached`, a `ReferenceCache` stands for the references' tokens. The last argument is
        None unless `guided`; then both passes are made one after the other, with the memory of
        one (weights are read twice, which costs little beside a picture's tokens).
        """
        cfg, batch = self.arch.transformer, self.batch
        tokens = math.prod(self.grid(height, width))

        def function(
            params: Any, x: Array, text: Array, rope: Any, step: Array, images: Any, negative: Any
        ) -> tuple[Array]:
            timestep_B = jnp.broadcast_to(step[0], (batch,), out_sharding=P(DATA))
            cache = images if cached else None
            stream = x if cached else jnp.concatenate([x, *images], axis=1)

            def velocity(states: Array) -> Array:
                made = transformer.denoise(params, cfg, stream, states, timestep_B, rope, cache)
                return made[:, :tokens]

            if negative is None:
                return (sampling.euler_step(x, velocity(text), step[1], step[2]),)
            towards, away = lax.map(velocity, jnp.stack([text, negative]))
            guided = away + step[3] * (towards - away)
            return (sampling.euler_step(x, guided, step[1], step[2]),)

        joint = length + tokens + (0 if cached else _tokens(references))
        table = self._table(joint)
        text = self._array((batch, length, cfg.joint_attention_dim), self.arch.dtype)
        words = f"{_words(references)}{' cached' * cached}{' guided' * guided}"
        return self._program(
            f"denoise {width}x{height} {length}{words}",
            function,
            (
                abstract_params(transformer.spec(cfg, self.arch.dtype), self.mesh),
                self._array((batch, tokens, cfg.in_channels)),
                text,
                (table, table),
                self._array((4,), sharded=False),
                self._cache(references) if cached else self._reference_tokens(references),
                text if guided else None,
            ),
        )

    def noised(self, height: int, width: int) -> Program:
        """noise and token rows of a source (B, N, 4C), and a noise level -> the source that much
        under noise."""
        x = self._array(
            (self.batch, math.prod(self.grid(height, width)), self.arch.transformer.in_channels)
        )
        return self._program(
            f"noised {width}x{height}",
            lambda noise, source, sigma: (sampling.scale_noise(source, noise, sigma),),
            (x, x, self._array((), sharded=False)),
        )

    def keep(self, height: int, width: int) -> Program:
        """x after a step, noise, token rows of the source, mask (B, N, 1) and the step's next
        noise level -> x where the mask is 1, the source under noise where it is 0."""
        tokens = math.prod(self.grid(height, width))
        x = self._array((self.batch, tokens, self.arch.transformer.in_channels))

        def function(x: Array, noise: Array, source: Array, mask: Array, sigma: Array):
            known = sampling.scale_noise(source, noise, sigma)
            return ((1 - mask) * known + mask * x,)

        mask = self._array((self.batch, tokens, 1))
        return self._program(
            f"keep {width}x{height}", function, (x, x, x, mask, self._array((), sharded=False))
        )

    def extract(self, references: Grids) -> Program:
        """params, cos and sin of each reference token, the tokens of each reference (B, Nk, 4C) ->
        the leaves of a `ReferenceCache`."""
        cfg = self.arch.transformer

        def function(params: Any, rope: Any, images: Any) -> tuple[Array, ...]:
            made = transformer.extract(params, cfg, jnp.concatenate(images, axis=1), rope)
            return tuple(jax.tree.leaves(made))

        table = self._table(_tokens(references))
        return self._program(
            f"extract{_words(references)}",
            function,
            (
                abstract_params(transformer.spec(cfg, self.arch.dtype), self.mesh),
                (table, table),
                self._reference_tokens(references),
            ),
            outputs=len(jax.tree.leaves(self._cache(references))),
        )

    def cache_bytes(self, references: Grids) -> int:
        """Bytes of a `ReferenceCache` over all devices."""
        leaves = jax.tree.leaves(self._cache(references))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def cache_of(self, leaves: Sequence[Array]) -> transformer.ReferenceCache[Array]:
        """What `extract` returned, as `denoise` takes it."""
        return jax.tree.unflatten(jax.tree.structure(self._cache(())), leaves)

    def _cache(self, references: Grids) -> transformer.ReferenceCache[Any]:
        cfg = self.arch.transformer
        shape = (self.batch, _tokens(references), cfg.num_attention_heads, cfg.attention_head_dim)
        sharding = NamedSharding(self.mesh, P(None, DATA, None, MODEL, None))

        def stacked(layers: int) -> transformer.KeysValues[Any]:
            leaf = jax.ShapeDtypeStruct((layers, *shape), self.arch.dtype, sharding=sharding)
            return transformer.KeysValues(k=leaf, v=leaf)

        return transformer.ReferenceCache(
            double=stacked(cfg.num_layers), single=stacked(cfg.num_single_layers)
        )

    def _reference_tokens(self, references: Grids) -> tuple[jax.ShapeDtypeStruct, ...]:
        channels = self.arch.transformer.in_channels
        return tuple(
            self._array((self.batch, rows * columns, channels)) for rows, columns in references
        )

    def _table(self, tokens: int) -> jax.ShapeDtypeStruct:
        half = self.arch.transformer.attention_head_dim // 2
        return self._array((tokens, half), sharded=False)

    def reference(self, rows: int, columns: int, dtype: str = "uint8") -> Program:
        """encoder params, latent statistics, pictures (B, H, W, 3) of a grid of tokens, uint8 or
        float32 in [0, 1] -> token rows (B, N, 4C) float32, on the transformer's scale."""
        cfg = self.arch.vae
        # References have a megapixel at most: nothing but being told makes tiles of them.
        encode = autoencoder.encode_tiled if self.tiling else autoencoder.encode

        def function(params: Any, stats: Any, pictures: Array) -> tuple[Array]:
            unit = pictures if dtype == "float32" else pictures.astype(jnp.float32) / 255.0
            image = unit * 2.0 - 1.0
            cells = sampling.patchify(encode(params, cfg, image))
            cells = sampling.normalise(cells, stats, cfg.batch_norm_eps)
            return (sampling.rows_of(cells),)

        params = abstract_params(autoencoder.spec(cfg, self.arch.dtype), self.mesh)
        height, width = rows * cfg.pixel_multiple, columns * cfg.pixel_multiple
        pictures = self._array((self.batch, height, width, 3), dtype)
        args = (params.encoder, params.stats, pictures)
        name = f"reference {width}x{height} {dtype}{' tiled' * bool(self.tiling)}"
        return self._program(name, function, args)

    def decode(self, height: int, width: int, output: str) -> Program:
        """decoder params, latent statistics, x (B, N, 4C) -> the result and (B, 2) booleans: are
        the latents and the decoded values finite. The result is, by `output`: "pil" (B, H, W, 3)
        uint8, "np" (B, H, W, 3) float32 in [0, 1], "latent" (B, C, 2H/m, 2W/m) float32."""
        cfg, tiled = self.arch.vae, self.tiled(height, width)
        rows, columns = self.grid(height, width)

        def function(params: Any, stats: Any, x: Array) -> tuple[Array, Array]:
            cells = sampling.unpack(x, rows, columns)
            cells = sampling.denormalise(cells, stats, cfg.batch_norm_eps)
            latents = sampling.unpatchify(cells)
            finite = jnp.isfinite(latents).all(axis=(1, 2, 3))
            if output == "latent":
                return latents.transpose(0, 3, 1, 2), jnp.stack([finite, finite], axis=-1)
            decode = autoencoder.decode_tiled if tiled else autoencoder.decode
            image = decode(params, cfg, latents)
            both = jnp.stack([finite, jnp.isfinite(image).all(axis=(1, 2, 3))], axis=-1)
            image = sampling.to_unit(image)
            return (sampling.to_uint8(image) if output == "pil" else image), both

        params = abstract_params(autoencoder.spec(cfg, self.arch.dtype), self.mesh)
        x = self._array((self.batch, rows * columns, self.arch.transformer.in_channels))
        return self._program(
            f"decode {width}x{height} {output}{' tiled' * tiled}",
            function,
            (params.decoder, params.stats, x),
            2,
        )

    def text_to_image(self, height: int, width: int, length: int, output: str) -> list[Program]:
        """All programs of a text-to-image call, those that take longest to compile first."""
        return [
            self.decode(height, width, output),
            self.denoise(height, width, length),
            self.encode(length),
            self.noise(height, width),
        ]

    def of_request(self, request: Request, *, caches: bool) -> list[Program]:
        """All programs that a request runs; `caches`: the model sees references once."""
        size, length = (request.height, request.width), request.text_length
        made = [self.decode(*size, request.output_type)]
        layouts = (
            tuple(self.grid(*p.shape[:2]) for p in images) for images in request.references or [()]
        )
        for grids in dict.fromkeys(layouts):
            cached = caches and bool(grids)
            made.append(self.denoise(*size, length, grids, guided=request.guided, cached=cached))
            made += [self.extract(grids)] * cached
        if request.prompt_embeds is None or request.negative_prompts:
            made.append(self.encode(length))
        pictures = [picture for images in request.references for picture in images]
        if request.inpaint is not None:
            made += [self.noised(*size)] * (request.latents is None)
            made += [self.keep(*size)] * (request.inpaint.mask is not None)
            pictures.append(request.inpaint.source)
        made += [self.reference(*self.grid(*p.shape[:2]), str(p.dtype)) for p in pictures]
        made.append(self.noise(*size) if request.latents is None else self.pack(*size))
        return list({program.name: program for program in made}.values())

    def rope(
        self, height: int, width: int, length: int, references: Grids = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rotation tables that `denoise` takes, float32 on the host."""
        ids = [sampling.text_ids(length), sampling.image_ids(*self.grid(height, width))]
        ids += [sampling.reference_ids(number, *grid) for number, grid in enumerate(references)]
        return sampling.rope_table(self.arch.transformer, np.concatenate(ids))

    def reference_rope(self, references: Grids) -> tuple[np.ndarray, np.ndarray]:
        """The rotation tables that `extract` takes, float32 on the host."""
        ids = [sampling.reference_ids(number, *grid) for number, grid in enumerate(references)]
        return sampling.rope_table(self.arch.transformer, np.concatenate(ids))

    def sharding(self, sharded: bool = True) -> NamedSharding:
        """Of arguments that have one row a picture (sharded), or none (the same everywhere)."""
        return NamedSharding(self.mesh, P(DATA) if sharded else P())

    def _array(
        self, shape: tuple[int, ...], dtype: str = "float32", *, sharded: bool = True
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(sharded))

    def _program(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], outputs: int = 1
    ) -> Program:
        identity = {"architecture": self.arch.identity, "batch": self.batch}
        return Program(name, function, args, identity, outputs)


def _tokens(references: Grids) -> int:
    return sum(rows * columns for rows, columns in references)


def _words(references: Grids) -> str:
    """Token grids of references, in a program's name."""
    return "".join(f" +{columns}x{rows}" for rows, columns in references)
