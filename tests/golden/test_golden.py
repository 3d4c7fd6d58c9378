# SPDX-License-Identifier: Apache-2.0
"""Numbers of diffusers and transformers for tiny models whose weights are an integer hash.

The reference computed them in float32 from the same hash; no library of its is needed here. Names
and shapes of the tensors go through the real loader, so the weight tables are tested as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from firstlight import references, sampling
from firstlight.compile import Compiler
from firstlight.engine import Engine
from firstlight.inpaint import Inpaint, token_mask
from firstlight.programs import Programs
from firstlight.progress import silent
from firstlight.request import Request
from firstlight.residency import Residency
from firstlight.start import architecture
from firstlight.timeline import Timeline
from tests import hashfill, keys
from tests.components import Components

ATOL = 3e-3
"""The values reach 20 and grow through the blocks: float32 and float64 runs of the reference
itself differ by up to 1e-3."""

TINY_TRANSFORMER = {
    "_class_name": "Flux2Transformer2DModel",
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [4, 4, 4, 4],
    "guidance_embeds": False,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
# One level: a latent cell per pixel, two pixels per token side.
TINY = {
    "transformer": TINY_TRANSFORMER,
    "text_encoder": QWEN | {"hidden_size": 16},
    "vae": {
        "_class_name": "AutoencoderKLFlux2",
        "down_block_types": ["DownEncoderBlock2D"],
        "up_block_types": ["UpDecoderBlock2D"],
        "block_out_channels": [4],
        "layers_per_block": 1,
        "latent_channels": 1,
        "norm_num_groups": 1,
        "sample_size": 32,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "taps": [1],
}
LEVELS = {
    "transformer": TINY_TRANSFORMER | {"in_channels": 16, "joint_attention_dim": 96},
    "text_encoder": QWEN,
    "vae": {
        "_class_name": "AutoencoderKLFlux2",
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [8, 16],
        "decoder_block_out_channels": [4, 8],
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 32,
    },
    "taps": [1, 2, 3],
}


def write(folder: Path, model: dict[str, Any]) -> Path:
    """A model folder in diffusers' layout with hashed float32 weights."""
    shapes = {
        "transformer": keys.transformer,
        "text_encoder": keys.text_encoder,
        "vae": keys.autoencoder,
    }
    for part, names in shapes.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(model[part]))
        stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        tensors = hashfill.weights(names(model[part]))
        hashfill.save(folder / part / f"{stem}.safetensors", tensors)
    (folder / "scheduler").mkdir()
    scheduler = {"use_dynamic_shifting": True, "shift": 3.0}
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    demo = Path(sampling.__file__).parent / "data/demo"
    shutil.copytree(demo / "tokenizer", folder / "tokenizer")
    index = json.loads((demo / "model_index.json").read_text())
    index |= {"text_encoder_out_layers": model["taps"], "max_sequence_length": 10}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Components(write(tmp_path_factory.mktemp("models") / "tiny", TINY))


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    return Components(write(tmp_path_factory.mktemp("models") / "levels", LEVELS))


def check(array: np.ndarray, total: float, absolute: float, first: list[float]) -> None:
    """Compare with the reference's sum, sum of absolute values and first values.

    Rounding errors of n elements are independent of each other, so a sum of theirs grows with
    the square root of n; a fault that shifts every element by ATOL would exceed that.
    """
    assert array.dtype == np.float32
    np.testing.assert_allclose(array.ravel()[: len(first)], first, rtol=0, atol=ATOL)
    slack = ATOL * math.sqrt(array.size)
    assert array.sum(dtype=np.float64) == pytest.approx(total, rel=0, abs=slack)
    assert np.abs(array).sum(dtype=np.float64) == pytest.approx(absolute, rel=0, abs=slack)


def test_hash():
    expected = [-0.3467042316, 0.0679373352, 0.2979130198]
    expected += [-0.0430902776, -0.4933267392, -0.4243126216]
    np.testing.assert_allclose(hashfill.hashed(6, 0), expected, rtol=0, atol=5e-11)


def test_t1_transformer(tiny):
    out = tiny.velocity(
        hashfill.tensor(1, (1, 12, 4)),
        hashfill.tensor(3, (1, 7, 16)),
        np.float32([0.7]),
        sampling.image_ids(3, 4),
    )
    assert out.shape == (1, 12, 4)
    first = [-2.75522, 2.04852, 5.36711, -12.14323, -12.62094, 7.85352]
    check(out, -130.799, 362.300, first)


