# SPDX-License-Identifier: Apache-2.0
"""The noise schedule against diffusers' scheduler, as klein's pipeline drives it."""

from __future__ import annotations

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from firstlight import sampling
from firstlight.models.specs.scheduler import SchedulerConfig

pytestmark = pytest.mark.parity

SETTINGS = {
    "dynamic": {"use_dynamic_shifting": True},
    "linear": {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    "fixed": {"use_dynamic_shifting": False, "shift": 3.0},
    "terminal": {"use_dynamic_shifting": True, "shift_terminal": 0.1},
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 28, 50])
@pytest.mark.parametrize("tokens", [16, 256, 1024, 4096, 4300, 4301, 16384])
def test_noise_levels(kind, steps, tokens):
    if kind == "terminal" and steps == 1:
        # The reference divides zero by zero: one level cannot be both the first and the terminal.
        steps = 2
    scheduler = FlowMatchEulerDiscreteScheduler(**SETTINGS[kind])
    mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    ours = sampling.sigmas(SchedulerConfig.from_json(SETTINGS[kind]), steps, tokens)
    # One unit in the last place of float32 at 1, which a terminal level is subtracted from.
    np.testing.assert_allclose(ours, scheduler.sigmas.numpy(), rtol=0, atol=1.2e-7)
