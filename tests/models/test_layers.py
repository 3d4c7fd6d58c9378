# SPDX-License-Identifier: Apache-2.0
"""The shared pieces: attention against the textbook formula, and the upsample's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from firstlight.models import attention as attention_module
from firstlight.models import layers
from firstlight.models.attention import attention, batched_attention, mapped_attention
from firstlight.models.params import DATA, MODEL
from firstlight.sharding import make_mesh

MESH = make_mesh()


def on_mesh(function: Callable[..., Any], *arrays: np.ndarray, heads: bool = False) -> np.ndarray:
    spec = P(DATA, None, MODEL, None) if heads else P(DATA)
    placed = [
        jax.device_put(a, NamedSharding(MESH, spec if a.ndim == 4 else P(DATA))) for a in arrays
    ]
    with jax.set_mesh(MESH):
        return np.asarray(jax.jit(function)(*placed))


def textbook(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """In float64, head by head."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    B, _, H, K = q.shape
    out = np.empty_like(q)
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[2])
            scores = q[b, :, h] @ k[b, :, g].T / np.sqrt(K)
            if mask is not None:
                scores = np.where(mask[b], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, h] = weights / weights.sum(-1, keepdims=True) @ v[b, :, g]
    return out


def operands(B: int, L: int, S: int, H: int, G: int, K: int) -> list[np.ndarray]:
    rng = np.random.default_rng(L * S + H)
    return [
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((B, L, H, K), (B, S, G, K), (B, S, G, K))
    ]


SHAPES = [(1, 1, 1, 1, 1, 2), (2, 7, 7, 4, 2, 8), (1, 33, 20, 6, 6, 16), (3, 5, 9, 4, 1, 4)]


@pytest.mark.parametrize("implementation", [mapped_attention, batched_attention])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 40, 1 << 20])
def test_attention_equals_textbook(implementation, shape, budget, monkeypatch) -> None:
    """Whole, in uneven runs of queries (padded), and one query at a time."""
    monkeypatch.setattr(attention_module, "CPU_SCORES", budget)
    monkeypatch.setattr(attention_module, "ACCELERATOR_SCORES", budget)
    q, k, v = operands(*shape)
    found = np.asarray(jax.jit(implementation)(q, k, v))
    np.testing.assert_allclose(found, textbook(q, k, v, None), atol=2e-6)


@pytest.mark.parametrize("implementation", [mapped_attention, batched_attention])
def test_masked_attention_equals_textbook(implementation, monkeypatch) -> None:
    monkeypatch.setattr(attention_module, "CPU_SCORES", 30)
    monkeypatch.setattr(attention_module, "ACCELERATOR_SCORES", 200)
    q, k, v = operands(2, 11, 11, 4, 2, 8)
    mask = np.tril(np.ones((11, 11), bool))[None].repeat(2, 0)
    mask[1, :, 4:] = False  # pads of a short prompt
    found = np.asarray(jax.jit(implementation)(q, k, v, mask))
    np.testing.assert_allclose(found, textbook(q, k, v, mask), atol=2e-6)


def test_attention_under_a_mesh() -> None:
    q, k, v = operands(2, 9, 9, 4, 2, 8)
    found = on_mesh(attention, q, k, v, heads=True)
    np.testing.assert_allclose(found, textbook(q, k, v, None), atol=2e-6)


def test_masked_keys_have_no_influence() -> None:
    q, k, v = operands(1, 6, 6, 2, 2, 8)
    mask = np.ones((1, 6, 6), bool)
    mask[:, :, 3:] = False
    before = np.asarray(jax.jit(mapped_attention)(q, k, v, mask))
    k[:, 3:], v[:, 3:] = 1e4, -1e4
    after = np.asarray(jax.jit(mapped_attention)(q, k, v, mask))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_upsample_is_repeat(dtype) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4), np.float32).astype(dtype)
    found = on_mesh(layers.upsample, x)
    np.testing.assert_array_equal(found, x.repeat(2, axis=1).repeat(2, axis=2))


def test_widened_products_are_the_same_numbers() -> None:
    """bfloat16 products are exact in float32, so only the order of the sum may differ."""
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(s, np.float32).astype(jnp.bfloat16) for s in ((8, 64), (16, 64)))

    def product(x, w):
        return layers.contract("LD,FD->LF", x, w)

    plain = np.asarray(jax.jit(product)(x, w))
    with layers.tracing_for(layers.Kernels(widen=True)):
        wide = np.asarray(jax.jit(lambda x, w: product(x, w))(x, w))
    assert wide.dtype == plain.dtype == np.float32
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    for found in (plain, wide):
        np.testing.assert_allclose(found, exact, atol=5e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("subscripts", "x", "w"),
    [
        ("BLD,SHKD->BLSHK", (2, 33, 64), (3, 2, 16, 64)),
        ("BLHK,DHK->BLD", (2, 33, 4, 16), (24, 4, 16)),
        ("BLF,DF->BLD", (2, 33, 64), (24, 64)),
        ("BE,SDE->SBD", (2, 64), (3, 24, 64)),
    ],
)
def test_flattened_weights_give_the_same_bits(subscripts, x, w, dtype) -> None:
    rng = np.random.default_rng(2)
    placed = [
        jax.device_put(rng.standard_normal(shape, np.float32).astype(dtype), sharding)
        for shape, sharding in ((x, NamedSharding(MESH, P(DATA))), (w, NamedSharding(MESH, P())))
    ]
    found = []
    for flatten in (False, True):
        with jax.set_mesh(MESH), layers.tracing_for(layers.Kernels(flatten=flatten)):
            product = jax.jit(lambda x, w: layers.contract(subscripts, x, w))
            found.append(np.asarray(product(*placed)))
    plain, flat = found
    assert flat.shape == plain.shape
    np.testing.assert_array_equal(flat, plain)
