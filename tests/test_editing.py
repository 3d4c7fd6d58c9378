# SPDX-License-Identifier: Apache-2.0
"""Editing with references, guidance, given text states, callbacks: contracts of the call.

That the numbers are the reference's is shown in tests/golden and tests/parity.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from firstlight import Pipeline
from firstlight.errors import DeviceError, FirstlightWarning, RequestError
from firstlight.references import prepare

PROMPT = "make the background green"


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_pretrained("demo", sizes=[])


def apple(pipe: Pipeline) -> Image.Image:
    return pipe("a red apple on a blue background", seed=1).images[0]


@pytest.fixture(scope="module")
def images(pipe: Pipeline) -> list[Image.Image]:
    return [apple(pipe), *pipe(["a cat", "grinning face"], seed=4, num_inference_steps=2).images]


@pytest.fixture
def base(pipe: Pipeline):
    """The same weights, treated as a base model."""
    model = pipe.model
    pipe.model = replace(model, is_distilled=False)
    yield pipe
    pipe.model = model


def quick(pipe: Pipeline, *arguments: Any, **options: Any) -> list[bytes]:
    made = pipe(*arguments, **{"seed": 5, "num_inference_steps": 2, **options})
    return [image.tobytes() for image in made.images]


class TestReferences:
    def test_the_background_becomes_what_was_asked_for(self, pipe, images) -> None:
        picture = np.asarray(pipe(PROMPT, image=images[0], seed=3).images[0], float)
        border = np.concatenate([picture[:6].reshape(-1, 3), picture[-6:].reshape(-1, 3)])
        red, green, blue = border.mean(axis=0)
        assert green > red + 40 and green > blue + 40
        red, green, blue = picture[54:74, 54:74].reshape(-1, 3).mean(axis=0)
        assert red > green + 60 and red > blue + 60

    def test_order_counts_and_repetition_does_not(self, pipe, images) -> None:
        both, swapped = [images[0], images[1]], [images[1], images[0]]
        first = quick(pipe, PROMPT, image=both)
        assert first == quick(pipe, PROMPT, image=both)
        assert first != quick(pipe, PROMPT, image=swapped)
        assert first != quick(pipe, PROMPT, image=images[0])

    def test_nothing_of_one_request_reaches_the_next(self, pipe, images) -> None:
        alone = quick(pipe, PROMPT, image=images[1])
        quick(pipe, PROMPT, image=images[0])
        assert quick(pipe, PROMPT, image=images[1]) == alone

    def test_a_batch_of_edits_equals_the_single_ones(self, pipe, images) -> None:
        """Different numbers and sizes of references, one without any, in the request's order."""
        small = images[1].resize((96, 64))
        lists = [[images[0]], [images[1], small], [], [images[2]], [small]]
        prompts = [f"{PROMPT} {number}" for number in range(5)]
        size = {"height": 128, "width": 128}
        together = quick(pipe, prompts, image=lists, **size)
        for number, references in enumerate(lists):
            alone = quick(
                pipe, prompts[number], image=references or None, seed=5 + number,
                num_inference_steps=2, **size,
            )  # fmt: skip
            assert alone == [together[number]]

    def test_rows_of_one_call_have_references_of_one_layout(self, images) -> None:
        pair = Pipeline.from_pretrained("demo", images_per_device=2, sizes=[])
        small = images[1].resize((96, 64))
        lists = [[images[0]], [small], [images[1]]]
        size = {"height": 128, "width": 128}
        made = pair(["a", "b", "c"], image=lists, seed=7, num_inference_steps=1, **size)
        assert made.seeds == [7, 8, 9] and made.prompts == ["a", "b", "c"]
        stream = list(
            pair.stream(["a", "b", "c"], image=lists, seed=7, num_inference_steps=1, **size)
        )
        assert sorted(result.index for result in stream) == [0, 1, 2]
        for result in stream:
            assert result.images[0].tobytes() == made.images[result.index].tobytes()
            assert result.seeds == [7 + result.index]

    def test_the_size_is_the_first_references(self, pipe, images) -> None:
        tall = images[0].resize((70, 101))
        made = pipe(PROMPT, image=[tall, images[1]], num_inference_steps=1)
        assert made.images[0].size == (64, 96)
        made = pipe(PROMPT, image=tall, num_inference_steps=1, width=128)
        assert made.images[0].size == (128, 96)

    def test_metadata_names_the_references(self, pipe, images) -> None:
        made = pipe(PROMPT, image=[[images[0]]], num_inference_steps=1)
        (digest,) = made.metadata[0]["references"]
        assert len(digest) == 64
        assert "references" not in pipe("a cat", num_inference_steps=1).metadata[0]

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            ([], "image is an empty list"),
            ([[]] * 2, "image has 2 lists of references; 1 prompts need one each"),
            ("absent.png", "image 0 'absent.png' cannot be read"),
            (3, "image 0 is 3; a PIL image"),
            (np.zeros((64, 64)), "image 0 is float64 \\(64, 64\\)"),
            (Image.new("RGB", (63, 100)), "image 0 is 63x100 pixels; both sides"),
            (Image.new("RGB", (1000, 70)), "image 0 is 1000x70 pixels; the longer side"),
            ([Image.new("RGB", (64, 64))] * 11, "11 references; at most 10"),
            ([Image.new("RGB", (64, 64)), [Image.new("RGB", (64, 64))]], "image mixes"),
        ],
    )
    def test_refused(self, pipe, image, message) -> None:
        with pytest.raises(RequestError, match=message):
            pipe(PROMPT, image=image)


