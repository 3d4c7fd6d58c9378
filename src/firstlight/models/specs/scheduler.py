# SPDX-License-Identifier: Apache-2.0
"""The flow-matching Euler scheduler's settings, from `scheduler/scheduler_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.models.specs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """diffusers' FlowMatchEulerDiscreteScheduler, as far as klein's pipelines use it."""

    num_train_timesteps: int = 1000
    shift: float = 3.0
    use_dynamic_shifting: bool = True
    time_shift_type: str = "exponential"
    shift_terminal: float | None = None

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], where: str = "scheduler/scheduler_config.json"
    ) -> SchedulerConfig:
        """Read and check the settings; missing keys take the defaults of diffusers' class.

        Raises CheckpointError for re-spacings and stochastic sampling, which klein does not use.
        """
        f = Fields(data, where)
        kind = "FlowMatchEulerDiscreteScheduler"
        f.only("_class_name", kind, default=kind)
        for key in (
            "invert_sigmas",
            "stochastic_sampling",
            "use_karras_sigmas",
            "use_exponential_sigmas",
            "use_beta_sigmas",
        ):
            f.only(key, False, default=False)
        time_shift = data.get("time_shift_type", "exponential")
        if time_shift not in ("exponential", "linear"):
            f.fault("time_shift_type", time_shift, "'exponential' or 'linear' is needed")
        terminal = data.get("shift_terminal")
        config = cls(
            num_train_timesteps=f.integer("num_train_timesteps", 1000),
            shift=f.number("shift", 1.0),
            use_dynamic_shifting=f.flag("use_dynamic_shifting", False),
            time_shift_type=str(time_shift),
            shift_terminal=None if terminal is None else f.number("shift_terminal"),
        )
        f.done()
        return config
