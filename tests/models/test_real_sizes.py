# SPDX-License-Identifier: Apache-2.0
"""klein 4B and 9B at full size: parameter counts, and the shapes of every result, from specs alone.

Nothing is computed or allocated: `jax.eval_shape` over abstract parameters.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from firstlight.models import autoencoder, text_encoder, transformer
from firstlight.models.params import DATA, count
from firstlight.models.specs.autoencoder import AutoencoderConfig
from firstlight.models.specs.text_encoder import TextEncoderConfig
from firstlight.models.specs.transformer import TransformerConfig
from firstlight.sharding import abstract_params, make_mesh

TEXT, SIDE = 512, 1024
TOKENS = (SIDE // 16) ** 2

KLEIN = {
    "in_channels": 128,
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "guidance_embeds": False,
}
TRANSFORMERS = {
    "4b": {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
    },
    "9b": {
        "num_layers": 8,
        "num_single_layers": 24,
        "num_attention_heads": 32,
        "joint_attention_dim": 12288,
    },
}
QWEN = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
}
TEXT_ENCODERS = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728},
    "9b": {"hidden_size": 4096, "intermediate_size": 12288},
}
TRANSFORMER_PARAMETERS = {"4b": 3_875_544_576, "9b": 9_078_581_248}

SMALL_DECODER = {"decoder_block_out_channels": [96, 192, 384, 384]}
# Published totals count the batch norm's `num_batches_tracked`, which is no parameter of ours.
AUTOENCODERS = {"full": ({}, 84_046_372 - 1), "small decoder": (SMALL_DECODER, 62_373_348 - 1)}


@pytest.fixture(autouse=True)
def mesh():
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def given(mesh):
    """An abstract input, split by batch as the programs split it."""

    def make(shape: tuple[int, ...], dtype: str = "float32", axes: tuple[str, ...] = (DATA,)):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    return make


@pytest.mark.parametrize("size", TRANSFORMERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_denoise(size, dtype, mesh, given):
    cfg = TransformerConfig.from_json(KLEIN | TRANSFORMERS[size])
    specs = transformer.spec(cfg, dtype)
    assert count(specs) == TRANSFORMER_PARAMETERS[size]
    table = given((TEXT + TOKENS, cfg.attention_head_dim // 2), axes=())
    out = jax.eval_shape(
        partial(_call, transformer.denoise, cfg),
        abstract_params(specs, mesh),
        given((1, TOKENS, cfg.in_channels)),
        given((1, TEXT, cfg.joint_attention_dim), dtype),
        given((1,)),
        (table, table),
    )
    assert out.shape == (1, TOKENS, 128)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("size", TEXT_ENCODERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_encode_text(size, dtype, mesh, given):
    cfg = TextEncoderConfig.from_json(QWEN | TEXT_ENCODERS[size], (9, 18, 27))
    specs = text_encoder.spec(cfg, dtype)
    assert specs.layers.q.shape[0] == 27, "layers past the last tap must not be loaded"
    assert specs.final_norm is None
    out = jax.eval_shape(
        partial(_call, text_encoder.encode, cfg),
        abstract_params(specs, mesh),
        given((1, TEXT), "int32"),
        given((1, TEXT), "int32"),
    )
    assert out.shape == (1, TEXT, TRANSFORMERS[size]["joint_attention_dim"])
    assert out.dtype == dtype


@pytest.mark.parametrize("kind", AUTOENCODERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_encode_and_decode_pictures(kind, dtype, mesh, given):
    changes, parameters = AUTOENCODERS[kind]
    cfg = AutoencoderConfig.from_json(changes)
    specs = autoencoder.spec(cfg, dtype)
    assert count(specs) == parameters
    params = abstract_params(specs, mesh)
    latents = jax.eval_shape(
        partial(_call, autoencoder.encode, cfg), params.encoder, given((1, SIDE, SIDE, 3))
    )
    assert latents.shape == (1, SIDE // 8, SIDE // 8, 32)
    assert latents.dtype == jnp.float32
    image = jax.eval_shape(
        partial(_call, autoencoder.decode, cfg),
        params.decoder,
        given((1, SIDE // 8, SIDE // 8, 32)),
    )
    assert image.shape == (1, SIDE, SIDE, 3)
    assert image.dtype == jnp.float32


def _call(function, cfg, params, *args):
    return function(params, cfg, *args)
