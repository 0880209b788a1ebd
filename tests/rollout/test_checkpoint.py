"""Tests of checkpoints: saved bits, damaged files and killed runs."""

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import streamer
from cases import collect, raw

import rollout
from rollout import buffers, checkpoint
from rollout.base import trees

ROOT = Path(__file__).parents[2]
NUM_BATCHES = 50


def test_restore_returns_the_saved_bits(tmp_path):
    params = {"w": jnp.array([1.5, jnp.nan, -0.0, jnp.inf])}
    tree = {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "two words": {"a": (jnp.uint8(255), [jnp.int32(-1)])},
        "keys": jax.random.split(jax.random.key(1, impl="philox2x32"), 4),
        "wide": np.float64(1) / 3,
        "large": np.int64(2**40),
        "number": 7,
    }
    assert checkpoint.save(tmp_path / "new" / "folder", tree)
    restored = checkpoint.restore(tmp_path / "new" / "folder", tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True)
    for want, got in pairs:
        want, got = (np.asarray(trees.unwrap_keys(x)) for x in (want, got))
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()
    assert jax.random.key_impl(restored["keys"]) == jax.random.key_impl(tree["keys"])


def collect_rows(first, last):
    return jax.tree.map(lambda x: x[first:last], jax.device_get(collect("count")[1]))


def assert_equal_bits(got, want):
    got, want = jax.device_get((got, want))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_error_names_the_version_of_the_checkpoint(tmp_path, monkeypatch):
    tree = {"a": jnp.arange(3.0)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "__version__", "0.0.7")
        checkpoint.save(tmp_path, tree)
    chex.assert_trees_all_equal(checkpoint.restore(tmp_path, tree), tree)
    versions = f"0.0.7 of rollout saved .*version {rollout.__version__} is installed"
    with pytest.raises(ValueError, match=versions):
        checkpoint.restore(tmp_path, {"a": 1.0})


def test_python_number_stands_for_an_array(tmp_path):
    saved = {"step": jnp.int32(3), "rate": jnp.float32(0.1), "flag": jnp.bool_(True)}
    checkpoint.save(tmp_path, saved)
    like = {"step": 0, "rate": 0.0, "flag": False}  # flax's `TrainState` has `step=0`
    restored = checkpoint.restore(tmp_path, like)
    assert isinstance(restored["step"], jax.Array)
    chex.assert_trees_all_equal(restored, saved)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, saved)
    checkpoint.save(tmp_path, {"step": 2**40, "rate": 0.1, "flag": True}, step=1)
    restored = checkpoint.restore(tmp_path, like)
    assert restored["step"] == 2**40
    assert restored["rate"] == 0.1
    with pytest.raises(checkpoint.StructureError, match="step"):
        checkpoint.restore(tmp_path, {**like, "step": 0.0})


def test_buffer_is_restored_from_shapes(tmp_path):
    buffer = buffers.ReplayBuffer(128, 16, next_obs="shared", final_obs_capacity=32)
    add = jax.jit(buffer.add)
    row = jax.tree.map(lambda x: x[0], collect_rows(0, 1))
    empty_state = jax.jit(buffer.init)(row)
    state = add(empty_state, collect_rows(0, 11))
    checkpoint.save(tmp_path, state)
    got = checkpoint.restore(tmp_path, jax.eval_shape(lambda: state))
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert_equal_bits(got, state)
    assert_equal_bits(add(got, collect_rows(11, 22)), add(state, collect_rows(11, 22)))


def test_restored_buffer_is_updated_in_place(tmp_path):
    """JAX copies an array that NumPy owns at every donation."""
    buffer = buffers.ReplayBuffer(1 << 16, 16)
    row = {"number": np.zeros((16, 2), np.int32)}
    checkpoint.save(tmp_path, buffer.init(row))
    add = jax.jit(buffer.add, donate_argnums=0)
    for like in (buffer.init(row), jax.device_put(buffer.init(row), jax.devices()[1])):
        got = checkpoint.restore(tmp_path, like)
        pointer = got.experience["number"].unsafe_buffer_pointer()
        for number in (100, 200):
            got = add(got, {"number": np.full((3, 16, 2), number, np.int32)})
            assert got.experience["number"].unsafe_buffer_pointer() == pointer
        assert (np.asarray(got.experience["number"]) == 100).sum() == 3 * 16 * 2


def test_restored_arrays_have_the_sharding_of_like(tmp_path):
    mesh = jax.make_mesh((4,), ("lanes",))
    shard = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))  # noqa: E731
    tree = {
        "lanes": jax.device_put(jnp.arange(8.0), shard("lanes")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), shard("lanes")),
        "replicated": jax.device_put(jnp.int32(3), shard()),
        "second": jax.device_put(jnp.ones(3), jax.devices()[1]),
        "uncommitted": jnp.ones(3),
        "host": np.ones(3, np.float32),
    }
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in tree.items()
        if name in ("lanes", "replicated", "second")
    }
    checkpoint.save(tmp_path, tree)
    for like in (tree, {**tree, **shapes}):
        got = checkpoint.restore(tmp_path, like)
        for name in ("lanes", "keys", "replicated", "second"):
            assert got[name].sharding == tree[name].sharding
        assert not got["uncommitted"].committed
        assert type(got["host"]) is np.ndarray
        assert_equal_bits(raw(got), raw(tree))


