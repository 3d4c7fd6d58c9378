# SPDX-License-Identifier: Apache-2.0
"""Random small models and requests. Imports neither torch nor jax.

Every property is dealt like cards: each of its values is used about equally often, in an order
shuffled by a fixed seed of its own. So few cases cover every value and many pairs of values.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

VOCABULARY = 3008
"""At least the entries of the packaged tokenizer, which all cases use."""

LONG = "a snowman on a purple background, a fox, a pizza and a red apple " * 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model folder (configurations under the reference's key names) and one request."""

    name: str
    seed: int
    transformer: dict[str, Any]
    text_encoder: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]
    taps: tuple[int, ...]
    max_sequence_length: int
    prompts: tuple[str, ...]
    rows: int
    columns: int
    steps: int

    @property
    def factor(self) -> int:
        """Pixels per latent cell."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def height(self) -> int:
        return 2 * self.factor * self.rows

    @property
    def width(self) -> int:
        return 2 * self.factor * self.columns


# Each name's values are dealt independently of the other names'.
VALUES: dict[str, list[Any]] = {
    "heads": [1, 2, 3, 4],
    "axes": [
        (4, 4, 4, 4),
        (2, 2, 2, 2),
        (8, 4, 4, 16),
        (2, 6, 4, 4),
        (6, 10, 8, 8),
        (16, 8, 8, 32),
    ],
    "double": [1, 2, 3],
    "single": [3, 1, 2],
    "mlp_ratio": [3.0, 2.0, 2.5, 4.0],
    "time_channels": [256, 64],
    "theta": [2000, 100, 10000],
    "eps": [1e-6, 1e-5],
    "levels": [1, 2, 3, 4],
    "groups": [1, 2, 4],
    "decoder": ["same", "narrower", "any"],
    "latent_channels": [1, 2, 4, 8],
    "layers_per_block": [1, 2],
    "quant": [(True, True), (False, False), (True, False), (False, True)],
    "mid_attention": [True, True, False],
    "bn_eps": [1e-4, 1e-2],
    "hidden": [16, 24, 40],
    "gqa": [(2, 2), (4, 2), (4, 1), (6, 3), (3, 1)],
    "text_head": [8, 16, 32],
    "layers": [1, 2, 3, 4],
    "taps": ["last", "first", "reversed", "last first", "embedding", "middle"],
    "text_theta": [1e6, 1e4],
    "tied": [True, False],
    "max_length": [16, 24, 40],
    "prompts": [
        ("a",),
        ("a cat", LONG),
        ("pizza, purple background", "x", "a grinning face on a gray background"),
        (LONG,),
        ("Émile's naïve café — 42 日本 😀",),
        ("two words", "two words"),
    ],
    "rows": [4, 5, 6, 9],
    "columns": [4, 5, 7, 8],
    "steps": [1, 2, 3],
    "shifting": ["exponential", "linear", "fixed", "terminal"],
}


def cases(count: int, seed: int = 0) -> list[Case]:
    """`count` cases; the same ones for the same arguments, on every machine."""
    columns = {}
    for name, values in VALUES.items():
        dealt = [values[i % len(values)] for i in range(count)]
        random.Random(f"{seed}/{name}").shuffle(dealt)
        columns[name] = dealt
    return [
        _case(1000 * seed + i, {name: dealt[i] for name, dealt in columns.items()})
        for i in range(count)
    ]


def _case(seed: int, pick: dict[str, Any]) -> Case:
    layers, taps = pick["layers"], _taps(pick["taps"], pick["layers"])
    return Case(
        name=f"case{seed}",
        seed=seed,
        transformer={
            "patch_size": 1,
            "in_channels": 4 * pick["latent_channels"],
            "num_layers": pick["double"],
            "num_single_layers": pick["single"],
            "attention_head_dim": sum(pick["axes"]),
            "num_attention_heads": pick["heads"],
            "joint_attention_dim": pick["hidden"] * len(taps),
            "timestep_guidance_channels": pick["time_channels"],
            "mlp_ratio": pick["mlp_ratio"],
            "axes_dims_rope": pick["axes"],
            "rope_theta": pick["theta"],
            "eps": pick["eps"],
            "guidance_embeds": False,
        },
        text_encoder={
            "vocab_size": VOCABULARY,
            "hidden_size": pick["hidden"],
            "intermediate_size": 2 * pick["hidden"] + 8,
            "num_hidden_layers": layers,
            "num_attention_heads": pick["gqa"][0],
            "num_key_value_heads": pick["gqa"][1],
            "head_dim": pick["text_head"],
            "rms_norm_eps": pick["eps"],
            "rope_parameters": {"rope_type": "default", "rope_theta": pick["text_theta"]},
            "tie_word_embeddings": pick["tied"],
        },
        vae=_vae(random.Random(seed), pick),
        scheduler=_scheduler(pick["shifting"]),
        taps=taps,
        max_sequence_length=pick["max_length"],
        prompts=pick["prompts"],
        rows=pick["rows"],
        columns=pick["columns"],
        # With a single step the reference divides zero by zero where a terminal level is set.
        steps=max(2, pick["steps"]) if pick["shifting"] == "terminal" else pick["steps"],
    )


def _taps(kind: str, layers: int) -> tuple[int, ...]:
    """Indices of hidden states: 0 is the embedding, `layers` the final-normed state."""
    return {
        "last": (layers,),
        "first": (1,),
        "reversed": tuple(range(layers, 0, -1)),
        "last first": (layers, 1, 1),
        "embedding": (0, layers, 1),
        "middle": (max(1, layers - 1), 0),
    }[kind]


def _vae(draw: random.Random, pick: dict[str, Any]) -> dict[str, Any]:
    levels, groups = pick["levels"], pick["groups"]
    widths = [groups * draw.randint(2, 6) for _ in range(levels)]
    decoder = {
        "same": None,
        "narrower": [max(groups, width // groups // 2 * groups) for width in widths],
        "any": [groups * draw.randint(1, 7) for _ in range(levels)],
    }[pick["decoder"]]
    return {
        "block_out_channels": widths,
        "decoder_block_out_channels": decoder,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": pick["layers_per_block"],
        "latent_channels": pick["latent_channels"],
        "norm_num_groups": groups,
        "sample_size": 1024,
        "use_quant_conv": pick["quant"][0],
        "use_post_quant_conv": pick["quant"][1],
        "mid_block_add_attention": pick["mid_attention"],
        "batch_norm_eps": pick["bn_eps"],
    }


def _scheduler(kind: str) -> dict[str, Any]:
    return {
        "exponential": {"use_dynamic_shifting": True, "shift": 3.0},
        "linear": {"use_dynamic_shifting": True, "time_shift_type": "linear"},
        "fixed": {"use_dynamic_shifting": False, "shift": 3.0},
        "terminal": {"use_dynamic_shifting": True, "shift_terminal": 0.1},
    }[kind]
