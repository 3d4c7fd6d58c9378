# SPDX-License-Identifier: Apache-2.0
"""What fits stays, what does not is read again, and no picture changes by it."""

from __future__ import annotations

import gc
import weakref

import jax
import pytest

from firstlight import Pipeline, residency, start
from firstlight.errors import ConfigError, DeviceError
from firstlight.residency import choose_policy, statement

PROMPT = "a red apple on a blue background"
NEEDS = {"text_encoder": 6, "transformer": 8, "vae": 1}


@pytest.mark.parametrize(
    ("available", "offload", "policy"),
    [
        (15, None, "all"),
        (15, "text_encoder", "offload"),
        (14, None, "swap"),
        (14, "text_encoder", "swap"),
        (9, None, "swap"),
        (None, None, "all"),
        (None, "text_encoder", "offload"),
    ],
)
def test_the_sizes_decide(available: int | None, offload: str | None, policy: str) -> None:
    assert choose_policy(NEEDS, available, offload, "here") == policy


def test_what_fits_in_no_way_is_refused_with_the_numbers() -> None:
    needs = {name: size * 10**9 for name, size in NEEDS.items()}
    with pytest.raises(DeviceError, match=r"need 15\.00 GB \(text_encoder 6\.00 GB, .*free: 8\.00"):
        choose_policy(needs, 8 * 10**9, None, "TPU v9")


def test_other_components_cannot_be_offloaded() -> None:
    with pytest.raises(ConfigError, match="offload is 'vae'; 'text_encoder' or nothing"):
        choose_policy(NEEDS, None, "vae", "here")


def test_the_statement_names_everything() -> None:
    text = statement({"text_encoder": 3 * 10**9, "vae": 10**6}, None, "the host")
    assert text == (
        "parameters need 3.00 GB (text_encoder 3.00 GB, vae 1.00 MB) on the host; free: unknown"
    )


@pytest.fixture(scope="module")
def expected() -> dict[str, bytes]:
    pipe = Pipeline.from_pretrained("demo")
    pictures = pipe([PROMPT, "a fox"], seed=3, num_inference_steps=2).images
    return dict(zip((PROMPT, "a fox"), (p.tobytes() for p in pictures), strict=True))


def encoder_alive(pipe: Pipeline) -> bool:
    return "text_encoder" in pipe._engine.weights.trees


def test_offloaded_memory_is_free_and_comes_back(expected: dict[str, bytes]) -> None:
    pipe = Pipeline.from_pretrained("demo", offload="text_encoder")
    leaf = jax.tree.leaves(pipe._engine.weights.trees["text_encoder"])[0]
    freed = weakref.ref(leaf)
    del leaf
    both = pipe([PROMPT, "a fox"], seed=3, num_inference_steps=2)
    gc.collect()
    assert not encoder_alive(pipe) and freed() is None
    assert [picture.tobytes() for picture in both.images] == list(expected.values())
    again = pipe(PROMPT, seed=3, num_inference_steps=2)
    assert again.images[0].tobytes() == expected[PROMPT]
    assert not encoder_alive(pipe) and "transformer" in pipe._engine.weights.trees
    spans = len(pipe.timeline.spans)
    pipe("a cat", seed=3, num_inference_steps=1)
    assert len(pipe.timeline.spans) == spans  # a server's account does not grow


def test_where_all_of_it_does_not_fit_it_takes_turns(expected, monkeypatch) -> None:
    needed = {}

    def little(specs, mesh):
        needed.update(real(specs, mesh))
        return needed

    real = residency.bytes_per_device
    monkeypatch.setattr(start.residency, "bytes_per_device", little)
    monkeypatch.setattr(start.residency, "available_bytes", lambda device: sum(needed.values()) - 1)
    pipe = Pipeline.from_pretrained("demo")
    weights = pipe._engine.weights
    assert weights.policy == "swap" and set(weights.trees) == {"text_encoder"}
    assert "free: 0.03 GB" in pipe.timeline.notes["memory"]
    loaded: list[set[str]] = []
    load = weights._load

    def watch(names):
        loaded.append(set(weights.trees) | set(names))
        return load(names)

    weights._load = watch
    for prompt, seed in ((PROMPT, 3), ("a fox", 4)):
        made = pipe(prompt, seed=seed, num_inference_steps=2)
        assert made.images[0].tobytes() == expected[prompt]
    # Never the text encoder together with the others.
    assert loaded == [{"transformer", "vae"}, {"text_encoder"}, {"transformer", "vae"}]


def test_this_machine_says_what_is_free() -> None:
    found = residency.available_bytes(jax.devices()[0])
    assert found is not None and 2**20 < found < 2**50
