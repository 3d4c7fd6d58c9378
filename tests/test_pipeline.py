# SPDX-License-Identifier: Apache-2.0
"""The public pipeline on the packaged model: what a call promises and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from firstlight import FirstlightWarning, Pipeline
from firstlight.errors import ConfigError, DeviceError, RequestError
from firstlight.models.params import map_leaves

PROMPT = "a fox on a blue background"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def pipe(request: pytest.FixtureRequest) -> Pipeline:
    return Pipeline.from_pretrained("demo", dtype=request.param)


@pytest.fixture(scope="module")
def quick() -> Pipeline:
    return Pipeline.from_pretrained("demo")


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Names of jax's own compilation events during the test."""
    seen: list[str] = []

    def listen(name: str, *_: object, **__: object) -> None:
        if name == COMPILE_EVENT:
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def pixels(result) -> list[bytes]:
    return [image.tobytes() for image in result.images]


class TestSameBits:
    def test_one_call_equals_many(self, pipe: Pipeline) -> None:
        """A picture depends on its prompt and seed, not on its neighbours or its place."""
        prompts = ["a cat", "pizza, purple background", PROMPT]
        batch = pixels(pipe(prompts, seed=[7, 3, 11], num_inference_steps=2))
        for prompt, seed, expected in zip(prompts, [7, 3, 11], batch, strict=True):
            assert pixels(pipe(prompt, seed=seed, num_inference_steps=2)) == [expected]
        reverse = pixels(pipe(prompts[::-1], seed=[11, 3, 7], num_inference_steps=2))
        assert reverse == batch[::-1]

    def test_image_i_uses_seed_plus_i(self, pipe: Pipeline) -> None:
        out = pipe([PROMPT, "a cat"], seed=40, num_images_per_prompt=2, num_inference_steps=1)
        assert out.seeds == [40, 41, 42, 43]
        assert out.prompts == [PROMPT, PROMPT, "a cat", "a cat"]
        alone = pipe("a cat", seed=43, num_inference_steps=1)
        assert pixels(alone)[0] == pixels(out)[3]
        assert len(set(pixels(out))) == 4

    def test_a_second_pipeline_agrees(self, pipe: Pipeline) -> None:
        other = Pipeline.from_pretrained("demo", dtype=pipe.model.dtype, executable_cache=False)
        assert other.programs_compiled == 4
        assert pixels(other(PROMPT, seed=2)) == pixels(pipe(PROMPT, seed=2))


class TestCompiles:
    def test_none_after_the_first_image(self, pipe: Pipeline, compiles: list[str]) -> None:
        pipe(PROMPT, seed=1)
        compiles.clear()
        pipe("a cat", seed=2)
        pipe(["a dog", "a cat", "a red apple"], seed=9, num_inference_steps=7)
        pipe(PROMPT, num_images_per_prompt=3, num_inference_steps=1)
        assert compiles == []

    def test_a_new_size_is_counted(self, quick: Pipeline, compiles: list[str]) -> None:
        """The counter is alive: another size does compile."""
        before = quick.programs_compiled
        quick(PROMPT, seed=1, height=64, width=80, num_inference_steps=1)
        fresh = quick.programs_compiled - before
        assert len(compiles) == fresh

    def test_sizes_are_compiled_while_loading(self, compiles: list[str]) -> None:
        pipe = Pipeline.from_pretrained("demo", sizes=[(64, 96)], executable_cache=False)
        assert pipe.programs_compiled == 4
        compiles.clear()
        pipe(PROMPT, height=64, width=96, num_inference_steps=1)
        assert compiles == []