DTYPES = "bool int8 uint32 float16 float32 complex64 bfloat16 float8_e4m3fn int4 uint4"
IMPLS = {"threefry2x32": 2, "rbg": 4}  # words of a key


key_words = jax.jit(lambda tree: [jax.random.key_data(tree[x]) for x in IMPLS])


@pytest.mark.compiles(30)  # two programs per restored leaf
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_all_dtypes_and_shapes_are_restored(shape, tmp_path):
    number = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1
    numbers = {x: number.astype(jnp.dtype(x)) for x in DTYPES.split()}
    words = {x: np.full((*shape, n), 7, np.uint32) for x, n in IMPLS.items()}
    keys = {x: jax.random.wrap_key_data(words[x], impl=x) for x in IMPLS}
    tree = numbers | keys
    checkpoint.save(tmp_path, tree)
    on_device = jax.tree.map(jnp.asarray, tree)
    for like in (tree, on_device, jax.eval_shape(lambda: on_device)):
        got = checkpoint.restore(tmp_path, like)
        assert [got[x].dtype for x in IMPLS] == [tree[x].dtype for x in IMPLS]
        assert_equal_bits(key_words(got), [*words.values()])
        assert_equal_bits({x: got[x] for x in numbers}, numbers)
        assert isinstance(got["int4"], np.ndarray if like is tree else jax.Array)


def test_disabled_dtype_is_restored_to_numpy(tmp_path):
    checkpoint.save(tmp_path, {"a": np.arange(3.0)})
    like = {"a": jax.ShapeDtypeStruct((3,), np.float64)}
    got = checkpoint.restore(tmp_path, like)
    assert_equal_bits(got, {"a": np.arange(3.0)})


def test_every_and_keep_select_checkpoints(tmp_path):
    saved = [
        checkpoint.save(tmp_path, {"n": n}, step=n, every=3, keep=2) for n in range(11)
    ]
    # Steps 0, 3, 6 and 9 are saved, and the last two are kept.
    assert [n for n in range(11) if saved[n]] == [0, 3, 6, 9]
    assert checkpoint.steps(tmp_path) == [6, 9]
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 9
    assert checkpoint.restore(tmp_path, {"n": 0}, step=6)["n"] == 6


def test_partial_checkpoint_is_ignored(tmp_path):
    checkpoint.save(tmp_path, {"n": 1}, step=1)
    (tmp_path / "2.checkpoint.npz.part").write_bytes(b"half")
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 1
    checkpoint.save(tmp_path, {"n": 2}, step=2)
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    (tmp_path / "4.checkpoint.npz.part").write_bytes(b"half")
    checkpoint.save(tmp_path, {"n": 3}, step=3)
    assert [x.name for x in tmp_path.iterdir()] == ["3.checkpoint.npz"]


def test_restore_retries_after_a_concurrent_save(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"n": 1})
    steps = checkpoint.steps

    def list_too_early(path):
        step_list = steps(path)
        monkeypatch.setattr(checkpoint, "steps", steps)
        checkpoint.save(path, {"n": 2})
        return step_list

    monkeypatch.setattr(checkpoint, "steps", list_too_early)
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    (tmp_path / "2.checkpoint.npz").symlink_to("nothing")
    with pytest.raises(ValueError, match=r"Checkpoint 2 in .* is damaged"):
        checkpoint.restore(tmp_path, {"n": 0})


def test_damaged_shape_raises(tmp_path):
    tree = {"w": jnp.ones((900, 40))}
    checkpoint.save(tmp_path, tree)
    path = tmp_path / "0.checkpoint.npz"
    content = path.read_bytes()
    assert content.count(b"(900, 40)") == 1
    path.write_bytes(content.replace(b"(900, 40)", b"(800, 40)"))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.restore(tmp_path, tree)


