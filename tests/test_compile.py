# SPDX-License-Identifier: Apache-2.0
"""Programs: concurrent, kept on disk, and never any other bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from firstlight import compile as compile_module
from firstlight import environment
from firstlight.compile import Compiler, Program, compiler_options, key_fields, program_key
from firstlight.errors import ConfigError, FirstlightWarning
from firstlight.executable_cache import ExecutableCache
from firstlight.sharding import make_mesh

MESH = make_mesh()
EVERYWHERE = NamedSharding(MESH, P())


def program(name: str = "p", width: int = 96, scale: float = 0.5) -> Program:
    def function(pair, w):
        x, y = pair
        return jnp.tanh(x @ w) * scale + y, jnp.sum(x, axis=0)

    x = jax.ShapeDtypeStruct((17, width), jnp.float32, sharding=EVERYWHERE)
    w = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=EVERYWHERE)
    return Program(name, function, ((x, x), w), {"scale": scale}, outputs=2)


def arguments(width: int = 96):
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, 17, width), np.float32)
    w = rng.standard_normal((width, width), np.float32)
    return jax.device_put(((x, y), w), EVERYWHERE)


def values(executable, width: int = 96) -> list[np.ndarray]:
    return [np.asarray(a) for a in executable(*arguments(width))]


def assert_same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.fixture
def cache(tmp_path: Path) -> ExecutableCache:
    made = ExecutableCache.open(tmp_path / "kept")
    assert made is not None
    return made


def fresh_jit() -> list[np.ndarray]:
    """The same function through plain jit, with the same options."""
    with jax.set_mesh(MESH):
        compiled = jax.jit(program().function).lower(*program().args)
        compiled = compiled.compile(compiler_options=compiler_options("cpu"))
    return [np.asarray(a) for a in compiled(*arguments())]


def test_kept_equals_fresh(cache: ExecutableCache) -> None:
    first, second = Compiler(MESH, cache), Compiler(MESH, cache)
    made = first.submit(program()).result()
    first.flush()
    kept = second.submit(program()).result()
    assert (first.compiled, first.loaded) == (1, 0)
    assert (second.compiled, second.loaded) == (0, 1)
    assert kept.from_cache and not made.from_cache
    assert_same_bits(values(made), fresh_jit())
    assert_same_bits(values(kept), fresh_jit())


def test_concurrent_equals_serial() -> None:
    widths = [32, 48, 64, 80, 96]
    results = []
    for threads in (1, 5):
        compiler = Compiler(MESH, None, threads=threads)
        futures = [compiler.submit(program(f"p{w}", w)) for w in widths]
        results.append([values(f.result(), w) for f, w in zip(futures, widths, strict=True)])
    for serial, concurrent in zip(*results, strict=True):
        assert_same_bits(serial, concurrent)


def test_submitted_twice_is_compiled_once() -> None:
    compiler = Compiler(MESH, None)
    assert compiler.submit(program()) is compiler.submit(program())
    compiler.submit(program()).result()
    assert compiler.compiled == 1


def test_wrong_shape_raises_instead_of_compiling() -> None:
    executable = Compiler(MESH, None).submit(program()).result()
    with pytest.raises(TypeError, match=r"float32\[17,96\] and called with float32\[17,32\]"):
        executable(*arguments(32))


def test_failure_to_compile_reaches_the_caller() -> None:
    def function(x):
        raise KeyError("broken")

    x = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=EVERYWHERE)
    with pytest.raises(KeyError, match="broken"):
        Compiler(MESH, None).submit(Program("bad", function, (x,))).result()


class TestCache:
    def entry(self, cache: ExecutableCache) -> Path:
        (path,) = cache.folder.glob("*.exe")
        return path

    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
    def test_damaged_entry_is_dropped_once(self, cache: ExecutableCache, damage: str) -> None:
        first = Compiler(MESH, cache)
        good = values(first.submit(program()).result())
        first.flush()
        path = self.entry(cache)
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[len(content) // 2] ^= 1
        path.write_bytes(
            {"cut": content[:-9], "flipped": content, "empty": b"", "foreign": b"hello" * 99}[
                damage
            ]
        )
        compiler = Compiler(MESH, cache)
        with pytest.warns(FirstlightWarning, match="is dropped: it is damaged") as caught:
            again = compiler.submit(program()).result()
            compiler.flush()
        assert len(caught) == 1
        assert compiler.compiled == 1
        assert_same_bits(values(again), good)
        assert Compiler(MESH, cache).submit(program()).result().from_cache

    @pytest.mark.parametrize("payload", [b"\x80\x04N.", b"", b"\x80\x04cfoo\nbar\n."])
    def test_unloadable_entry_is_dropped(self, cache: ExecutableCache, payload: bytes) -> None:
        """Intact bytes that are no executable of this jax."""
        cache.write(program_key(program(), MESH), payload, {})
        compiler = Compiler(MESH, cache)
        with pytest.warns(FirstlightWarning, match="cannot be loaded"):
            compiler.submit(program()).result()
        assert compiler.compiled == 1

    def test_folder_others_can_write_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.warns(FirstlightWarning, match="can be written by other users"):
            assert ExecutableCache.open(folder) is None

    def test_new_folder_is_private(self, cache: ExecutableCache) -> None:
        assert cache.folder.stat().st_mode & 0o777 == 0o700

    def test_unusable_folder_warns(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.warns(FirstlightWarning, match="cannot be used"):
            assert ExecutableCache.open(tmp_path / "file" / "below") is None

    def test_failed_write_leaves_nothing(self, cache: ExecutableCache, monkeypatch) -> None:
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.warns(FirstlightWarning, match="No space left"):
            cache.write("k", b"payload", {})
        assert list(cache.folder.iterdir()) == []


class TestRoom:
    """What is used least goes first, and nothing may be larger than the whole."""

    @staticmethod
    def fill(folder: Path, keys: str, limit: int) -> ExecutableCache:
        cache = ExecutableCache(folder, limit)
        for age, key in enumerate(keys):
            cache.write(key, b"x" * 1000, {"program": key})
            os.utime(folder / f"{key}.exe", (age, age))
        return cache

    def test_entries_used_longest_ago_make_room(self, tmp_path: Path) -> None:
        cache = self.fill(tmp_path, "abc", 10**9)
        size = (tmp_path / "a.exe").stat().st_size
        assert cache.read("a") == b"x" * 1000  # which makes it the one used last
        cache = ExecutableCache(tmp_path, 3 * size)
        cache.write("d", b"y" * 1000, {"program": "d"})
        assert [entry.key for entry in cache.entries()] == ["d", "a", "c"]

    def test_one_that_is_too_large_is_not_kept(self, tmp_path: Path) -> None:
        cache = self.fill(tmp_path, "a", 1200)
        with pytest.warns(FirstlightWarning, match="FIRSTLIGHT_EXECUTABLE_CACHE_BYTES allows 1200"):
            cache.write("b", b"x" * 2000, {})
        assert [entry.key for entry in cache.entries()] == ["a"]

    def test_the_limit_comes_from_the_environment(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("FIRSTLIGHT_EXECUTABLE_CACHE_BYTES", "123456")
        opened = ExecutableCache.open(tmp_path)
        assert opened is not None and opened.limit == 123456
        monkeypatch.setenv("FIRSTLIGHT_EXECUTABLE_CACHE_BYTES", "10 GB")
        with pytest.raises(ConfigError, match="'10 GB'; a whole number of bytes"):
            ExecutableCache.open(tmp_path)

    def test_clear(self, tmp_path: Path) -> None:
        cache = self.fill(tmp_path, "abc", 10**9)
        count, nbytes = cache.clear()
        assert count == 3 and nbytes > 3000
        assert cache.entries() == [] and list(tmp_path.iterdir()) == []

    def test_only_entries_are_removed(self, tmp_path: Path) -> None:
        cache = self.fill(tmp_path, "ab", 10**9)
        (tmp_path / "setup.exe").write_bytes(b"somebody else's" * 1000)
        (tmp_path / "folder.exe").mkdir()
        ExecutableCache(tmp_path, 1300).write("c", b"x" * 1000, {"program": "c"})
        assert [entry.key for entry in cache.entries()] == ["c"]
        assert cache.clear()[0] == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.exe", "setup.exe"]

    def test_a_length_that_cannot_be(self, tmp_path: Path) -> None:
        cache = self.fill(tmp_path, "a", 10**9)
        content = bytearray((tmp_path / "a.exe").read_bytes())
        content[24 + 32 : 24 + 40] = b"\xff" * 8
        (tmp_path / "a.exe").write_bytes(content)
        assert cache.entries() == []


class TestExplain:
    def test_a_hit_needs_no_explanation(self, cache: ExecutableCache) -> None:
        compiler = Compiler(MESH, cache)
        compiler.submit(program()).result()
        compiler.flush()
        assert cache.explain(program_key(program(), MESH), key_fields(program(), MESH)) is None

    def test_a_miss_names_what_changed(self, cache: ExecutableCache, monkeypatch) -> None:
        for other in (program(), program(width=32)):
            compiler = Compiler(MESH, cache)
            compiler.submit(other).result()
            compiler.flush()
        monkeypatch.setattr(environment, "usable_cores", lambda: 77)
        fields = key_fields(program(), MESH)
        (line,) = cache.explain(program_key(program(), MESH), fields) or []
        assert line.startswith("cores: ") and line.endswith(" then, 77 now")

    def test_a_program_never_seen(self, cache: ExecutableCache) -> None:
        fields = key_fields(program("new"), MESH)
        assert cache.explain("0", fields) == ["no program 'new' was kept before"]

    def test_the_reason_is_on_the_timeline(self, cache: ExecutableCache) -> None:
        compiler = Compiler(MESH, cache)
        compiler.submit(program()).result()
        (load,) = [s for s in compiler.timeline.spans if s.name == "load p"]
        assert load.facts == {"hit": False, "why": ["no program 'p' was kept before"]}
        names = [s.name for s in compiler.timeline.spans if s.lane == load.lane]
        assert names == ["load p", "trace and lower p", "compile p", "p ready"]


class TestKey:
    def test_is_json(self) -> None:
        json.dumps(key_fields(program(), MESH))

    @pytest.mark.parametrize(
        "other",
        [program(scale=0.25), program("q"), program(width=32)],
        ids=["identity", "name", "shape"],
    )
    def test_tells_programs_apart(self, other: Program) -> None:
        assert program_key(program(), MESH) != program_key(other, MESH)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("usable_cores", lambda: 77),
            ("versions", lambda: {"jax": "9"}),
            ("source_digest", lambda: "other"),
            ("device_kind", lambda device: "TPU v9"),
        ],
    )
    def test_tells_machines_apart(self, name: str, value, monkeypatch) -> None:
        before = program_key(program(), MESH)
        monkeypatch.setattr(environment, name, value)
        assert program_key(program(), MESH) != before

    def test_tells_flags_apart(self, monkeypatch) -> None:
        before = program_key(program(), MESH)
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert program_key(program(), MESH) != before

    def test_tells_options_apart(self, monkeypatch) -> None:
        before = program_key(program(), MESH)
        monkeypatch.setattr(compile_module, "compiler_options", lambda platform: {})
        assert program_key(program(), MESH) != before


SECOND_PROCESS = """
import json, sys, hashlib
import jax
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
from firstlight import Pipeline
pipe = Pipeline.from_pretrained("demo", dtype=sys.argv[1])
out = pipe("a fox on a blue background", seed=5, output_type="pil")
print(json.dumps({
    "picture": hashlib.sha256(out.images[0].tobytes()).hexdigest(),
    "compiled": pipe.programs_compiled,
    "traces": sum("trace" in e for e in events),
    "compiles": sum("compile" in e and "duration" in e and "retrieval" not in e for e in events),
    "events": sorted(set(events)),
}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_second_process_compiles_nothing(tmp_path: Path, dtype: str) -> None:
    """A second start neither traces nor compiles, and makes the same picture."""
    env = {**os.environ, "FIRSTLIGHT_EXECUTABLE_CACHE": str(tmp_path / "kept")}
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", SECOND_PROCESS, dtype],
                env=env, capture_output=True, text=True, check=True,
            ).stdout
        )
        for _ in range(2)
    )  # fmt: skip
    assert first["compiled"] == 4
    assert first["traces"] > 0 and first["compiles"] > 0, first["events"]
    assert second["compiled"] == second["traces"] == second["compiles"] == 0, second["events"]
    assert first["picture"] == second["picture"]
