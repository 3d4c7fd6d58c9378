# SPDX-License-Identifier: Apache-2.0
"""The errors a caller may catch; each says what was given, what is allowed and what to do."""


class FirstlightError(Exception):
    """Base of every error raised on purpose. The command line prints it as one line and exits 1."""


class ConfigError(FirstlightError):
    """A setting (flag, environment variable, YAML key, constructor argument) is not usable."""


class CheckpointError(FirstlightError):
    """A model folder is missing, incomplete, damaged or of another architecture.

    `problems` lists every fault found, one line each: a checkpoint is checked whole before any
    weight is read, so that a user repairs it once.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  - ".join((message, *self.problems)))


class RequestError(FirstlightError):
    """A call asks for something that cannot be made (its size, prompt, seed, an argument)."""


class OverloadedError(FirstlightError):
    """A server has no room for another request now; trying again later may work."""


class DeviceError(FirstlightError):
    """The computation failed on the device, or produced values that are no picture."""


class FirstlightWarning(UserWarning):
    """Something was done differently from what was asked, and the result may surprise."""