class TestSizes:
    @pytest.mark.parametrize(
        ("height", "width", "message"),
        [
            (
                100,
                128,
                "height is 100; sides are multiples of 16 pixels: the nearest are 96 and 112",
            ),
            (128, 250, "width is 250; .* nearest are 240 and 256"),
            (48, 128, "height is 48; the smallest side is 64"),
            (0, 128, "height is 0; the smallest side is 64"),
            (-16, 128, "height is -16"),
            (128, 100_000, "tokens; at most 16384 are allowed"),
            (128.0, 128, r"height is 128\.0; a whole number"),
            ("128", 128, "height is '128'; a whole number"),
            (True, 128, "height is True; a whole number"),
        ],
    )
    def test_refused(self, quick: Pipeline, height, width, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            quick(PROMPT, height=height, width=width)

    def test_refused_before_loading(self) -> None:
        with pytest.raises(RequestError, match="sides are multiples of 16"):
            Pipeline.from_pretrained("demo", sizes=[(128, 129)])

    def test_defaults_to_the_model_s_size(self, quick: Pipeline) -> None:
        assert quick(PROMPT, num_inference_steps=1).images[0].size == (128, 128)

    def test_width_before_height_in_pil(self, quick: Pipeline) -> None:
        out = quick(PROMPT, height=64, width=80, num_inference_steps=1)
        assert out.images[0].size == (80, 64)


class TestRequests:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (dict(prompt=None), "prompt is missing"),
            (dict(prompt=""), "prompt 0 is '': empty or blank"),
            (dict(prompt=["a cat", " \n"]), "prompt 1 is .*: empty or blank"),
            (dict(prompt=[]), "empty list"),
            (dict(prompt=["a cat", 3]), "prompt 1 is 3; a text is needed"),
            (dict(seed=-1), "seed is -1; it must be 0 to 4294967295"),
            (dict(seed=2**32), "seed is 4294967296"),
            (dict(seed=2**32 - 1, num_images_per_prompt=2), "would need seeds up to 4294967296"),
            (dict(seed=[1, 2]), "seed has 2 entries; 1 pictures"),
            (dict(seed=1.5), "seed"),
            (dict(num_inference_steps=0), "num_inference_steps is 0; it must be 1 to 1000"),
            (dict(num_inference_steps=2.5), r"num_inference_steps is 2\.5; a whole number"),
            (dict(num_images_per_prompt=0), "num_images_per_prompt is 0"),
            (dict(max_sequence_length=49), "max_sequence_length is 49; it must be 1 to 48"),
            (dict(output_type="jpeg"), "output_type is 'jpeg'; allowed: pil, np, latent"),
            (dict(guidance_scale=-1), "guidance_scale is -1"),
            (dict(guidance_scale=float("nan")), "guidance_scale is nan"),
            (dict(guidance_scale="4"), "guidance_scale is '4'; a number"),
            (dict(latents=np.zeros((1, 128, 8, 9))), r"latents have shape \(1, 128, 8, 9\)"),
            (dict(latents=np.full((1, 128, 8, 8), np.nan)), "not finite"),
        ],
    )
    def test_refused(self, quick: Pipeline, arguments: dict, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            quick(**{"prompt": PROMPT, **arguments})

    def test_distilled_ignores_guidance_with_one_warning(self, quick: Pipeline) -> None:
        with pytest.warns(FirstlightWarning, match="guidance_scale 4.0 is ignored") as caught:
            guided = quick(PROMPT, seed=1, guidance_scale=4.0, num_inference_steps=1)
        assert len(caught) == 1
        assert guided.metadata[0]["guidance_scale"] == 1.0
        assert pixels(guided) == pixels(quick(PROMPT, seed=1, num_inference_steps=1))

    def test_cut_prompt_warns(self, quick: Pipeline) -> None:
        with pytest.warns(FirstlightWarning, match="are lost"):
            quick("a snowman " * 40, num_inference_steps=1)

    def test_random_seeds_differ_and_are_reported(self, quick: Pipeline) -> None:
        seeds = {quick(PROMPT, num_inference_steps=1).seeds[0] for _ in range(4)}
        assert len(seeds) == 4
        assert all(0 <= seed < 2**32 for seed in seeds)

    def test_largest_seed(self, quick: Pipeline) -> None:
        low = quick(PROMPT, seed=0, num_inference_steps=1)
        high = quick(PROMPT, seed=2**32 - 1, num_inference_steps=1)
        assert pixels(low) != pixels(high)


class TestOutputs:
    def test_types_agree(self, pipe: Pipeline) -> None:
        pil = np.asarray(pipe(PROMPT, seed=3).images[0])
        array = pipe(PROMPT, seed=3, output_type="np").images
        assert array.dtype == np.float32 and array.shape == (1, 128, 128, 3)
        assert array.min() >= 0 and array.max() <= 1
        np.testing.assert_array_equal(np.round(array[0] * 255).astype(np.uint8), pil)
        latent = pipe(PROMPT, seed=3, output_type="latent").images
        assert latent.dtype == np.float32 and latent.shape == (1, 32, 16, 16)

    def test_own_latents_replace_the_seed(self, quick: Pipeline) -> None:
        noise = np.random.default_rng(0).standard_normal((2, 128, 8, 8), np.float32)
        both = quick([PROMPT, "a cat"], latents=noise, num_inference_steps=2)
        second = quick("a cat", latents=noise[1:], num_inference_steps=2)
        assert pixels(second) == pixels(both)[1:]
        assert both.metadata[0]["seed"] is None

    def test_text_length_matters_only_by_pads(self, quick: Pipeline) -> None:
        """Pads take part in attention, as in the reference: another length, another picture."""
        long = quick(PROMPT, seed=3, max_sequence_length=48)
        short = quick(PROMPT, seed=3, max_sequence_length=32)
        assert pixels(long) != pixels(short)

    def test_metadata_says_what_ran(self, quick: Pipeline) -> None:
        meta = quick(PROMPT, seed=3, num_inference_steps=2).metadata[0]
        assert meta["prompt"] == PROMPT and meta["seed"] == 3
        assert meta["num_inference_steps"] == 2 and meta["model"] == "demo"
        assert meta["versions"]["jax"] == jax.__version__
        assert meta["dtype"] == "bfloat16" and meta["mesh"] == "data=1,model=1"


class TestNotFinite:
    @pytest.mark.parametrize(
        ("part", "stage"),
        [("transformer", "denoised latents"), ("vae", "decoded picture")],
    )
    def test_names_the_stage(self, part: str, stage: str) -> None:
        pipe = Pipeline.from_pretrained("demo")
        engine = pipe._engine
        tree = engine.weights.trees[part]

        def broken(path: str, leaf):
            if path not in ("out", "decoder.conv_out.bias"):
                return leaf
            return jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding)

        engine.weights.trees[part] = map_leaves(broken, tree)
        with pytest.raises(DeviceError, match=f"the {stage} of seed 5 contain values"):
            pipe(PROMPT, seed=5)
        latents = np.zeros((1, engine.programs.arch.transformer.in_channels, 8, 8), np.float32)
        with pytest.raises(DeviceError, match=rf"the {stage} of picture 0 \(from given latents\)"):
            pipe(PROMPT, latents=latents)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (dict(dtype="float16"), "dtype is 'float16'; allowed: bfloat16, float32"),
            (dict(mesh="data=2"), "needs 2 devices; 1 cpu"),
            (dict(mesh="rows=2"), "write it as data=N,model=M"),
            (dict(images_per_device=0), "images_per_device is 0"),
            (dict(fsdp=True), "fsdp is not supported yet"),
            (dict(bundle="x"), "bundle is not supported yet"),
            (dict(offload="vae"), "offload is 'vae'; 'text_encoder' or nothing is allowed"),
        ],
    )
    def test_refused(self, settings: dict, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Pipeline.from_pretrained("demo", **settings)

    def test_more_images_per_device(self) -> None:
        pipe = Pipeline.from_pretrained("demo", images_per_device=2)
        out = pipe([PROMPT, "a cat", "a dog"], seed=1, num_inference_steps=1)
        assert len(out.images) == 3
        assert out.metadata[0]["images_per_device"] == 2
        # The same promise holds among calls of this setting: place and neighbours do not matter.
        again = pipe(["a dog", PROMPT], seed=[3, 1], num_inference_steps=1)
        assert pixels(again) == [pixels(out)[2], pixels(out)[0]]

    def test_no_warnings_by_default(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Pipeline.from_pretrained("demo")
