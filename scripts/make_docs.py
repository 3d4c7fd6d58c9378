# SPDX-License-Identifier: Apache-2.0
"""Write docs/configuration.md and docs/cli.md from the settings and the command line.

Run it after changing either; a test compares what is committed with what this would write.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from firstlight.cli.app import build_app
from firstlight.cli.sources import FLAGS_ONLY, PREFIX
from firstlight.config import CONFIGS, OTHER_VARIABLES

DOCS = Path(__file__).resolve().parent.parent / "docs"
ONLY = " and ".join(f"`--{name}`" for name in FLAGS_ONLY)
NOTICE = (
    "<!-- Written by scripts/make_docs.py; change src/firstlight/config.py or cli/ instead. -->"
)

CONFIGURATION = f"""{NOTICE}

# Configuration

Every setting can be given as a flag, as an environment variable, or in a YAML file named by
`--config`. Where several give the same one, the first of these wins:

1. flags,
2. the picture named by `--like`,
3. environment variables,
4. the YAML file named by `--config`,
5. the defaults below.

`prompt` and `prompt_file` say the same in two ways: the first place that gives either one decides,
and giving both in the same place is an error. {ONLY} are flags only.

An unknown flag or YAML key is an error; an unknown `{PREFIX}*` variable is a warning. Flags write
hyphens (`--num-images`), YAML keys either (`num_images`, `num-images`). A flag that is true or
false is negated by `--no-`. An environment variable holds one prompt; a YAML file may hold a list:

```yaml
prompt:
  - a red apple on a blue background
  - a fox
steps: 4
seed: 7
output: pictures/{{prompt}}-{{seed}}.png
```
"""

CLI = f"""{NOTICE}

# Command line

Results go to stdout, everything else to stderr. Every run ends with one line that says where its
time went; `--verbose` makes it a table. `generate` prints one line for each picture: its
path, a tab, and its seed. With `--json` it prints one document instead:

- `images`: a list of `path`, `seed`, `prompt` and `metadata` (what the PNG file carries);
- `timings`: the seconds since the process started. `critical_path` is a list of (name, seconds)
  that adds up to `total`: what the run had to wait for, one thing after the other, with every wait
  replaced by the work that was waited for. It begins with `process start`, from the moment when the
  operating system started the process (a shell that replaced itself by firstlight with `exec`
  included) to firstlight's first line; `unexplained` is the part that nothing covers and
  `limited_by` the longest. `spans` is all that went on, in lanes that overlap, with facts (bytes
  and bytes per second of reads, hit or miss of kept programs and why). `memory` says what the
  parameters need and what is free, `stages` what the pictures took;
- `repeat`: the `seconds` of each repetition, their `min` and `median`.

Exit codes: 0 success, 1 failure, 2 wrong usage or setting, 130 interrupted with Ctrl-C. A failure
prints one line, `firstlight: error: ...`; `--debug` adds the traceback.

A picture appears under its name only when it is complete, and never replaces a file unless
`--overwrite` is given. Its settings, prompt included, are stored in it; `firstlight info FILE`
shows them and `firstlight generate --like FILE` makes it again. The result is equal bit for bit
where versions, device kind, usable cores and mesh are equal; a warning names what is not.

"""


def configuration() -> str:
    """Return docs/configuration.md."""
    parts = [CONFIGURATION]
    for config in CONFIGS:
        parts.append(f"## {config.__name__}\n\n{config.__doc__}\n")
        parts.append("| Setting | Variable | Allowed | Default | Meaning |\n|---|---|---|---|---|")
        parts += [_row(field) for field in dataclasses.fields(config)]
        parts.append("")
    parts.append("## Other environment variables\n\n| Variable | Meaning |\n|---|---|")
    parts += [f"| `{name}` | {_cell(text)} |" for name, text in OTHER_VARIABLES.items()]
    return "\n".join(parts) + "\n"


def _row(field: dataclasses.Field[Any]) -> str:
    allowed = field.metadata["allowed"].words.removesuffix(",")
    default = "" if field.default in (None, ()) else f"`{str(field.default).replace('|', '/')}`"
    variable = f"`{PREFIX}{field.name.upper()}`"
    text = _cell(field.metadata["help"])
    return f"| `{field.name}` | {variable} | {allowed} | {default} | {text} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def cli() -> str:
    """Return docs/cli.md."""
    text = build_app().generate_docs(output_format="markdown", usage_name="firstlight")
    # What comes before the first command repeats the names of the commands.
    return CLI + text[text.index("## firstlight ") :].strip() + "\n"


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration(), encoding="utf-8")
    (DOCS / "cli.md").write_text(cli(), encoding="utf-8")