class TestPreparing:
    @pytest.mark.parametrize(
        ("size", "prepared"),
        [
            ((2000, 1000), (1440, 720)),
            ((1025, 1024), (1024, 1008)),
            ((1536, 2048), (880, 1168)),
            ((500, 70), (496, 64)),
            ((512, 64), (512, 64)),
        ],
    )
    def test_sizes(self, size, prepared) -> None:
        found = prepare(Image.new("RGB", size), "image", 16)
        assert found.shape == (prepared[1], prepared[0], 3)

    def test_the_middle_is_kept(self) -> None:
        columns = np.zeros((64, 74, 3), np.uint8)
        columns[:, :, 0] = np.arange(74)
        found = prepare(columns, "image", 16)
        assert found[0, :, 0].tolist() == list(range(5, 69))

    def test_upright(self) -> None:
        picture = Image.fromarray(
            np.arange(64 * 96 * 3, dtype=np.uint64).astype(np.uint8).reshape(64, 96, 3)
        )
        exif = picture.getexif()
        exif[0x0112] = 6
        turned = prepare(picture, "image", 16)
        assert turned.shape == (96, 64, 3)
        np.testing.assert_array_equal(turned, np.rot90(np.asarray(picture), -1))

    def test_white_behind_what_is_transparent(self) -> None:
        picture = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
        with pytest.warns(FirstlightWarning, match="image 0 is transparent in places"):
            assert (prepare(picture, "image 0", 16) == 255).all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opaque = prepare(Image.new("RGBA", (64, 64), (9, 8, 7, 255)), "image", 16)
        assert (opaque == (9, 8, 7)).all()


class TestGuidance:
    def test_it_has_an_effect(self, base) -> None:
        plain = quick(base, "a cat", guidance_scale=1.0)
        assert plain != quick(base, "a cat", guidance_scale=3.0)
        assert quick(base, "a cat", guidance_scale=3.0) != quick(
            base, "a cat", guidance_scale=3.0, negative_prompt="a dog"
        )

    def test_defaults_of_a_base_model(self, base) -> None:
        made = base("a cat", num_inference_steps=2)
        assert made.metadata[0]["guidance_scale"] == 4.0
        assert made.metadata[0]["negative_prompt"] == ""
        assert made.metadata[0]["is_distilled"] is False

    def test_what_is_steered_towards_and_away_is_nothing(self, base) -> None:
        """With the same text on both sides, guidance has nothing to push."""
        plain = base("a cat", seed=1, guidance_scale=1.0, num_inference_steps=2, output_type="np")
        same = base(
            "a cat", negative_prompt="a cat", seed=1, guidance_scale=3.0, num_inference_steps=2,
            output_type="np",
        )  # fmt: skip
        np.testing.assert_allclose(same.images, plain.images, atol=1e-6)

    def test_each_prompt_has_its_own(self, base) -> None:
        together = quick(
            base, ["a cat", "a fox"], negative_prompt=["a dog", ""], guidance_scale=2.0
        )
        assert together == [
            *quick(base, "a cat", negative_prompt="a dog", guidance_scale=2.0),
            *quick(base, "a fox", negative_prompt="", guidance_scale=2.0, seed=6),
        ]

    def test_a_negative_prompt_without_effect_is_refused(self, pipe, base) -> None:
        with pytest.raises(RequestError, match="no effect without guidance"):
            base("a cat", negative_prompt="a dog", guidance_scale=1.0)
        with pytest.raises(RequestError, match="negative_prompt has 3 texts"):
            base(["a cat", "a fox"], negative_prompt=["a", "b", "c"])