def test_t2_transformer_with_reference_tokens(tiny):
    out = tiny.velocity(
        np.concatenate([hashfill.tensor(1, (1, 12, 4)), hashfill.tensor(2, (1, 6, 4))], axis=1),
        hashfill.tensor(3, (1, 7, 16)),
        np.float32([0.7]),
        np.concatenate([sampling.image_ids(3, 4), sampling.image_ids(2, 3, time=10)]),
    )
    assert out.shape == (1, 18, 4)
    first = [-8.52535, -4.60099, 4.67297, -11.20140, -3.86318, 0.75035]
    check(out, -319.386, 465.097, first)


def test_t3_and_t4_cached_references(tiny):
    """The reference computes keys and values together with the first step, and that step's
    velocity; ours come first, and every step is one that uses them."""
    rope = sampling.rope_table(tiny.model.transformer, sampling.reference_ids(0, 2, 3))
    cache = tiny.extract(hashfill.tensor(2, (1, 6, 4)), rope)
    first = [-1.53561, -0.16066, -0.01989, -1.20718, 0.80621, -1.09208]
    check(np.asarray(cache.double.k[0, 0]), -6.84733, 157.771, first)
    first = [4.17193, 2.74316, 1.76463, 1.19598, 5.22693, -5.00179]
    check(np.asarray(cache.single.v[0, 0]), 450.751, 1181.525, first)
    inputs = hashfill.tensor(1, (1, 12, 4)), hashfill.tensor(3, (1, 7, 16))
    out = tiny.velocity(*inputs, np.float32([0.7]), sampling.image_ids(3, 4), cache)
    first = [-7.36861, -3.36119, 6.82699, -12.11906, -2.40269, 16.40539]
    check(out, -159.215, 379.218, first)
    out = tiny.velocity(*inputs, np.float32([0.35]), sampling.image_ids(3, 4), cache)
    first = [1.08276, -13.19485, -1.08879, 26.25631, 1.10965, -15.52383]
    check(out, 111.015, 508.130, first)


def test_v1_autoencoder_encode(levels):
    out = levels.encode(hashfill.tensor(4, (1, 3, 16, 12)))
    assert out.shape == (1, 4, 8, 6)
    first = [-0.56655, -1.95879, -1.00362, -0.79360, -0.09435, -0.39345]
    check(out, -80.5799, 227.823, first)


def test_v2_autoencoder_decode(levels):
    out = levels.decode(hashfill.tensor(5, (1, 4, 8, 6)))
    assert out.shape == (1, 3, 16, 12)
    first = [-0.09344, -0.17948, -0.55536, -0.08368, -0.69009, -0.28016]
    check(out, 20.5210, 389.932, first)


def test_v3_tiled_decode(levels):
    out = levels.tiled("decode", hashfill.tensor(5, (1, 4, 8, 6)), 8)
    assert out.shape == (1, 3, 16, 12)
    first = [-0.14129, -0.29973, -0.51933, 0.19289, -1.35708, -0.03138]
    check(out, -10.6607, 333.493, first)


def test_v4_tiled_encode(levels):
    out = levels.tiled("encode", hashfill.tensor(4, (1, 3, 16, 12)), 8)
    assert out.shape == (1, 4, 8, 6)
    first = [-0.68216, -2.02847, -1.32443, -1.33745, 0.35681, -0.00233]
    check(out, -42.1925, 204.812, first)


def test_what_fits_one_tile_is_not_tiled(levels):
    latents = hashfill.tensor(5, (1, 4, 8, 6))
    np.testing.assert_array_equal(levels.tiled("decode", latents, 16), levels.decode(latents))


def test_q1_text_encoder(levels):
    ids = ((7 * np.arange(10) + 3) % 64).astype(np.int32)[None]
    mask = np.array([[1] * 6 + [0] * 4], np.int32)
    out = levels.text(ids, mask)
    assert out.shape == (1, 10, 96)
    check(out, 583.017, 4720.015, [2.46581, -0.47262, -3.33770, -0.87576, 7.29235, 4.02244])
    # The first pad: it sees every token and no pad, itself included.
    row = [2.88524, 0.26155, 8.08355, -7.04099, -2.69841, -0.60869]
    check(out[0, 6], 65.8756, 457.734, row)


