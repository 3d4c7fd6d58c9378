# SPDX-License-Identifier: Apache-2.0
"""Black Forest Labs' own files, quantised ones, and components from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny
from reading import all_of, assert_same_bits
from safetensors.numpy import load_file, save_file

from firstlight.errors import CheckpointError
from firstlight.weights.folder import missing_files, open_model

FP8 = ml_dtypes.float8_e4m3fn
PREFIX = "model.diffusion_model."

# Large enough for nvfp4's tiles: 128 rows, 64 columns.
WIDE = {
    "transformer": {
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": [8, 8, 8, 8],
        "mlp_ratio": 2.0,
    }
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "m", **WIDE)


def stored(folder: Path, component: str) -> dict[str, np.ndarray]:
    return load_file(folder / component / f"{tiny.STEMS[component]}.safetensors")


def bfl_transformer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The spec's table, written down backwards: from diffusers' names to the file's."""
    made: dict[str, np.ndarray] = {}
    singles = {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
        "proj_out": "final_layer.linear",
    }
    for ours, theirs in singles.items():
        made[f"{theirs}.weight"] = tensors[f"{ours}.weight"]
    scale, shift = np.split(tensors["norm_out.linear.weight"], 2)
    made["final_layer.adaLN_modulation.1.weight"] = np.concatenate([shift, scale])
    for n in range(2):
        ours, theirs = f"transformer_blocks.{n}", f"double_blocks.{n}"
        for stream, names, norm, out, ff in (
            ("img", ("to_q", "to_k", "to_v"), "norm_", "to_out.0", "ff"),
            ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_", "to_add_out",
             "ff_context"),
        ):  # fmt: skip
            at = f"{theirs}.{stream}"
            qkv = [tensors[f"{ours}.attn.{name}.weight"] for name in names]
            made[f"{at}_attn.qkv.weight"] = np.concatenate(qkv)
            for letter, name in (("q", "query"), ("k", "key")):
                value = tensors[f"{ours}.attn.{norm}{letter}.weight"]
                made[f"{at}_attn.norm.{name}_norm.scale"] = value
            made[f"{at}_attn.proj.weight"] = tensors[f"{ours}.attn.{out}.weight"]
            made[f"{at}_mlp.0.weight"] = tensors[f"{ours}.{ff}.linear_in.weight"]
            made[f"{at}_mlp.2.weight"] = tensors[f"{ours}.{ff}.linear_out.weight"]
    for n in range(3):
        ours, theirs = f"single_transformer_blocks.{n}.attn", f"single_blocks.{n}"
        made[f"{theirs}.linear1.weight"] = tensors[f"{ours}.to_qkv_mlp_proj.weight"]
        made[f"{theirs}.linear2.weight"] = tensors[f"{ours}.to_out.weight"]
        for letter, name in (("q", "query"), ("k", "key")):
            made[f"{theirs}.norm.{name}_norm.scale"] = tensors[f"{ours}.norm_{letter}.weight"]
    return made


def bfl_autoencoder(tensors: dict[str, np.ndarray], levels: int) -> dict[str, np.ndarray]:
    made = {}
    for name, value in tensors.items():
        parts = name.split(".")
        if parts[0] in ("quant_conv", "post_quant_conv"):
            parts.insert(0, "encoder" if parts[0] == "quant_conv" else "decoder")
        elif len(parts) > 1 and parts[1] in ("down_blocks", "up_blocks"):
            half, level = parts[0], int(parts[2])
            level = level if half == "encoder" else levels - 1 - level
            short = "down" if half == "encoder" else "up"
            if parts[3] == "resnets":
                kind = {"conv_shortcut": "nin_shortcut"}.get(parts[5], parts[5])
                parts = [half, short, str(level), "block", parts[4], kind, parts[6]]
            else:
                parts = [half, short, str(level), f"{short}sample", "conv", parts[6]]
        elif len(parts) > 1 and parts[1] == "mid_block":
            if parts[2] == "resnets":
                parts = [parts[0], "mid", f"block_{int(parts[3]) + 1}", *parts[4:]]
            else:
                kind = {"group_norm": "norm", "to_out": "proj_out"}.get(parts[4], parts[4][-1])
                parts = [parts[0], "mid", "attn_1", kind, parts[-1]]
                if kind != "norm" and parts[-1] == "weight":
                    value = value[:, :, None, None]
        elif len(parts) > 1 and parts[1] == "conv_norm_out":
            parts[1] = "norm_out"
        made[".".join(parts)] = value
    return made


