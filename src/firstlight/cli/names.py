# SPDX-License-Identifier: Apache-2.0
"""File names of pictures: a template, checked before any model is loaded."""

from __future__ import annotations

import dataclasses
import os
import string
import unicodedata
from pathlib import Path

from firstlight.config import DEFAULT_NAME
from firstlight.errors import ConfigError
from firstlight.files import check_writable
from firstlight.image import EXTENSIONS

FIELDS = ("seed", "index", "prompt")
# Leaves room for seed, index and suffix in the 255 bytes that file systems allow a name.
_SLUG_BYTES = 80


@dataclasses.dataclass(frozen=True)
class Naming:
    """A folder, and the template of the names in it."""

    folder: Path
    template: str

    def path(self, *, prompt: str, seed: int, index: int) -> Path:
        """Return the path of one picture; two pictures may get the same one."""
        return self.folder / self.template.format(prompt=slug(prompt), seed=seed, index=index)


def naming(output: str) -> Naming:
    """Read `--output`. Raises `ConfigError` if no picture could be saved under such a name."""
    if output.endswith(("/", os.sep)) or Path(output).is_dir():
        folder, template = Path(output), DEFAULT_NAME
    else:
        folder, template = Path(output).parent, Path(output).name
    _check_template(output, template)
    _check_folder(output, folder)
    return Naming(folder, template)


def slug(prompt: str) -> str:
    """Shorten a prompt to lower-case words joined by hyphens; `image` if it has no words."""
    text = unicodedata.normalize("NFKC", prompt).lower()
    words = "".join(char if char.isalnum() else " " for char in text).split()
    cut = "-".join(words).encode()[:_SLUG_BYTES].decode(errors="ignore")
    return cut.strip("-") or "image"


def _check_template(output: str, template: str) -> None:
    try:
        for _, field, _, _ in string.Formatter().parse(template):
            if field is not None and field not in FIELDS:
                allowed = ", ".join(f"{{{name}}}" for name in FIELDS)
                raise ConfigError(f"output is {output!r}; {field!r} is no field, use {allowed}")
        made = template.format(prompt="prompt", seed=0, index=0)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"output is {output!r}; it is no template ({error}), write {{{{ and }}}} for braces"
        ) from error
    if Path(made).suffix.lower() not in EXTENSIONS:
        raise ConfigError(
            f"output is {output!r}; a name ending in {' or '.join(EXTENSIONS)}, or a folder that "
            "exists, is needed"
        )


def _check_folder(output: str, folder: Path) -> None:
    if not folder.is_dir():
        braces = " (fields may stand in the file name only)" if "{" in str(folder) else ""
        raise ConfigError(f"output is {output!r}; there is no folder {str(folder)!r}{braces}")
    try:
        check_writable(folder)
    except OSError as error:
        raise ConfigError(
            f"output is {output!r}; {str(folder)!r} cannot be written to: {error.strerror}"
        ) from error