class Pipelines:
    """Two steps of the tiny model through the engine, from given text states and latents."""

    def __init__(self, tiny: Components) -> None:
        model = tiny.model
        programs = Programs(architecture(model), tiny.mesh, batch=1)
        weights = Residency("all", lambda names: {})
        weights.trees = {**tiny.weights, "vae_encoder": tiny.weights["vae"]}
        tokenizer: Any = None  # text states are given
        self.engine = Engine(
            programs=programs,
            compiler=Compiler(tiny.mesh, None),
            scheduler=model.scheduler,
            tokenizer=tokenizer,
            weights=weights,
        )

    def __call__(self, output_type: str, **changes: Any) -> np.ndarray:
        request = Request(
            prompts=("",),
            seeds=(0,),
            height=8,
            width=8,
            num_inference_steps=2,
            guidance_scale=1.0,
            max_sequence_length=7,
            output_type=output_type,
            latents=hashfill.tensor(8, (1, 4, 4, 4)),
            prompt_embeds=hashfill.tensor(6, (1, 7, 16)),
        )
        request = dataclasses.replace(request, **changes)
        (picture,) = self.engine.run(request, silent, Timeline.from_now())
        return picture.array[None]


@pytest.fixture(scope="module")
def pipeline(tiny):
    return Pipelines(tiny)


def reference(width: int = 66) -> np.ndarray:
    """R = 3x, G = 5y, B = x + y modulo 256, as the autoencoder gets it."""
    y, x = np.mgrid[:64, :66]
    picture = np.stack([3 * x, 5 * y, x + y], axis=-1).astype(np.uint8)
    return references.prepare(Image.fromarray(picture[:, :width]), "image", 2)


def test_p_schedule(tiny):
    levels = sampling.sigmas(tiny.model.scheduler, 2, tokens=16)
    np.testing.assert_allclose(levels, [1, 0.87657392, 0], rtol=0, atol=6.5e-8)


def test_p2_base_with_guidance(pipeline):
    negative = hashfill.tensor(7, (1, 7, 16))
    latents = pipeline("latent", guidance_scale=4.0, negative_prompt_embeds=negative)
    first = [7.73723, -3.44445, 3.71120, -7.05124, -0.50555, -19.97934]
    check(latents, -98.2252, 598.670, first)


def test_p3_reference_tokens(pipeline):
    program = pipeline.engine.programs.reference(32, 33)
    vae = pipeline.engine.weights.painter("vae")
    picture = pipeline.engine.put(reference()[None])
    (tokens,) = pipeline.engine.ready(program)(vae.encoder, vae.stats, picture)
    assert tokens.shape == (1, 1056, 4)
    first = [1.05549, -0.44077, 0.40946, -0.25991, 0.64399, 0.09784]
    check(np.asarray(tokens), 2328.365, 3154.352, first)


def test_p3_edit(pipeline):
    latents = pipeline("latent", references=((reference(),),))
    first = [1.14110, -11.00411, -0.45500, -8.50406, 1.48051, -10.69103]
    check(latents, -73.8246, 415.113, first)


def test_p4_two_references(pipeline):
    latents = pipeline("latent", references=((reference(), reference(64)),))
    first = [1.22611, -10.92557, -0.11593, -8.05471, 1.46977, -10.65852]
    check(latents, -71.8981, 413.860, first)


def test_p5_cached_references(pipeline):
    engine = pipeline.engine
    engine.caches_references = True
    try:
        latents = pipeline("latent", references=((reference(),),))
    finally:
        engine.caches_references = False
    first = [3.54763, -7.16307, 1.98549, -4.81933, 3.76080, -6.84636]
    check(latents, 28.1914, 321.860, first)


def test_p6_inpaint(pipeline):
    count = 3 * 8 * 8
    source = (hashfill.hashed(count, 1009) + 0.5).reshape(3, 8, 8).transpose(1, 2, 0)
    source = np.ascontiguousarray(source, np.float32)
    mask = np.zeros((8, 8), np.uint8)
    mask[2:6, 3:8] = 255
    inpaint = Inpaint(source=source, mask=token_mask(mask, 2), strength=0.8)
    latents = pipeline("latent", inpaint=inpaint, references=((source,),), num_inference_steps=4)
    first = [0.34958, -0.82729, 0.79081, -0.05724, 0.22807, 1.06296]
    check(latents, 66.1384, 109.799, first)


def test_p1_latents(pipeline):
    latents = pipeline("latent")
    assert latents.shape == (1, 1, 8, 8)
    first = [8.70035, -2.78637, 5.97448, -2.86193, 7.55066, -7.96304]
    check(latents, 29.6305, 481.934, first)


def test_p1_picture(pipeline):
    image = pipeline("np").transpose(0, 3, 1, 2)
    assert image.shape == (1, 3, 8, 8)
    check(image, 95.8534, 95.8534, [0, 0.72400, 0.06823, 0.91645, 0, 0.74456])


def test_p1_bytes(pipeline):
    image = pipeline("pil")
    assert image.shape == (1, 8, 8, 3) and image.dtype == np.uint8
    assert image.ravel()[:9].tolist() == [0, 119, 159, 185, 214, 180, 17, 111, 255]
    assert image.sum(dtype=np.int64) == 24437
