# SPDX-License-Identifier: Apache-2.0
"""Schedule, position ids and latent geometry: the reference's numbers, and index by index."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from firstlight import sampling
from firstlight.errors import RequestError
from firstlight.models.params import register_pytrees
from firstlight.models.specs.autoencoder import LatentStats
from firstlight.models.specs.scheduler import SchedulerConfig
from firstlight.models.specs.transformer import TransformerConfig
from firstlight.sharding import make_mesh

register_pytrees()

KLEIN = SchedulerConfig()

# (tokens, steps): mu, and the noise levels of FlowMatchEulerDiscreteScheduler (None: not listed).
SCHEDULES = {
    (1024, 4): (2.030689708, [1.0, 0.95808536, 0.88398188, 0.71749657, 0]),
    (4096, 4): (2.291179894, [1.0, 0.96738404, 0.90814394, 0.76719993, 0]),
    (4096, 8): (
        2.267890439,
        [1, 0.98542547, 0.96664113, 0.94151473, 0.90618259, 0.85284168, 0.76301450, 0.57980675, 0],
    ),
    (4301, 4): (1.184696930, [1.0, 0.90748519, 0.76579130, 0.52150786, 0]),
    (8100, 4): (1.827753660, [1.0, 0.94913447, 0.86149389, 0.67461681, 0]),
    (16, 2): (None, [1.0, 0.87657392, 0]),
}


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh()):
        yield


@pytest.mark.parametrize("tokens, steps", SCHEDULES)
def test_schedule_is_the_references(tokens, steps):
    mu, levels = SCHEDULES[tokens, steps]
    ours = sampling.sigmas(KLEIN, steps, tokens)
    assert ours.dtype == np.float32
    # The table has eight decimals; one unit of float32 below 1 is 6e-8.
    np.testing.assert_allclose(ours, levels, rtol=0, atol=6.5e-8)
    if mu is not None:
        assert sampling.mu(tokens, steps) == pytest.approx(mu, abs=6e-10)


def test_long_schedule_is_the_references():
    levels = sampling.sigmas(KLEIN, 50, 4096)
    assert sampling.mu(4096, 50) == pytest.approx(2.023351157, abs=6e-10)
    np.testing.assert_allclose(
        levels[:4], [1.0, 0.99730909, 0.99452138, 0.99163157], rtol=0, atol=6.5e-8
    )
    np.testing.assert_allclose(
        levels[-4:], [0.32559332, 0.23963118, 0.13371895, 0], rtol=0, atol=6.5e-8
    )


def test_mu_jumps_after_4300_tokens():
    assert sampling.mu(4300, 4) == pytest.approx(2.308, abs=5e-4)
    assert sampling.mu(4301, 4) == pytest.approx(1.185, abs=5e-4)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 50])
def test_every_schedule_falls_from_one_to_zero(steps):
    levels = sampling.sigmas(KLEIN, steps, 256)
    assert levels.shape == (steps + 1,)
    assert levels[0] == 1 and levels[-1] == 0
    assert (np.diff(levels) < 0).all()


def test_custom_levels_are_shifted_with_the_mu_of_the_step_count():
    even = sampling.sigmas(KLEIN, 4, 1024)
    same = sampling.sigmas(KLEIN, 4, 1024, [1.0, 0.75, 0.5, 0.25])
    np.testing.assert_array_equal(even, same)
    two = sampling.sigmas(KLEIN, 4, 1024, [1.0, 0.25])
    np.testing.assert_array_equal(two, even[[0, 3, 4]])


def test_fixed_and_linear_shifts_and_a_terminal_level():
    fixed = SchedulerConfig(use_dynamic_shifting=False, shift=3.0)
    np.testing.assert_allclose(
        sampling.sigmas(fixed, 4, 1024), [1, 9 / 10, 3 / 4, 1 / 2, 0], rtol=1e-6
    )
    linear = SchedulerConfig(time_shift_type="linear")
    mu = sampling.mu(1024, 2)
    np.testing.assert_allclose(sampling.sigmas(linear, 2, 1024), [1, mu / (mu + 1), 0], rtol=1e-6)
    terminal = sampling.sigmas(SchedulerConfig(shift_terminal=0.1), 4, 1024)
    assert terminal[0] == 1 and terminal[-2] == pytest.approx(0.1, abs=1e-7) and terminal[-1] == 0


def test_one_step_cannot_be_stretched_to_a_terminal_level():
    with pytest.raises(RequestError, match=r"num_inference_steps is 1; .* at least 2"):
        sampling.sigmas(SchedulerConfig(shift_terminal=0.1), 1, 1024)


def test_a_constant_shift_knows_no_size():
    small, large = (sampling.sigmas(KLEIN, 4, n, time_shift="constant") for n in (1024, 8100))
    np.testing.assert_array_equal(small, large)
    levels = np.array([1, 0.75, 0.5, 0.25])
    factor = np.exp(2.02)
    np.testing.assert_allclose(small[:-1], factor / (factor + 1 / levels - 1), rtol=1e-6)


def test_position_ids():
    assert sampling.text_ids(3).tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]]
    assert sampling.image_ids(2, 3).tolist() == [
        [0, 0, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 2, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 2, 0],
    ]
    assert sampling.image_ids(1, 2, time=20).tolist() == [[20, 0, 0, 0], [20, 0, 1, 0]]


def test_rope_table_gives_each_axis_its_own_dimensions_and_frequencies():
    cfg = TransformerConfig(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=20,
        num_attention_heads=1,
        joint_attention_dim=8,
        axes_dims_rope=(2, 4, 6, 8),
        rope_theta=100.0,
    )
    ids = np.array([[10, 3, 5, 7], [0, 0, 0, 511]])
    cos, sin = sampling.rope_table(cfg, ids)
    assert cos.shape == sin.shape == (2, 10)
    assert cos.dtype == sin.dtype == np.float32
    for token in range(2):
        column = 0
        for axis, size in enumerate(cfg.axes_dims_rope):
            for i in range(size // 2):
                angle = float(ids[token, axis]) * 100.0 ** (-2 * i / size)
                assert cos[token, column] == pytest.approx(np.cos(angle), abs=1e-7)
                assert sin[token, column] == pytest.approx(np.sin(angle), abs=1e-7)
                column += 1


def test_patchify_orders_channels_then_rows_then_columns():
    x = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    out = np.asarray(jax.jit(sampling.patchify)(x))
    assert out.shape == (2, 2, 3, 12)
    for b, y, column, c, i, j in np.ndindex(2, 2, 3, 3, 2, 2):
        assert out[b, y, column, 4 * c + 2 * i + j] == x[b, 2 * y + i, 2 * column + j, c]


def test_unpatchify_inverts_patchify():
    x = np.arange(1 * 6 * 4 * 5, dtype=np.float32).reshape(1, 6, 4, 5)
    both = jax.jit(lambda x: sampling.unpatchify(sampling.patchify(x)))
    np.testing.assert_array_equal(both(x), x)


def test_pack_lists_cells_row_by_row_and_unpack_puts_them_back():
    x = np.arange(2 * 3 * 2 * 5, dtype=np.float32).reshape(2, 3, 2, 5)
    tokens = np.asarray(jax.jit(sampling.pack)(x))
    assert tokens.shape == (2, 10, 3)
    for b, y, column in np.ndindex(2, 2, 5):
        np.testing.assert_array_equal(tokens[b, y * 5 + column], x[b, :, y, column])
    grids = jax.jit(lambda x: sampling.unpack(x, 2, 5))(tokens)
    np.testing.assert_array_equal(grids, x.transpose(0, 2, 3, 1))


def test_denormalise_inverts_normalise_and_adds_the_epsilon_to_the_variance():
    stats = LatentStats(
        mean=np.array([0.5, -1.0, 0.0, 2.0], np.float32),
        var=np.array([4.0, 0.25, 0.0, 1.0], np.float32),
    )
    x = np.ones((1, 1, 1, 4), np.float32)
    out = jax.jit(sampling.denormalise, static_argnums=2)(x, stats, 1e-4)
    expected = np.sqrt(stats.var.astype(np.float64) + 1e-4) + stats.mean
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=1e-6)
    back = jax.jit(sampling.normalise, static_argnums=2)(out, stats, 1e-4)
    np.testing.assert_allclose(back, x, rtol=1e-4)


def test_euler_step_moves_against_the_velocity():
    x, v = np.float32([1.0, -2.0]), np.float32([3.0, 0.5])
    moved = jax.jit(sampling.euler_step)(x, v, np.float32(0.75), np.float32(0.25))
    np.testing.assert_array_equal(moved, np.float32([-0.5, -2.25]))


def test_bytes_round_half_to_even_after_clipping():
    # 0.5/255 and its like are no exact floats: halves are made in the scaled value itself.
    halves = np.array([0.5, 1.5, 2.5, 3.5, 126.5, 127.5, 254.5], np.float32)
    units = halves / np.float32(255)
    exact = units * np.float32(255) == halves
    assert exact.sum() >= 4, "too few exact halves for this test to say anything"
    out = np.asarray(jax.jit(sampling.to_uint8)(units))
    assert out.dtype == np.uint8
    np.testing.assert_array_equal(out[exact], np.array([0, 2, 2, 4, 126, 128, 254])[exact])


def test_decoded_values_are_clipped_to_the_unit_interval():
    decoded = np.float32([-3.0, -1.0, 0.0, 0.5, 1.0, 1.001, 9.0])
    out = jax.jit(sampling.to_unit)(decoded)
    np.testing.assert_array_equal(out, np.float32([0, 0, 0.5, 0.75, 1, 1, 1]))


@pytest.mark.parametrize(
    "height, width, multiple",
    [(64, 64, 16), (1024, 672, 16), (8, 10, 2), (16, 20, 4), (1072, 64, 16)],
)
def test_allowed_sizes_pass(height, width, multiple):
    sampling.check_size(height, width, multiple, 16384)


@pytest.mark.parametrize(
    "height, width, words",
    [
        (100, 128, ["height", "100", "96", "112"]),
        (128, 1025, ["width", "1025", "1024", "1040"]),
        (48, 128, ["height", "48", "64"]),
        (128, 0, ["width", "0", "64"]),
        (128, -16, ["width", "-16", "64"]),
        (128.0, 128, ["height", "128.0", "whole"]),
        (True, 128, ["height", "True", "whole"]),
        (4096, 4096, ["4096x4096", "65536", "16384"]),
    ],
)
def test_other_sizes_are_refused_with_the_nearest_allowed_ones(height, width, words):
    with pytest.raises(RequestError) as refusal:
        sampling.check_size(height, width, 16, 16384)
    for word in words:
        assert word in str(refusal.value)