class TestTextStates:
    def test_encoded_once_and_used_often(self, pipe) -> None:
        prompts = ["a cat", "a fox on a blue background"]
        states = pipe.encode_prompt(prompts)
        assert states.shape == (2, 48, pipe.model.transformer.joint_attention_dim)
        assert quick(pipe, prompt_embeds=states) == quick(pipe, prompts)
        assert quick(pipe, prompt_embeds=states[1:], num_images_per_prompt=2) == quick(
            pipe, prompts[1], num_images_per_prompt=2
        )

    def test_negative_states(self, base) -> None:
        states, away = (base.encode_prompt(text) for text in ("a cat", "a dog"))
        given = quick(base, prompt_embeds=states, negative_prompt_embeds=away, guidance_scale=2.0)
        assert given == quick(base, "a cat", negative_prompt="a dog", guidance_scale=2.0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (dict(prompt="a", prompt_embeds=np.zeros((1, 4, 384))), "exclude each other"),
            (dict(prompt_embeds=np.zeros((1, 4, 3))), r"shape \(1, 4, 3\); .* 384\) is needed"),
            (dict(prompt_embeds=np.full((1, 4, 384), np.inf)), "not finite"),
            (dict(), "prompt is missing"),
        ],
    )
    def test_refused(self, pipe, arguments, message) -> None:
        with pytest.raises(RequestError, match=message):
            pipe(**arguments)


class TestSigmas:
    def test_the_usual_ones_change_nothing(self, pipe) -> None:
        usual = quick(pipe, "a cat", num_inference_steps=4)
        even = [1.0, 0.75, 0.5, 0.25]
        assert quick(pipe, "a cat", sigmas=even, num_inference_steps=None) == usual
        assert quick(pipe, "a cat", sigmas=[1.0, 0.4], num_inference_steps=4) != usual

    @pytest.mark.parametrize("sigmas", [[], [0.5, 0.75], [1.5], [1.0, 0.0], [[1.0]], [np.nan]])
    def test_refused(self, pipe, sigmas) -> None:
        with pytest.raises(RequestError, match="sigmas are"):
            pipe("a cat", sigmas=sigmas)

    def test_another_shift_is_another_schedule(self, pipe) -> None:
        made = pipe("a cat", seed=5, num_inference_steps=2, time_shift="constant")
        assert [made.images[0].tobytes()] != quick(pipe, "a cat")
        assert made.metadata[0]["time_shift"] == "constant"
        with pytest.raises(RequestError, match="time_shift is 'none'; allowed: reference, const"):
            pipe("a cat", time_shift="none")


