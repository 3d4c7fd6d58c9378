# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import pytest

from firstlight.config import (
    CONFIGS,
    MAX_SEED,
    EditConfig,
    EngineConfig,
    GenerateConfig,
    PictureConfig,
    ReportConfig,
    check_keys,
)
from firstlight.errors import ConfigError

ENGINE = [
    ("model", "", "not blank"),
    ("model", 4, "not blank"),
    ("revision", " ", "not blank"),
    ("dtype", "float16", "'bfloat16' or 'float32'"),
    ("is_distilled", "yes", "true or false"),
    ("offline", 1, "true or false"),
    ("cache_dir", "", "a path"),
    ("images_per_device", 0, "at least 1"),
    ("images_per_device", True, "whole number"),
    ("mesh", "", "not blank"),
    ("transformer", "", "a path"),
    ("vae", 3, "a path"),
    ("text_encoder", "", "a path"),
    ("tokenizer", "", "a path"),
    ("executable_cache", "", "not blank"),
    ("offload", "vae", "'text_encoder'"),
    ("vae_tiling", "yes", "true or false"),
    ("staging_bytes", 1000, "at least 1048576"),
]
GENERATE = [
    ("prompt", ("a fox", "  "), "none of them blank"),
    ("prompt", "a fox", "a list of prompts"),
    ("prompt_file", "", "a path"),
    ("output", "", "not blank"),
    ("overwrite", None, "true or false"),
    ("compression", 10, "at most 9"),
    ("width", 0, "at least 1"),
    ("height", 64.0, "whole number"),
    ("steps", 0, "at least 1"),
    ("guidance", -1.0, "at least 0"),
    ("guidance", float("nan"), "finite"),
    ("guidance", float("inf"), "finite"),
    ("time_shift", "none", "'reference' or 'constant'"),
    ("negative_prompt", " ", "not blank"),
    ("seed", -1, "at least 0"),
    ("seed", MAX_SEED + 1, str(MAX_SEED)),
    ("num_images", 0, "at least 1"),
    ("max_sequence_length", 0, "at least 1"),
    ("repeat", 0, "at least 1"),
    ("preview", "", "a path"),
    ("profile", "", "a path"),
]
EDIT = [
    ("inputs", "cat.png", "names of pictures"),
    ("mask", "", "a path"),
    ("strength", -0.5, "from 0 to 1"),
    ("strength", 1.5, "from 0 to 1"),
    ("padding_mask_crop", -1, "at least 0"),
    ("reference", ("",), "none of them blank"),
    ("paste_back", 1, "true or false"),
]
REPORT = [(name, "on", "true or false") for name in ("json", "quiet", "verbose", "debug")]


@pytest.mark.parametrize(
    ("config", "field", "value", "allowed"),
    [(EngineConfig, *case) for case in ENGINE]
    + [(GenerateConfig, *case) for case in GENERATE]
    + [(EditConfig, *case) for case in EDIT]
    + [(ReportConfig, *case) for case in REPORT],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(config, field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        config(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} is {value!r}; ")
    assert allowed in message


def test_every_setting_is_refused_something_above():
    tested = {(EngineConfig, name) for name, *_ in ENGINE}
    tested |= {(GenerateConfig, name) for name, *_ in GENERATE}
    shared = {field.name for field in dataclasses.fields(PictureConfig)}
    tested |= {(EditConfig, name) for name in shared} | {(EditConfig, name) for name, *_ in EDIT}
    tested |= {(ReportConfig, name) for name, *_ in REPORT}
    assert tested == {(c, field.name) for c in CONFIGS for field in dataclasses.fields(c)}


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_allowed_and_every_setting_explains_itself(config):
    config()
    for field in dataclasses.fields(config):
        assert field.metadata["help"].endswith("."), field.name
        assert field.metadata["allowed"].words, field.name


@pytest.mark.parametrize("config", CONFIGS)
def test_objects_are_frozen_and_refuse_unknown_names(config):
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), field, None)
    with pytest.raises(TypeError, match="stepz"):
        config(stepz=4)


def test_names_are_unique_since_flags_of_all_classes_meet_on_one_command_line():
    for picture in (GenerateConfig, EditConfig):
        met = (EngineConfig, picture, ReportConfig)
        names = [field.name for config in met for field in dataclasses.fields(config)]
        assert sorted(names) == sorted(set(names))


def test_quiet_and_verbose_exclude_each_other():
    with pytest.raises(ConfigError, match="quiet and verbose exclude each other"):
        ReportConfig(quiet=True, verbose=True)


def test_an_unknown_key_is_refused_with_the_nearest_allowed_one():
    check_keys(["num-images", "steps"], ["steps", "num_images"], "run.yaml")
    with pytest.raises(ConfigError, match=r"run.yaml: unknown setting 'stepz'; did you mean steps"):
        check_keys(["stepz"], ["steps", "seed"], "run.yaml")
    with pytest.raises(ConfigError, match=r"allowed are seed, steps"):
        check_keys([17], ["steps", "seed"], "run.yaml")
