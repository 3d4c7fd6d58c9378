# SPDX-License-Identifier: Apache-2.0
"""Process start to a PNG of the packaged model: firstlight's first and second start, diffusers.

usage: python benchmarks/start_to_png.py [--runs 5] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import Series, run

import firstlight

PROMPT = "a red apple on a blue background"
DEMO = Path(firstlight.__file__).parent / "data" / "demo"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    first, second = Series("firstlight, first start"), Series("firstlight, second start")
    peer, floor = Series("diffusers"), Series("floor: import jax, jax.devices()")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs + 1):
            # The first round fills the operating system's file cache and is not counted.
            kept = (first, second, peer, floor) if number else [Series("warm-up") for _ in range(4)]
            cache = {"FIRSTLIGHT_EXECUTABLE_CACHE": f"{folder}/cache-{number}"}
            ours = [
                sys.executable, "-m", "firstlight", "generate", PROMPT, "--seed", "1", "--quiet",
                "--overwrite", "--dtype", options.dtype, "--output", f"{folder}/ours.png",
            ]  # fmt: skip
            theirs = [
                sys.executable, str(Path(__file__).parent / "peers" / "diffusers_generate.py"),
                str(DEMO), PROMPT, "128", options.dtype, f"{folder}/peer.png",
            ]  # fmt: skip
            run(kept[0], ours, cache)
            run(kept[2], theirs)
            run(kept[1], ours, cache)
            run(kept[3], [sys.executable, "-c", "import jax; jax.devices()"])
    print(f"process start to PNG, packaged model 128x128, {options.dtype}, medians:")
    for series in (peer, first, second, floor):
        print(series.row(base=peer))


if __name__ == "__main__":
    main()