class TestCallback:
    def test_it_sees_every_step(self, pipe) -> None:
        seen = []

        def watch(given, step, timestep, tensors):
            assert given is pipe
            seen.append((step, timestep, {name: t.shape for name, t in tensors.items()}))
            return {}

        names = ["latents", "prompt_embeds"]
        plain = quick(pipe, "a cat")
        assert plain == quick(
            pipe, "a cat", callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names
        )
        steps, times, shapes = zip(*seen, strict=True)
        assert steps == (0, 1) and times[0] == 1000 and times[1] < 1000
        assert shapes[0] == {"latents": (1, 64, 128), "prompt_embeds": (1, 48, 384)}

    def test_it_may_change_them(self, pipe) -> None:
        def zero(given, step, timestep, tensors):
            return {"latents": np.zeros_like(tensors["latents"])} if step == 1 else tensors

        made = pipe(
            "a cat", num_inference_steps=2, output_type="latent", callback_on_step_end=zero
        ).images
        stats = pipe._engine.weights.painter("vae").stats
        mean = np.asarray(stats.mean)[::4]
        np.testing.assert_allclose(made[0, :, 0, 0], mean, rtol=1e-6)

    def test_it_may_stop(self, pipe) -> None:
        count = []

        def stop(given, step, timestep, tensors):
            count.append(step)
            given.interrupt = True
            return tensors

        quick(pipe, "a cat", num_inference_steps=4, callback_on_step_end=stop)
        assert count == [0]
        count.clear()
        assert quick(pipe, "a cat") == quick(pipe, "a cat")  # the next call is not stopped

    @pytest.mark.parametrize(
        ("callback", "names", "message"),
        [
            (3, ["latents"], "callback_on_step_end is 3"),
            (lambda *a: {}, ["noise"], r"is \['noise'\]; a list of some of latents"),
            (lambda *a: {}, "latents", "is 'latents'; a list"),
            (lambda *a: None, ["latents"], "returned NoneType; a dict"),
            (lambda *a: {"latents": np.zeros(3)}, ["latents"], r"latents of shape \(3,\)"),
        ],
    )
    def test_refused(self, pipe, callback, names, message) -> None:
        with pytest.raises(RequestError, match=message):
            pipe(
                "a cat", num_inference_steps=1, callback_on_step_end=callback,
                callback_on_step_end_tensor_inputs=names,
            )  # fmt: skip


class TestInpainting:
    def mask(self, box: tuple[int, int, int, int] | None = (32, 32, 96, 80)) -> Image.Image:
        mask = Image.new("L", (128, 128), 0)
        if box is not None:
            mask.paste(255, box)
        return mask

    def test_a_mask_that_keeps_all_returns_the_source(self, pipe, images) -> None:
        """Its latents exactly: what is decoded is the source's own round trip."""
        kept = pipe(
            "a dog", image=images[0], mask_image=self.mask(None), seed=1, output_type="latent"
        ).images
        other = pipe(
            "a fox", image=images[0], mask_image=self.mask(None), seed=2, output_type="latent"
        ).images
        np.testing.assert_array_equal(kept, other)

    def test_pixels_outside_stay_bit_for_bit(self, pipe, images) -> None:
        for crop in (None, 8):
            made = pipe(
                "a dog", image=images[0], mask_image=self.mask(), seed=1, strength=1.0,
                padding_mask_crop=crop,
            )  # fmt: skip
            outside = np.asarray(self.mask()) == 0
            same = np.asarray(made.images[0])[outside] == np.asarray(images[0])[outside]
            assert same.all() == (crop is not None)
            inside = np.asarray(made.images[0])[~outside] != np.asarray(images[0])[~outside]
            assert inside.mean() > 0.5

    def test_strength_without_a_mask(self, pipe, images) -> None:
        def distance(strength: float) -> float:
            made = pipe("a dog", image=images[0], strength=strength, seed=1, num_inference_steps=8)
            gap = np.asarray(made.images[0], float) - np.asarray(images[0], float)
            return float(np.abs(gap).mean())

        assert distance(0.2) < distance(0.6) < distance(1.0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (dict(mask_image=Image.new("L", (128, 128))), "image is missing"),
            (dict(image=[], strength=0.5), "image is a list"),
            (dict(image=0, strength=2), "strength is 2"),
            (dict(image=0, strength=0.0), "of 4 steps none is left"),
            (dict(image=0, strength=0.5, padding_mask_crop=3), "padding_mask_crop needs mask"),
            (dict(image_reference=0), "image_reference goes with mask_image or strength"),
            (dict(image=0, strength=0.5, height=64), "height is 64; the source's is 128"),
            (
                dict(image=0, mask_image=Image.new("L", (128, 128)), padding_mask_crop=1),
                "mask_image is black",
            ),
            (
                dict(image=0, mask_image=Image.new("L", (128, 64))),
                "mask_image is 128x64 pixels; image is 128x128",
            ),
        ],
    )
    def test_refused(self, pipe, images, arguments, message) -> None:
        for name in ("image", "image_reference"):
            if arguments.get(name) == 0:
                arguments = {**arguments, name: images[0]}
        with pytest.raises(RequestError, match=message):
            pipe("a dog", **arguments)


