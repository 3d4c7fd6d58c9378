# SPDX-License-Identifier: Apache-2.0
"""Random small models saved by the reference, loaded by us: every stage agrees in float32."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from firstlight import Pipeline, sampling
from firstlight.errors import FirstlightWarning
from firstlight.tokenizer import Tokenizer
from tests.components import Components
from tests.parity import reference
from tests.parity.cases import LONG, Case, cases

pytestmark = pytest.mark.parity

SAMPLE = cases(12)
MORE = [pytest.param(case, marks=pytest.mark.full) for case in cases(60, seed=1)]


class Model:
    """One case's folder, loaded by both sides, and random inputs for it."""

    def __init__(self, case: Case, folder) -> None:
        reference.build(case, folder)
        self.case = case
        self.folder = folder
        self.theirs = reference.Reference(folder)
        self.ours = Components(folder)
        self.batch = len(case.prompts)
        self.random = np.random.default_rng(case.seed)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal((self.batch, *shape)).astype(np.float32)

    def expect_warning(self):
        """Context in which a prompt must be reported as cut if, and only if, it is."""
        if any(self.theirs.cuts(prompt) for prompt in self.case.prompts):
            return pytest.warns(FirstlightWarning, match="are lost")
        return contextlib.nullcontext()


@pytest.fixture(scope="module", params=SAMPLE + MORE, ids=lambda case: case.name)
def model(request, tmp_path_factory):
    return Model(request.param, tmp_path_factory.mktemp("parity") / "model")


def test_text_states(model, agree):
    case, folder = model.case, model.ours.model
    tokenizer = Tokenizer.from_folder(model.folder / "tokenizer", folder.text_encoder.vocab_size)
    with model.expect_warning():
        rows = [tokenizer.encode(prompt, case.max_sequence_length) for prompt in case.prompts]
    ids, mask = (np.stack(column) for column in zip(*rows, strict=True))
    agree("text states", model.ours.text(ids, mask), model.theirs.text(case.prompts))


def test_transformer_call(model, agree):
    case = model.case
    x = model.normal(case.rows * case.columns, case.transformer["in_channels"])
    text = model.normal(case.max_sequence_length, case.transformer["joint_attention_dim"])
    timestep = model.random.uniform(0, 1, model.batch).astype(np.float32)
    agree(
        "velocity",
        model.ours.velocity(x, text, timestep, sampling.image_ids(case.rows, case.columns)),
        model.theirs.velocity(x, text, timestep, case.rows, case.columns),
    )


def test_autoencoder(model, agree):
    case = model.case
    shape = (model.batch, 3, case.height, case.width)
    image = model.random.uniform(-1, 1, shape).astype(np.float32)
    agree("latents", model.ours.encode(image), model.theirs.encode(image))
    latents = model.normal(case.vae["latent_channels"], 2 * case.rows, 2 * case.columns)
    agree("decoded picture", model.ours.decode(latents), model.theirs.decode(latents))


def test_whole_pipeline(model, agree):
    case = model.case
    noise = model.normal(case.transformer["in_channels"], case.rows, case.columns)
    pipe = Pipeline.from_pretrained(
        model.folder,
        dtype="float32",
        sizes=[(case.height, case.width)],
        executable_cache=False,
    )
    for output_type in ("latent", "np"):
        with model.expect_warning():
            ours = pipe(
                list(case.prompts),
                latents=noise,
                height=case.height,
                width=case.width,
                num_inference_steps=case.steps,
                output_type=output_type,
            )
        theirs = model.theirs.picture(
            case.prompts, noise, steps=case.steps, output_type=output_type
        )
        agree(f"pipeline's {output_type}", ours.images, theirs)


def test_the_sample_covers_what_it_should():
    def values(of):
        return {of(case) for case in SAMPLE}

    assert len(SAMPLE) >= 12
    assert values(lambda case: case.factor) == {1, 2, 4, 8}
    assert values(lambda case: len(case.prompts)) == {1, 2, 3}
    for part, key, wanted in (
        ("transformer", "num_layers", {1, 2, 3}),
        ("transformer", "num_single_layers", {1, 2, 3}),
        ("transformer", "num_attention_heads", {1, 2, 3, 4}),
        ("transformer", "mlp_ratio", {2.0, 2.5, 3.0, 4.0}),
        ("transformer", "attention_head_dim", {8, 16, 32, 64}),
        ("vae", "latent_channels", {1, 2, 4, 8}),
        ("vae", "use_quant_conv", {True, False}),
        ("vae", "use_post_quant_conv", {True, False}),
        ("vae", "mid_block_add_attention", {True, False}),
        ("vae", "layers_per_block", {1, 2}),
    ):
        assert values(lambda case, part=part, key=key: getattr(case, part)[key]) == wanted, key
    assert any(case.height != case.width for case in SAMPLE)
    assert any(len(set(case.transformer["axes_dims_rope"])) > 1 for case in SAMPLE)
    assert any(
        case.vae["decoder_block_out_channels"] not in (None, case.vae["block_out_channels"])
        for case in SAMPLE
    )
    layers = [case.text_encoder["num_hidden_layers"] for case in SAMPLE]
    assert any(n in case.taps for n, case in zip(layers, SAMPLE, strict=True))
    assert any(n not in case.taps for n, case in zip(layers, SAMPLE, strict=True))
    assert any(list(case.taps) != sorted(case.taps) for case in SAMPLE)
    assert any(0 in case.taps for case in SAMPLE)
    prompts = [prompt for case in SAMPLE for prompt in case.prompts]
    assert LONG in prompts and "a" in prompts