def test_own_names_are_the_same_parameters(folder: Path, tmp_path: Path) -> None:
    files = {"transformer": tmp_path / "klein.safetensors", "vae": tmp_path / "ae.safetensors"}
    save_file(bfl_transformer(stored(folder, "transformer")), files["transformer"])
    save_file(bfl_autoencoder(stored(folder, "vae"), 2), files["vae"])
    for dtype in ("float32", "bfloat16"):
        wanted = all_of(open_model(folder, dtype=dtype))
        assert_same_bits(all_of(open_model(folder, dtype=dtype, files=files)), wanted)


def test_with_a_prefix_and_without_the_folders_own_weights(folder: Path, tmp_path: Path) -> None:
    bare = tiny.write_model(tmp_path / "bare", **WIDE)
    (bare / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    tensors = bfl_transformer(stored(folder, "transformer"))
    path = tmp_path / "klein.safetensors"
    save_file({f"{PREFIX}{name}": value for name, value in tensors.items()}, path)
    made = open_model(bare, dtype="float32", files={"transformer": path})
    assert_same_bits(all_of(made), all_of(open_model(folder, dtype="float32")))


def quantised_stems(tensors: dict[str, np.ndarray]) -> list[str]:
    return [
        name.removesuffix(".weight")
        for name in tensors
        if name.startswith(("double_blocks.", "single_blocks.")) and name.endswith("weight")
    ]


def e2m1(nibbles: np.ndarray) -> np.ndarray:
    table = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    return np.array([*table, *(-x for x in table)], np.float32)[nibbles]


def to_fp8(tensors: dict[str, np.ndarray], names: tuple[str, str]) -> tuple[dict, dict]:
    """A file with quantised blocks, and the same values written out."""
    made, exact = dict(tensors), dict(tensors)
    for number, stem in enumerate(quantised_stems(tensors)):
        scale = np.float32(0.001 * (number + 1))
        raw = (tensors[f"{stem}.weight"] / scale / 4).astype(FP8)
        made[f"{stem}.weight"] = raw.view(np.uint8)
        made[f"{stem}.{names[0]}"] = np.asarray(scale)
        made[f"{stem}.{names[1]}"] = np.asarray(1.0, np.float32)
        exact[f"{stem}.weight"] = raw.astype(np.float32) * scale
    return made, exact


def to_nvfp4(tensors: dict[str, np.ndarray]) -> tuple[dict, dict]:
    rng = np.random.default_rng(0)
    made, exact = dict(tensors), dict(tensors)
    for stem in quantised_stems(tensors):
        rows, columns = tensors[f"{stem}.weight"].shape
        nibbles = rng.integers(0, 16, (rows, columns), np.uint8)
        blocks = rng.uniform(0.5, 2, (rows, columns // 16)).astype(FP8)
        scale = np.float32(rng.uniform(0.01, 0.02))
        made[f"{stem}.weight"] = nibbles[:, 0::2] << 4 | nibbles[:, 1::2]
        swizzled = np.empty((rows // 128, columns // 64, 32, 4, 4), FP8)
        for row in range(rows):
            for column in range(columns // 16):
                place = row // 128, column // 4, row % 32, row % 128 // 32, column % 4
                swizzled[place] = blocks[row, column]
        made[f"{stem}.weight_scale"] = swizzled.reshape(blocks.shape).view(np.uint8)
        made[f"{stem}.weight_scale_2"] = np.asarray(scale)
        made[f"{stem}.input_scale"] = np.asarray(1.0, np.float32)
        whole = blocks.astype(np.float32).repeat(16, axis=1) * scale
        exact[f"{stem}.weight"] = e2m1(nibbles) * whole
    return made, exact


def save(path: Path, tensors: dict[str, np.ndarray], fp8: tuple[str, ...]) -> None:
    """safetensors' NumPy functions know no fp8: written as bytes, and renamed in the header."""
    import struct

    save_file(tensors, path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    for name in header:
        if name.endswith(fp8) and header[name]["dtype"] == "U8":
            header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 24])
@pytest.mark.parametrize("kind", ["fp8", "fp8, other names", "nvfp4"])
def test_quantised_files_are_made_whole(folder, tmp_path, kind: str, chunk_bytes: int) -> None:
    tensors = bfl_transformer(stored(folder, "transformer"))
    if kind == "nvfp4":
        (made, exact), fp8 = to_nvfp4(tensors), ("weight_scale",)
    else:
        names = ("scale_weight", "scale_input") if "," in kind else ("weight_scale", "input_scale")
        (made, exact), fp8 = to_fp8(tensors, names), (".weight",)
    paths = [tmp_path / "quantised.safetensors", tmp_path / "exact.safetensors"]
    save(paths[0], made, fp8)
    save_file(exact, paths[1])
    for dtype in ("float32", "bfloat16"):
        found, wanted = (
            all_of(
                open_model(folder, dtype=dtype, files={"transformer": path}),
                chunk_bytes=chunk_bytes,
            )
            for path in paths
        )
        assert_same_bits(found, wanted)
    stored_bytes = open_model(folder, dtype="bfloat16", files={"transformer": paths[0]})
    kinds = stored_bytes.stored_bytes["transformer"]
    assert kinds["NVFP4" if kind == "nvfp4" else "F8_E4M3"] > 0 and kinds["F32"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("single_blocks.1.linear1.weight_scale"), "its scales are missing"),
        (lambda t: t.pop("double_blocks.0.img_attn.proj.weight"), "proj.weight .* is missing"),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), "extra .* belongs to no parameter"),
    ],
)
def test_faults_of_quantised_files(folder, tmp_path, change, message: str) -> None:
    tensors = bfl_transformer(stored(folder, "transformer"))
    made, _ = to_fp8(tensors, ("weight_scale", "input_scale"))
    change(made)
    save(tmp_path / "q.safetensors", made, (".weight",))
    with pytest.raises(CheckpointError, match=message):
        open_model(folder, dtype="bfloat16", files={"transformer": tmp_path / "q.safetensors"})


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "absent.safetensors"])
def test_files_that_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    if not name.startswith("absent"):
        (tmp_path / name).write_bytes(b"\x80\x04")
    message = "cannot be read" if name.startswith("absent") else "pickled weights are code"
    with pytest.raises(CheckpointError, match=message):
        open_model(folder, dtype="bfloat16", files={"transformer": tmp_path / name})