class TestCachedReferences:
    @pytest.fixture
    def caching(self, pipe):
        pipe._engine.caches_references = True
        yield pipe
        pipe._engine.caches_references = False

    def test_they_are_another_computation(self, caching, images) -> None:
        cached = quick(caching, PROMPT, image=images[0])
        assert quick(caching, PROMPT, image=images[1]) != cached
        assert quick(caching, PROMPT, image=images[0]) == cached
        caching._engine.caches_references = False
        assert quick(caching, PROMPT, image=images[0]) != cached

    def test_once_for_rows_with_the_same(self, caching, images, monkeypatch) -> None:
        runs = []
        extract = caching._engine.programs.extract
        monkeypatch.setattr(
            type(caching._engine.programs),
            "extract",
            lambda self, grids: runs.append(grids) or extract(grids),
        )
        quick(caching, ["a", "b", "c"], image=images[0])
        assert runs == [((8, 8),)]

    def test_too_large_is_refused_with_the_numbers(self, caching, images, monkeypatch) -> None:
        from firstlight import engine

        monkeypatch.setattr(engine, "available_bytes", lambda device: 1000)
        with pytest.raises(DeviceError, match=r"keys and values of references need 0\.00 GB"):
            quick(caching, PROMPT, image=images[0])
        assert caching.timeline.notes["reference_cache_bytes"] == 2 * 8 * 64 * 256 * 2


class TestTiling:
    def test_the_size_decides_and_the_flag_wins(self, pipe) -> None:
        programs = pipe._engine.programs
        assert not programs.tiled(128, 128) and not programs.tiled(512, 512)
        wide = replace(
            programs, arch=replace(programs.arch, vae=replace(programs.arch.vae, sample_size=1024))
        )
        real = replace(
            wide,
            arch=replace(
                wide.arch,
                vae=replace(wide.arch.vae, decoder_block_out_channels=(128, 256, 512, 512)),
            ),
        )
        assert not real.tiled(1024, 1024) and not real.tiled(1024, 2048)
        assert real.tiled(2048, 2048)
        assert replace(real, tiling=True).tiled(1024, 1040)
        assert not replace(real, tiling=True).tiled(1024, 1024)
        assert not replace(real, tiling=False).tiled(2048, 2048)

    def test_another_picture_and_recorded(self, pipe) -> None:
        tiled = Pipeline.from_pretrained("demo", vae_tiling=True, sizes=[])
        options = dict(height=192, width=256, seed=1, num_inference_steps=1)
        one, other = (p("a cat", **options) for p in (pipe, tiled))
        a, b = (np.asarray(made.images[0], float) for made in (one, other))
        assert 0 < np.abs(a - b).mean() < 12
        assert other.metadata[0]["vae_tiling"] is True
        assert "vae_tiling" not in one.metadata[0]


class TestPreviews:
    def test_they_come_to_look_like_the_picture(self, pipe) -> None:
        seen: list[Image.Image] = []

        def watch(given, step, timestep, tensors):
            (image,) = tensors["preview"]
            seen.append(image)
            return {}

        made = pipe(
            "a red apple on a blue background", seed=1, callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=["preview"],
        ).images[0]  # fmt: skip
        small = np.asarray(made.resize((16, 16), Image.Resampling.BOX), float)
        gaps = [np.abs(np.asarray(image, float) - small).mean() for image in seen]
        assert [image.size for image in seen] == [(16, 16)] * 4
        assert gaps[-1] < 30 and gaps[-1] < gaps[0]

    def test_watching_changes_nothing(self, pipe) -> None:
        plain = quick(pipe, "a cat")
        assert plain == quick(
            pipe, "a cat", callback_on_step_end=lambda *a: {},
            callback_on_step_end_tensor_inputs=["preview"],
        )  # fmt: skip
