"""Saving and loading: every leaf back, and nothing but an error from a bad file."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import raw

import buffers

NUM_ENVS = 2


def make_chunk(first, num_rows):
    """Every leaf of a row says the same number; an episode ends at every fourth."""
    number = first + np.arange(num_rows * NUM_ENVS).reshape(num_rows, NUM_ENVS)
    obs = np.stack([number, -number], axis=-1).astype(np.float32)
    return {
        "obs": obs,
        "next_obs": obs + np.float32([NUM_ENVS, -NUM_ENVS]).reshape(1, 1, 2),
        "reward": number.astype(np.float32),
        "terminated": number // NUM_ENVS % 4 == 3,
        "truncated": np.zeros(number.shape, bool),
        "number": number.astype(np.int32),
    }


@functools.cache
def make_state(kind="replay", capacity=16):
    """A compiled `add`, one for chunks of 11 rows, and a state that has such a one."""
    buffer = {
        "replay": lambda: buffers.ReplayBuffer(capacity, NUM_ENVS),
        "shared": lambda: buffers.ReplayBuffer(
            capacity, NUM_ENVS, successor="shared", final_capacity=4
        ),
        "prioritized": lambda: buffers.PrioritizedReplayBuffer(capacity, NUM_ENVS),
        "episodic": lambda: buffers.EpisodeBuffer(capacity, NUM_ENVS),
    }[kind]()
    chunk, add = make_chunk(0, 11), jax.jit(buffer.add)
    state = buffer.init(jax.tree.map(lambda x: x[0], chunk))
    return add, add(state, chunk)


def same(got, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.parametrize("kind", ["replay", "shared", "prioritized", "episodic"])
def test_state_comes_back_bit_for_bit_and_goes_on_alike(tmp_path, kind):
    add, state = make_state(kind)
    buffers.save(tmp_path / "state", state)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    loaded = buffers.load(tmp_path / "state", jax.eval_shape(lambda: state))
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert same(loaded, state)
    assert same(add(loaded, make_chunk(99, 11)), add(state, make_chunk(99, 11)))


DTYPES = "bool int8 uint32 float16 float32 complex64 bfloat16 float8_e4m3fn int4 uint4"


@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_leaf_of_any_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    number = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1
    leaf = number.astype(jnp.dtype(dtype))
    buffers.save(tmp_path / "state", {"a": leaf})
    loaded = buffers.load(tmp_path / "state", {"a": leaf})
    assert same(loaded, {"a": leaf})


def test_bits_that_compare_unequal_or_alike_are_kept(tmp_path):
    leaf = np.array([np.nan, -np.nan, -0.0, 0.0, np.inf], np.float32)
    buffers.save(tmp_path / "state", leaf)
    assert same(buffers.load(tmp_path / "state", leaf), leaf)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_come_back(tmp_path, impl):
    state = {"keys": jax.random.split(jax.random.key(3, impl=impl), 4)}
    buffers.save(tmp_path / "state", state)
    for like in (state, jax.eval_shape(lambda: state)):
        loaded = buffers.load(tmp_path / "state", like)
        assert loaded["keys"].dtype == state["keys"].dtype
        assert same(raw(loaded), raw(state))


def test_file_is_plain_arrays_and_says_what_they_are(tmp_path):
    _, state = make_state()
    buffers.save(tmp_path / "state", state)
    with np.load(tmp_path / "state", allow_pickle=False) as file:
        header = json.loads(str(file["header"]))
        leaves = [file[f"leaf_{n}"] for n in range(len(header["leaves"]))]
    assert header["version"] == 1
    paths = [leaf["path"] for leaf in header["leaves"]]
    assert paths[:2] == [".experience['next_obs']", ".experience['number']"]
    assert header["leaves"][1] == {
        "path": ".experience['number']",
        "dtype": "int32",
        "shape": [8, 2],
    }
    for leaf, want in zip(leaves, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(leaf, want)


def test_same_state_gives_the_same_file(tmp_path):
    _, state = make_state()
    for name in ("one", "two"):
        buffers.save(tmp_path / name, state)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_loaded_state_is_written_in_place(tmp_path):
    """An array that NumPy owns would be copied at every donation."""
    buffer = buffers.ReplayBuffer(1 << 16, NUM_ENVS)
    state = buffer.init(jax.tree.map(lambda x: x[0], make_chunk(0, 11)))
    buffers.save(tmp_path / "state", state)
    loaded = buffers.load(tmp_path / "state", state)
    pointer = lambda state: state.experience["obs"].unsafe_buffer_pointer()  # noqa: E731
    before = pointer(loaded)
    add = jax.jit(buffer.add, donate_argnums=0)
    for first in (100, 200):
        loaded = add(loaded, make_chunk(first, 3))
        assert pointer(loaded) == before
    assert loaded.experience["number"][0, 0] == 100


def test_leaf_that_differs_is_named(tmp_path):
    _, state = make_state()
    buffers.save(tmp_path / "state", state)
    rows = state.experience
    for change, message in (
        (
            {"obs": rows["obs"][:4]},
            r"`like` must be float32 of shape \(8, 2, 2\) at "
            r"\.experience\['obs'\], as in the file, got float32 of shape \(4, 2, 2\)",
        ),
        (
            {"number": rows["number"].astype(jnp.int16)},
            r"int32 of shape \(8, 2\) at \.experience\['number'\], .*, got int16",
        ),
        ({"extra": rows["number"]}, r"got \.experience\['extra'\] that the file lacks"),
        ({"number": ()}, r"got none .*, and lacks \.experience\['number'\] of the"),
    ):
        with pytest.raises(ValueError, match=message):
            buffers.load(tmp_path / "state", state.replace(experience=rows | change))
    with pytest.raises(ValueError, match=r"lacks \.experience\['next_obs'\] of the"):
        buffers.load(tmp_path / "state", rows)


def test_dtype_that_is_switched_off_is_refused(tmp_path):
    leaf = {"a": np.arange(3.0)}
    buffers.save(tmp_path / "state", leaf)
    with pytest.raises(ValueError, match=r"at \['a'\], got float64 without"):
        buffers.load(tmp_path / "state", leaf)


@pytest.mark.parametrize("leaf", [3, "text", np.array(["text"]), np.array([{}])])
def test_leaf_that_is_no_array_of_numbers_is_refused(tmp_path, leaf):
    with pytest.raises(ValueError, match=r"`state` must hold arrays .* at \['a'\]"):
        buffers.save(tmp_path / "state", {"a": leaf})
    assert not list(tmp_path.iterdir())


def test_file_that_is_missing_is_told_from_one_that_is_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        buffers.load(tmp_path / "state", np.zeros(3))
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="`path` is damaged or was not written by"):
        buffers.load(tmp_path / "other.npz", np.zeros(3))


def test_pickle_in_a_file_is_not_run(tmp_path):
    header = {"version": 1, "leaves": [{"path": "", "dtype": "int32", "shape": [1]}]}
    with open(tmp_path / "state", "wb") as file:
        leaf = np.array([{}], object)
        np.savez(file, header=json.dumps(header), leaf_0=leaf, allow_pickle=True)
    with pytest.raises(ValueError, match=r"`path` is damaged .* Object arrays"):
        buffers.load(tmp_path / "state", np.zeros(1, np.int32))


def test_other_version_is_named(tmp_path):
    with open(tmp_path / "state", "wb") as file:
        np.savez(file, header=json.dumps({"version": 2}))
    message = "`path` must be a file of format version 1, got version 2"
    with pytest.raises(ValueError, match=message):
        buffers.load(tmp_path / "state", np.zeros(1, np.int32))


def loads_alike(path, state):
    """Tells whether a file loads; it must load as `state` or not at all."""
    try:
        loaded = buffers.load(path, state)
    except ValueError as error:
        message = str(error)
    else:
        assert same(loaded, state)
        return True
    assert message.startswith("`path` is damaged")
    return False


def test_file_cut_off_anywhere_is_damaged(tmp_path):
    state = {"a": np.arange(30, dtype=np.int32), "b": np.float32([1, 2])}
    path = tmp_path / "state"
    buffers.save(path, state)
    whole = path.read_bytes()
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        assert not loads_alike(path, state)


def test_byte_changed_anywhere_is_damage_or_dead_space(tmp_path):
    state = {"a": np.arange(30, dtype=np.int32), "b": np.float32([1, 2])}
    path = tmp_path / "state"
    buffers.save(path, state)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        live = {whole.index(archive.read(info)): info for info in archive.infolist()}
    content = {at + i for at, info in live.items() for i in range(info.file_size)}
    rng, num_read = random.Random(0), 0
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= rng.choice([1, 2, 16, 32, 128, 255])
        path.write_bytes(changed)
        read = loads_alike(path, state)
        assert not (read and at in content)
        num_read += read
    # Dates, attributes and the local copies of sizes and checksums do not count.
    assert 0 < num_read < 0.2 * len(whole)


def test_block_of_zeros_is_damage(tmp_path):
    state = np.arange(1, 5000, dtype=np.int32)
    path = tmp_path / "state"
    buffers.save(path, state)
    whole = path.read_bytes()
    for at in range(512, len(whole) - 512, 512):
        path.write_bytes(whole[:at] + bytes(512) + whole[at + 512 :])
        assert not loads_alike(path, state)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_while_saving_leaves_the_old_file_alone(tmp_path, monkeypatch, call):
    old = np.arange(3, dtype=np.int32)
    buffers.save(tmp_path / "state", old)

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        buffers.save(tmp_path / "state", old + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert same(buffers.load(tmp_path / "state", old), old)


def test_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "state")
    leaf = np.arange(3, dtype=np.int32)
    buffers.save(tmp_path / "link", leaf)
    assert (tmp_path / "link").is_symlink()
    assert same(buffers.load(tmp_path / "state", leaf), leaf)


SAVE_FOR_EVER = """
import sys, numpy as np, buffers
number = 1
while True:
    state = {"a": np.full(500_000, number, np.int32), "b": np.int32([number])}
    buffers.save(sys.argv[1], state)
    if number == 1:
        print("started", flush=True)
    number += 1