def test_failed_save_leaves_no_file(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint.save(tmp_path, {"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path, {"n": 2})
    assert [x.name for x in tmp_path.iterdir()] == ["0.checkpoint.npz"]
    (tmp_path / "4.checkpoint.npz.part").write_bytes(b"half")  # from a killed process

    def look(descriptor):
        assert [x.name for x in tmp_path.glob("*.part")] == ["1.checkpoint.npz.part"]

    monkeypatch.setattr(os, "fsync", look)
    checkpoint.save(tmp_path, {"n": 2})
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2


def test_file_of_another_format_raises(tmp_path):
    checkpoint.save(tmp_path, {"n": 1})
    np.savez(tmp_path / "3.checkpoint.npz", mine=np.ones(3))
    with pytest.raises(
        ValueError, match=r"not a checkpoint .* delete 3\.checkpoint\.npz"
    ):
        checkpoint.restore(tmp_path, {"n": 0})
    (tmp_path / "3.checkpoint.npz").unlink()
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 1


def test_path_expands_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpoint.save("~/run", {"n": 1})
    assert checkpoint.steps("~/run") == checkpoint.steps(tmp_path / "run") == [0]
    assert checkpoint.restore("~/run", {"n": 0})["n"] == 1


def test_interrupted_deletion_keeps_the_new_checkpoint(tmp_path, monkeypatch):
    def kill(*_, **__):
        raise KeyboardInterrupt

    checkpoint.save(tmp_path, {"n": 1}, step=1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", kill)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, {"n": 2}, step=2)
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    checkpoint.save(tmp_path, {"n": 3}, step=3)
    assert checkpoint.steps(tmp_path) == [3]


@pytest.fixture
def start_streamer(monkeypatch):
    """Returns a function that starts `streamer` in a new process.

    The processes are forks of a server that has imported `streamer` and has not
    initialized JAX: imports dominate the start of a process.
    """
    folders = [str(ROOT / "tests" / "support"), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))  # read by the server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streamer"])

    def start_streamer(folder):
        folder.mkdir(exist_ok=True)
        process = context.Process(target=streamer.main, args=(folder, NUM_BATCHES))
        process.start()
        return process

    return start_streamer


def exit_code(process):
    process.join(timeout=120)
    return process.exitcode


def read_lines(folder):
    file = folder / "hashes"
    return file.read_text().splitlines() if file.exists() else []


def read_hashes(folder):
    """Returns hashes by batch number. Repeated batches must have equal hashes."""
    hashes = {}
    for line in read_lines(folder):
        number, _, value = line.partition(" ")
        if number != "start" and len(value) == 64:  # skip incomplete lines
            assert hashes.setdefault(int(number), value) == value
    return hashes


@pytest.mark.slow
def test_killed_run_resumes_with_the_same_batches(start_streamer, tmp_path):
    complete, killed, num_kills = tmp_path / "whole", tmp_path / "killed", 4
    assert exit_code(start_streamer(complete)) == 0
    rng = random.Random(0)
    for _ in range(num_kills):
        num_lines = len(read_lines(killed)) + rng.randint(2, 5)
        process = start_streamer(killed)
        while len(read_lines(killed)) < num_lines:  # until the run has some batches
            assert process.is_alive()
            time.sleep(0.002)
        # Kill the run within a batch or a checkpoint. Two batches take about 20 ms.
        time.sleep(rng.uniform(0.0, 0.02))
        process.kill()
        assert exit_code(process) == -signal.SIGKILL
    assert sorted(read_hashes(killed)) != list(range(NUM_BATCHES))
    assert exit_code(start_streamer(killed)) == 0
    starts = [x.split()[1] for x in read_lines(killed) if x.startswith("start ")]
    assert len(starts) == num_kills + 1
    # Most runs were killed after a checkpoint, so the next run resumed from it.
    assert sum(int(number) > 0 for number in starts) > num_kills / 2
    assert read_hashes(killed) == read_hashes(complete)
    assert sorted(read_hashes(complete)) == list(range(NUM_BATCHES))


def test_other_files_are_not_changed(tmp_path):
    (tmp_path / "2023").mkdir()
    names = ["0", "1.npz", "2023/5.checkpoint.npz", "notes.txt", "a.checkpoint.npz"]
    names += [".DS_Store", "._0.checkpoint.npz"]  # from a file manager
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    for step in range(3):  # `step` defaults to the next number
        checkpoint.save(tmp_path, {"n": step})
    assert checkpoint.steps(tmp_path) == [2]
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    assert {(tmp_path / name).read_bytes() for name in names} == {b"mine"}


def test_numpy_reads_the_arrays(tmp_path):
    checkpoint.save(tmp_path, {"a": jnp.arange(3), "b": jnp.ones((2, 1))})
    with np.load(tmp_path / "0.checkpoint.npz") as archive:
        assert archive["arr_0"].tolist() == ["['a'] int32[3]", "['b'] float32[2,1]"]
        np.testing.assert_array_equal(archive["arr_1"], np.arange(3))
        np.testing.assert_array_equal(archive["arr_2"], np.ones((2, 1)))


def test_damaged_checkpoint_names_the_previous_step(tmp_path):
    tree = {"w": jnp.arange(64.0), "b": jnp.ones(3)}
    checkpoint.save(tmp_path, tree, step=1, keep=2)
    checkpoint.save(tmp_path, tree, step=2, keep=2)
    path, rng, messages = tmp_path / "2.checkpoint.npz", random.Random(0), []
    content = path.read_bytes()
    for _ in range(200):
        offset = rng.randrange(len(content))
        byte = content[offset] ^ (1 << rng.randrange(8))
        path.write_bytes(content[:offset] + bytes([byte]) + content[offset + 1 :])
        try:  # damage to unread bytes has no effect
            chex.assert_trees_all_equal(checkpoint.restore(tmp_path, tree), tree)
        except ValueError as error:
            messages.append(str(error))
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"Checkpoint 2 in .* is damaged"):
        checkpoint.restore(tmp_path, tree)
    phrases = ("Checkpoint 2 in", "`step=1` is the previous one")
    assert len(messages) > 100
    assert all(name in message for message in messages for name in phrases)
    chex.assert_trees_all_equal(checkpoint.restore(tmp_path, tree, step=1), tree)
