# SPDX-License-Identifier: Apache-2.0
"""Is ready ready? The first request after a start against the steady state, and what overlaps.

usage: python benchmarks/readiness.py [--model demo] [--size SIDE] [--steps N] [--rounds 5]
                                      [--requests 10]

Each round is a process of its own with an executable cache that is filled. It prints

- the first request after `from_pretrained`, and after `warm_up`, over the median of those after it;
- programs compiled by all of these requests;
- the time to load and compile at once (nothing kept) over the longer of loading alone and compiling
  alone, imports left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time


def requests(options: argparse.Namespace, cache: str, warm: bool) -> dict[str, float]:
    from firstlight import Pipeline

    size = [(options.size, options.size)] if options.size else None
    pipe = Pipeline.from_pretrained(options.model, sizes=size, executable_cache=cache)
    if warm:
        pipe.warm_up(size)
    seconds = []
    for number in range(options.requests):
        begun = time.perf_counter()
        pipe(
            "a red apple on a blue background",
            height=options.size,
            width=options.size,
            num_inference_steps=options.steps,
            seed=number,
        )
        seconds.append(time.perf_counter() - begun)
    steady = statistics.median(seconds[1:])
    return {"first": seconds[0] / steady, "steady": steady, "compiled": pipe.programs_compiled}


def overlap(options: argparse.Namespace, how: str) -> dict[str, float]:
    from firstlight.compile import Compiler
    from firstlight.models.params import DATA
    from firstlight.placement import place
    from firstlight.programs import Programs
    from firstlight.sharding import make_mesh, param_shardings
    from firstlight.start import architecture
    from firstlight.timeline import Timeline
    from firstlight.weights.folder import open_model
    from firstlight.weights.hub import resolve
    from firstlight.weights.load import Reading
    from firstlight.weights.loading import needed, needed_specs

    mesh = make_mesh()
    begun = time.perf_counter()
    folder = open_model(resolve(options.model).path, dtype="bfloat16")
    compiler = Compiler(mesh, None)
    programs = Programs(architecture(folder), mesh, mesh.shape[DATA])
    side = options.size or folder.default_size
    wanted = programs.text_to_image(side, side, folder.max_sequence_length, "pil")
    if how != "load":
        for program in wanted:
            compiler.submit(program)
    if how != "compile":
        shardings = {k: param_shardings(v, mesh) for k, v in needed_specs(folder).items()}
        tree = place(Reading(needed(folder)), shardings, compiler, Timeline.from_now())
        del tree
    if how != "load":
        for program in wanted:
            compiler.ready(program)
    return {"seconds": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--size", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, cache = options.side
        if side in ("load", "compile", "both"):
            print(json.dumps(overlap(options, side)))
        else:
            print(json.dumps(requests(options, cache, side == "warm")))
        return
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(options.rounds + 1):
            for side in ("ready", "warm", "load", "compile", "both"):
                command = [sys.executable, *sys.argv, "--side", side, cache]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                if number:  # the first round fills the caches
                    found.setdefault(side, []).append(json.loads(done.stdout.splitlines()[-1]))
    for side, what in (("ready", "after from_pretrained"), ("warm", "after warm_up")):
        first = statistics.median(run["first"] for run in found[side])
        steady = statistics.median(run["steady"] for run in found[side])
        compiled = max(run["compiled"] for run in found[side])
        print(
            f"first request {what}: {first:.2f} x steady ({steady:.3f} s); compiled {compiled:.0f}"
        )
    middle = {
        s: statistics.median(r["seconds"] for r in found[s]) for s in ("load", "compile", "both")
    }
    ratio = middle["both"] / max(middle["load"], middle["compile"])
    print(
        f"load {middle['load']:.2f} s, compile {middle['compile']:.2f} s, both at once "
        f"{middle['both']:.2f} s: {ratio:.2f} x the longer"
    )


if __name__ == "__main__":
    main()