def test_folders_of_components(folder: Path, tmp_path: Path) -> None:
    other = tiny.write_model(tmp_path / "other", seed=5, **WIDE)
    files = {name: other / name for name in ("vae", "text_encoder", "tokenizer")}
    made = open_model(folder, dtype="float32", files=files)
    assert made.tokenizer == other / "tokenizer"
    found, own, others = (
        all_of(m) for m in (made, *(open_model(f, dtype="float32") for f in (folder, other)))
    )
    for path, value in found.items():
        wanted = own if path.startswith("transformer.") else others
        assert value.tobytes() == wanted[path].tobytes()


@pytest.mark.parametrize("shards", [1, 3])
def test_variants_in_file_names(folder: Path, tmp_path: Path, shards: int) -> None:
    made = tiny.write_model(tmp_path / "m", shards=shards, **WIDE)
    stem = tiny.STEMS["transformer"]
    for path in list((made / "transformer").glob(f"{stem}*")):
        name = path.name.replace(stem, f"{stem}.fp16", 1)
        if path.suffix == ".json":
            name = f"{stem}.safetensors.index.fp16.json"
            path.write_text(path.read_text().replace(f"{stem}-", f"{stem}.fp16-"))
        path.rename(path.with_name(name))
    wanted = all_of(open_model(folder, dtype="float32"))
    assert_same_bits(all_of(open_model(made, dtype="float32")), wanted)


def test_two_variants_are_ambiguous(tmp_path: Path) -> None:
    made = tiny.write_model(tmp_path / "m", **WIDE)
    plain = made / "transformer" / f"{tiny.STEMS['transformer']}.safetensors"
    for variant in ("fp16", "bf16"):
        (plain.with_name(f"{plain.stem}.{variant}.safetensors")).write_bytes(plain.read_bytes())
    open_model(made, dtype="float32")  # the plain one is meant
    plain.unlink()
    with pytest.raises(CheckpointError, match="is missing, and so is"):
        open_model(made, dtype="float32")


@pytest.mark.parametrize("distilled", [True, False])
def test_an_index_of_a_modular_pipeline(folder: Path, tmp_path: Path, distilled: bool) -> None:
    made = tiny.write_model(tmp_path / "m", **WIDE)
    keys = json.loads((made / "model_index.json").read_text())
    components = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    index = {name: value for name, value in keys.items() if name not in components}
    del index["_class_name"]
    for name in components:
        index[name] = [None, None, {"pretrained_model_name_or_path": "x/y", "subfolder": name}]
    index |= {"_blocks_class_name": "Flux2KleinAutoBlocks", "is_distilled": distilled}
    (made / "modular_model_index.json").write_text(json.dumps(index))
    (made / "model_index.json").unlink()
    assert missing_files(made) == []
    model = open_model(made, dtype="float32")
    assert model.is_distilled is distilled and model.class_name == "Flux2KleinPipeline"
    assert_same_bits(all_of(model), all_of(open_model(folder, dtype="float32")))
