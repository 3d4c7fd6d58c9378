# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: flags, then --like, then environment, then --config, then defaults."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict, Env, Yaml
from cyclopts.exceptions import CycloptsError

from firstlight.config import CONFIGS, OTHER_VARIABLES, check_keys
from firstlight.errors import ConfigError, FirstlightWarning

PREFIX = "FIRSTLIGHT_"
FLAGS_ONLY = ("like", "config")
"""They name further sources, so they cannot stand in one."""

# Two ways to say the same: a source that uses either silences both in the sources after it.
_RIVALS = ("prompt", "prompt_file")

Source = Callable[[App, tuple[str, ...], ArgumentCollection], Any]


def apply_sources(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill what the flags left open; called by cyclopts when it has read them."""
    settings = ArgumentCollection(
        argument for argument in arguments if argument.field_info.name not in FLAGS_ONLY
    )
    names = {argument.field_info.name for argument in settings if not argument.children}
    for source in _sources(arguments, names):
        rivals = [argument for argument in settings if argument.field_info.name in _RIVALS]
        decided = [argument for argument in rivals if argument.tokens]
        source(app, commands, settings)
        for argument in rivals:
            if decided and argument not in decided:
                argument.tokens.clear()
    if all(_is_given(settings, name) for name in _RIVALS):
        raise ConfigError("prompt and prompt_file exclude each other; give one of them")
    _refuse_fractions(settings)


def split_environment(hint: Any, value: str, *, delimiter: str | None) -> list[str]:
    """Take an environment variable as one value, whatever white space is in it."""
    return [value]


def _sources(arguments: ArgumentCollection, names: set[str]) -> list[Source]:
    sources: list[Source] = []
    if like := _value(arguments, "like"):
        from firstlight.cli.like import settings_of

        data = settings_of(like, other_model=_is_given(arguments, "model"))
        sources.append(Dict(data, source=like, use_commands_as_keys=False))
    sources.append(Env(PREFIX, command=False))
    if config := _value(arguments, "config"):
        sources.append(_yaml(config, names))
    return sources


def _yaml(path: str, names: set[str]) -> Yaml:
    if not (Path(path).is_file() and os.access(path, os.R_OK)):
        raise ConfigError(f"config is {path!r}; a YAML file that can be read is needed")
    source = Yaml(path, use_commands_as_keys=False, source=path)
    try:
        keys: Any = source.config
    except CycloptsError as error:
        raise ConfigError(f"{path} is not valid YAML: {error.__cause__ or error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(
            f"{path} holds a {type(keys).__name__}; lines `setting: value` are needed"
        )
    check_keys(keys, names, path)
    for key, value in keys.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {key} is a mapping; a plain value is needed")
    return source


def warn_of_unknown_variables() -> None:
    """Other versions may read other variables, so an unknown one is no error."""
    names = [field.name for config in CONFIGS for field in dataclasses.fields(config)]
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            try:
                check_keys([variable.removeprefix(PREFIX).lower()], names, f"{variable} ignored")
            except ConfigError as error:
                warnings.warn(str(error), FirstlightWarning, stacklevel=2)


def _find(arguments: ArgumentCollection, name: str) -> Any:
    return next((a for a in arguments if a.field_info.name == name), None)


def _is_given(arguments: ArgumentCollection, name: str) -> bool:
    argument = _find(arguments, name)
    return argument is not None and bool(argument.tokens)


def _value(arguments: ArgumentCollection, name: str) -> str | None:
    return _find(arguments, name).tokens[-1].value if _is_given(arguments, name) else None


def _refuse_fractions(settings: ArgumentCollection) -> None:
    """Cyclopts reads 2.5 as the whole number 2."""
    for argument in settings:
        for token in argument.tokens if argument.hint in (int, int | None) else ():
            if token.value and not re.fullmatch(r"[+-]?\d+", token.value.strip()):
                name = (token.keyword or argument.field_info.name).strip("[]")
                file = "" if token.source in ("cli", "env") else f"{token.source}: "
                raise ConfigError(f"{file}{name} is {token.value!r}; a whole number is needed")
