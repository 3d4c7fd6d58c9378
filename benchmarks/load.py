# SPDX-License-Identifier: Apache-2.0
"""Loading the components of a real-size checkpoint: firstlight, diffusers, and a raw read.

usage: python benchmarks/load.py FOLDER [--rounds 3] [--cold] [--components transformer ...]

FOLDER comes from `firstlight bench make`. Every figure is a process of its own, in turn; imports
are not counted. Warm: all files are in the system's file cache (one component at a time, since
files and parameters together need twice its size). Cold: the system is asked to forget them first
(`--cold`; it may keep some). Before each figure as much memory as it needs is used and freed again:
in a virtual machine, memory that was never used costs several times the read itself (`--untouched`
leaves that in).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

COMPONENTS = ("text_encoder", "transformer", "vae")


def ours(folder: str, component: str) -> dict[str, float]:
    import time

    from measure import peak_memory, resident_memory

    from firstlight.compile import Compiler
    from firstlight.placement import place
    from firstlight.sharding import make_mesh, param_shardings
    from firstlight.timeline import Timeline
    from firstlight.weights.folder import open_model
    from firstlight.weights.load import Reading

    mesh = make_mesh()
    before = resident_memory()
    start = time.perf_counter()
    model = open_model(folder, dtype="bfloat16")
    shardings = param_shardings(model.specs[component], mesh)
    plan = model.plans[component]
    tree = place(Reading(plan), shardings, Compiler(mesh, None), Timeline.from_now())
    seconds = time.perf_counter() - start
    del tree
    return {"seconds": seconds, "bytes": plan.nbytes, "peak": peak_memory() - before}


def raw(folder: str, component: str) -> dict[str, float]:
    from firstlight.weights.folder import open_model
    from firstlight.weights.storage import raw_read

    nbytes, seconds = raw_read(open_model(folder, dtype="bfloat16").plans[component])
    return {"seconds": seconds, "bytes": nbytes, "peak": 0}


def prepare(folder: Path, component: str, *, cold: bool, touch: bool) -> None:
    """Only this component's files in the file cache, or none at all; memory that was used."""
    from firstlight.weights.storage import evict

    for other in COMPONENTS:
        evict(sorted((folder / other).glob("*.safetensors")))
    if not cold:
        for path in sorted((folder / component).glob("*.safetensors")):
            with open(path, "rb", buffering=0) as file:
                while file.read(64 << 20):
                    pass
    if touch:
        size = sum(path.stat().st_size for path in (folder / component).glob("*.safetensors"))
        subprocess.run([sys.executable, "-c", TOUCH, str(size * (2 if cold else 1))], check=True)


TOUCH = """
import sys, mmap
size = int(sys.argv[1]) + (1 << 30)
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, size, 4096):
    memory[at] = 1
"""


def run(side: str, folder: str, component: str) -> dict[str, float]:
    here = Path(__file__).parent
    command = [sys.executable, str(here / "load.py"), folder, "--side", side, component]
    if side == "peer":
        command = [sys.executable, str(here / "peers" / "diffusers_load.py"), folder, component]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--untouched", action="store_true")
    parser.add_argument("--components", nargs="+", default=list(COMPONENTS), choices=COMPONENTS)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, component = options.side
        print(json.dumps({"ours": ours, "raw": raw}[side](options.folder, component)))
        return
    print(f"{'cold' if options.cold else 'warm'} file cache, medians of {options.rounds}:")
    for component in options.components:
        found: dict[str, list[dict[str, float]]] = {"raw": [], "ours": [], "peer": []}
        for number in range(options.rounds):
            # Turned about, so that none always comes after the same other one.
            sides = list(found)[number % 3 :] + list(found)[: number % 3]
            for side in sides:
                prepare(
                    Path(options.folder),
                    component,
                    cold=options.cold,
                    touch=not options.untouched,
                )
                found[side].append(run(side, options.folder, component))
        middle = {
            side: statistics.median(r["seconds"] for r in runs) for side, runs in found.items()
        }
        for side, runs in found.items():
            peak, size = max(r["peak"] for r in runs), runs[0]["bytes"]
            seconds = ", ".join(f"{r['seconds']:.2f}" for r in runs)
            print(
                f"{component:12} {side:5} {middle[side]:6.2f} s  {size / 1e9:5.2f} GB  "
                f"peak {peak / 1e9:5.2f} GB ({peak / size:.2f} x)  [{seconds}]"
            )
        print(
            f"{component:12} ours / raw {middle['ours'] / middle['raw']:.2f}, "
            f"ours / diffusers {middle['ours'] / middle['peer']:.2f}"
        )


if __name__ == "__main__":
    main()
