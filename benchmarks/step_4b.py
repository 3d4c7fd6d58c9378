# SPDX-License-Identifier: Apache-2.0
"""One denoising step of the real 4B transformer with random weights, against diffusers.

usage: python benchmarks/step_4b.py [--size 512] [--steps 2] [--peer-dtype bfloat16|float32]
                                    [--rounds 1]

Each side runs in a process of its own (both together do not fit 24 GiB), alternately. The first
step of a process is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from measure import peak_memory

from firstlight.bench.real_sizes import REAL_SIZES

KLEIN_4B = {k: v for k, v in REAL_SIZES["4b"]["transformer"].items() if k != "_class_name"}
TEXT = 512


def ours(size: int, steps: int, dtype: str) -> dict[str, object]:
    import jax
    import ml_dtypes
    import numpy as np

    from firstlight.compile import Compiler
    from firstlight.models.params import map_leaves
    from firstlight.models.specs.autoencoder import AutoencoderConfig
    from firstlight.models.specs.text_encoder import TextEncoderConfig
    from firstlight.models.specs.transformer import TransformerConfig, spec
    from firstlight.programs import Architecture, Programs
    from firstlight.sharding import make_mesh, param_shardings

    mesh = make_mesh()
    arch = Architecture(
        transformer=TransformerConfig.from_json(KLEIN_4B),
        text_encoder=TextEncoderConfig.from_json(REAL_SIZES["4b"]["text_encoder"], (9, 18, 27)),
        vae=AutoencoderConfig(),
        dtype=dtype,
    )
    programs = Programs(arch, mesh, 1)
    start = time.perf_counter()
    step = Compiler(mesh, None).submit(programs.denoise(size, size, TEXT)).result()
    compile_seconds = time.perf_counter() - start

    specs = spec(arch.transformer, arch.dtype)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    block = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02).astype(kind)

    def fill(sharding: object, shape: tuple[int, ...]) -> jax.Array:
        # XLA's CPU backend takes a 64-byte aligned buffer as it is, without a copy.
        count = int(np.prod(shape))
        raw = np.empty(count * block.itemsize + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        buffer = raw[offset : offset + count * block.itemsize].view(kind)
        for begin in range(0, count, block.size):
            part = buffer[begin : begin + block.size]
            part[:] = block[: part.size]
        return jax.device_put(buffer.reshape(shape), sharding)

    shardings = dict(_leaves(param_shardings(specs, mesh)))
    params = map_leaves(lambda path, leaf: fill(shardings[path], leaf.shape), specs)
    rng = np.random.default_rng(1)
    tokens = (size // 16) ** 2
    x = jax.device_put(
        rng.standard_normal((1, tokens, 128), np.float32), programs.sharding(sharded=True)
    )
    text = jax.device_put(
        rng.standard_normal((1, TEXT, 7680), np.float32).astype(kind),
        programs.sharding(sharded=True),
    )
    rope = jax.device_put(programs.rope(size, size, TEXT), programs.sharding(sharded=False))
    levels = jax.device_put(
        np.asarray([0.9, 0.9, 0.8], np.float32), programs.sharding(sharded=False)
    )
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        step(params, x, text, rope, levels)[0].block_until_ready()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "compile": compile_seconds, "peak": peak_memory()}


def _leaves(tree: object):
    from firstlight.models.params import named_leaves

    return named_leaves(tree)


def peer(size: int, steps: int, dtype: str) -> dict[str, object]:
    import torch
    from diffusers import Flux2Transformer2DModel

    kind = getattr(torch, dtype)
    with torch.device("meta"):
        model = Flux2Transformer2DModel(**KLEIN_4B)
    model = model.to(kind).to_empty(device="cpu").eval()
    block = (torch.randn(1 << 22) * 0.02).to(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for begin in range(0, flat.numel(), block.numel()):
                part = flat[begin : begin + block.numel()]
                part.copy_(block[: part.numel()])
    side = size // 16
    img_ids = torch.zeros(side, side, 4)
    img_ids[..., 1] = torch.arange(side)[:, None]
    img_ids[..., 2] = torch.arange(side)
    txt_ids = torch.zeros(TEXT, 4)
    txt_ids[:, 3] = torch.arange(TEXT)
    inputs = dict(
        hidden_states=torch.randn(1, side * side, 128, dtype=kind),
        encoder_hidden_states=torch.randn(1, TEXT, 7680, dtype=kind),
        timestep=torch.tensor([0.9], dtype=kind),
        img_ids=img_ids.view(1, -1, 4),
        txt_ids=txt_ids[None],
        guidance=None,
    )
    seconds = []
    with torch.no_grad():
        for _ in range(steps + 1):
            start = time.perf_counter()
            model(**inputs)
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "peak": peak_memory()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peer-dtype", default="bfloat16")
    parser.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, dtype = (
            (ours, options.dtype) if options.side == "ours" else (peer, options.peer_dtype)
        )
        print(json.dumps(side(options.size, options.steps, dtype)))
        return
    results: dict[str, list[dict]] = {"ours": [], "peer": []}
    for _ in range(options.rounds):
        for side in ("ours", "peer"):
            command = [sys.executable, *sys.argv, "--side", side]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[side].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {}
    for side, dtype in (("ours", options.dtype), ("peer", options.peer_dtype)):
        seconds = [value for result in results[side] for value in result["seconds"]]
        medians[side] = statistics.median(seconds)
        peak = max(result["peak"] for result in results[side]) / 2**30
        name = "firstlight" if side == "ours" else "diffusers"
        print(f"{name:10} {dtype:9} {medians[side]:8.2f} s a step  peak {peak:.2f} GiB  {seconds}")
    print(f"compile: {results['ours'][0]['compile']:.1f} s")
    print(f"speed, ours / peer: {medians['peer'] / medians['ours']:.2f}x at {options.size} px")


if __name__ == "__main__":
    main()