"""


@pytest.mark.slow
def test_kill_while_saving_leaves_a_whole_file(tmp_path):
    path, rng, numbers = tmp_path / "state", random.Random(1), []
    like = {"a": np.zeros(500_000, np.int32), "b": np.zeros(1, np.int32)}
    buffers.save(path, like)
    num_cut = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, path], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout.readline() == b"started\n"
            time.sleep(rng.uniform(0, 0.05))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
        loaded = buffers.load(path, like)
        numbers.append(int(loaded["b"][0]))
        assert (np.asarray(loaded["a"]) == numbers[-1]).all()
        parts = list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))
        num_cut += bool(parts)
        for part in set(parts):
            part.unlink()
    assert num_cut  # at least one was killed in the middle of a file
    assert min(numbers) >= 1


def test_array_that_is_not_what_the_header_says_is_damage(tmp_path):
    path, like = tmp_path / "state", {"a": np.zeros(3, np.float32), "b": np.zeros(2)}
    like["b"] = like["b"].astype(np.int32)
    wrong = [np.zeros(4, np.float32), np.zeros(3, np.int32), np.zeros(3, np.float16)]
    for array in wrong:
        buffers.save(path, like)
        header = str(np.load(path)["header"])
        np.savez(tmp_path / "other", header=header, leaf_0=array, leaf_1=like["b"])
        with pytest.raises(ValueError, match=r"damaged .* not what the header says"):
            buffers.load(tmp_path / "other.npz", like)


def test_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "state"
    path.touch(mode=0o600)
    buffers.save(path, {"a": np.zeros(3)})
    assert path.stat().st_mode & 0o777 == 0o600
