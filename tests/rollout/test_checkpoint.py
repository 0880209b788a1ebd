"""Checkpoints: the bits that were saved, and runs that are killed and resumed."""

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


def test_restored_tree_has_the_bits_that_were_saved(tmp_path):
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


def rows(first, last):
    return jax.tree.map(lambda x: x[first:last], jax.device_get(collect("count")[1]))


def assert_same(got, want):
    got, want = jax.device_get((got, want))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_checkpoint_of_another_version_is_restored_or_named(tmp_path, monkeypatch):
    tree = {"a": jnp.arange(3.0)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "__version__", "0.0.7")
        checkpoint.save(tmp_path, tree)
    chex.assert_trees_all_equal(checkpoint.restore(tmp_path, tree), tree)
    versions = f"0.0.7 of rollout saved .*version {rollout.__version__} is installed"
    with pytest.raises(ValueError, match=versions):
        checkpoint.restore(tmp_path, {"a": 1.0})


def test_buffer_is_restored_from_its_shapes_and_goes_on_alike(tmp_path):
    buffer = buffers.ReplayBuffer(128, 16, next_obs="shared", final_obs_capacity=32)
    add = jax.jit(buffer.add)
    start = jax.jit(buffer.init)(jax.tree.map(lambda x: x[0], rows(0, 1)))
    state = add(start, rows(0, 11))
    checkpoint.save(tmp_path, state)
    got = checkpoint.restore(tmp_path, jax.eval_shape(lambda: state))
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert_same(got, state)
    assert_same(add(got, rows(11, 22)), add(state, rows(11, 22)))


def test_restored_buffer_is_written_in_place(tmp_path):
    """An array that NumPy owns would be copied at every donation."""
    buffer = buffers.ReplayBuffer(1 << 16, 16)
    row = {"number": np.zeros((16, 2), np.int32)}
    checkpoint.save(tmp_path, buffer.init(row))
    add = jax.jit(buffer.add, donate_argnums=0)
    for like in (buffer.init(row), jax.device_put(buffer.init(row), jax.devices()[1])):
        got = checkpoint.restore(tmp_path, like)
        before = got.experience["number"].unsafe_buffer_pointer()
        for number in (100, 200):
            got = add(got, {"number": np.full((3, 16, 2), number, np.int32)})
            assert got.experience["number"].unsafe_buffer_pointer() == before
        assert (np.asarray(got.experience["number"]) == 100).sum() == 3 * 16 * 2


def test_arrays_lie_where_those_of_like_do(tmp_path):
    mesh = jax.make_mesh((4,), ("lanes",))
    place = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))  # noqa: E731
    tree = {
        "lanes": jax.device_put(jnp.arange(8.0), place("lanes")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), place("lanes")),
        "every": jax.device_put(jnp.int32(3), place()),
        "second": jax.device_put(jnp.ones(3), jax.devices()[1]),
        "anywhere": jnp.ones(3),
        "host": np.ones(3, np.float32),
    }
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in tree.items()
        if name in ("lanes", "every", "second")
    }
    checkpoint.save(tmp_path, tree)
    for like in (tree, {**tree, **shapes}):
        got = checkpoint.restore(tmp_path, like)
        for name in ("lanes", "keys", "every", "second"):
            assert got[name].sharding == tree[name].sharding
        assert not got["anywhere"].committed
        assert type(got["host"]) is np.ndarray
        assert_same(raw(got), raw(tree))


DTYPES = "bool int8 uint32 float16 float32 complex64 bfloat16 float8_e4m3fn int4 uint4"
IMPLS = {"threefry2x32": 2, "rbg": 4}  # words of a key


# Of the leaves that are typed keys.
key_words = jax.jit(lambda tree: [jax.random.key_data(tree[x]) for x in IMPLS])


@pytest.mark.compiles(30)  # two for each leaf that is restored
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_leaf_of_any_dtype_and_shape_is_restored(shape, tmp_path):
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
        assert_same(key_words(got), [*words.values()])
        assert_same({x: got[x] for x in numbers}, numbers)
        assert isinstance(got["int4"], np.ndarray if like is tree else jax.Array)


def test_dtype_that_is_switched_off_stays_on_the_host(tmp_path):
    checkpoint.save(tmp_path, {"a": np.arange(3.0)})
    like = {"a": jax.ShapeDtypeStruct((3,), np.float64)}
    got = checkpoint.restore(tmp_path, like)
    assert_same(got, {"a": np.arange(3.0)})


def test_every_and_keep_say_what_stays(tmp_path):
    saved = [
        checkpoint.save(tmp_path, {"n": n}, step=n, every=3, keep=2) for n in range(11)
    ]
    # 0, 3, 6 and 9 are saved, and the last two stay.
    assert [n for n in range(11) if saved[n]] == [0, 3, 6, 9]
    assert checkpoint.steps(tmp_path) == [6, 9]
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 9
    assert checkpoint.restore(tmp_path, {"n": 0}, step=6)["n"] == 6


def test_half_written_checkpoint_is_not_picked_up(tmp_path):
    checkpoint.save(tmp_path, {"n": 1}, step=1)
    (tmp_path / "2.checkpoint.npz.part").write_bytes(b"half")
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 1
    checkpoint.save(tmp_path, {"n": 2}, step=2)
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    (tmp_path / "4.checkpoint.npz.part").write_bytes(b"half")
    checkpoint.save(tmp_path, {"n": 3}, step=3)
    assert [x.name for x in tmp_path.iterdir()] == ["3.checkpoint.npz"]  # nor kept


def test_restore_looks_again_if_another_process_replaced_the_checkpoint(
    tmp_path, monkeypatch
):
    checkpoint.save(tmp_path, {"n": 1})
    steps = checkpoint.steps

    def list_too_early(path):
        found = steps(path)
        monkeypatch.setattr(checkpoint, "steps", steps)
        checkpoint.save(path, {"n": 2})
        return found

    monkeypatch.setattr(checkpoint, "steps", list_too_early)
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    (tmp_path / "2.checkpoint.npz").symlink_to("nothing")
    with pytest.raises(ValueError, match=r"Checkpoint 2 in .* is damaged"):
        checkpoint.restore(tmp_path, {"n": 0})


def test_damaged_shape_is_no_smaller_array(tmp_path):
    tree = {"w": jnp.ones((900, 40))}
    checkpoint.save(tmp_path, tree)
    path = tmp_path / "0.checkpoint.npz"
    content = path.read_bytes()
    assert content.count(b"(900, 40)") == 1
    path.write_bytes(content.replace(b"(900, 40)", b"(800, 40)"))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.restore(tmp_path, tree)


def test_save_that_fails_leaves_nothing_and_the_next_one_fits(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint.save(tmp_path, {"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path, {"n": 2})
    assert [x.name for x in tmp_path.iterdir()] == ["0.checkpoint.npz"]
    (tmp_path / "4.checkpoint.npz.part").write_bytes(b"half")  # of a killed process

    def look(descriptor):
        assert [x.name for x in tmp_path.glob("*.part")] == ["1.checkpoint.npz.part"]

    monkeypatch.setattr(os, "fsync", look)
    checkpoint.save(tmp_path, {"n": 2})
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2


def test_foreign_file_under_the_name_of_a_checkpoint_is_named(tmp_path):
    checkpoint.save(tmp_path, {"n": 1})
    np.savez(tmp_path / "3.checkpoint.npz", mine=np.ones(3))
    with pytest.raises(
        ValueError, match=r"not a checkpoint .* delete 3\.checkpoint\.npz"
    ):
        checkpoint.restore(tmp_path, {"n": 0})
    (tmp_path / "3.checkpoint.npz").unlink()
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 1


def test_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpoint.save("~/run", {"n": 1})
    assert checkpoint.steps("~/run") == checkpoint.steps(tmp_path / "run") == [0]
    assert checkpoint.restore("~/run", {"n": 0})["n"] == 1


def test_save_killed_before_it_deletes_the_old_one_is_complete(tmp_path, monkeypatch):
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
def start(monkeypatch):
    """Starts the streamer in a process of its own.

    A server that has imported it, and started nothing of jax, is forked each time:
    importing was most of the time of a process.
    """
    folders = [str(ROOT / "tests" / "support"), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))  # read by the server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streamer"])

    def start(folder):
        folder.mkdir(exist_ok=True)
        process = context.Process(target=streamer.main, args=(folder, NUM_BATCHES))
        process.start()
        return process

    return start


def exit_code(process):
    process.join(timeout=120)
    return process.exitcode


def lines(folder):
    file = folder / "hashes"
    return file.read_text().splitlines() if file.exists() else []


def hashes(folder):
    """The hashes by number; a batch that was made twice must be the same twice."""
    found = {}
    for line in lines(folder):
        number, _, value = line.partition(" ")
        if number != "start" and len(value) == 64:  # not a line that was cut off
            assert found.setdefault(int(number), value) == value
    return found


@pytest.mark.slow
def test_run_that_is_killed_again_and_again_yields_the_same_batches(start, tmp_path):
    whole, killed, num_kills = tmp_path / "whole", tmp_path / "killed", 7
    assert exit_code(start(whole)) == 0
    rng = random.Random(0)
    for _ in range(num_kills):
        most = len(lines(killed)) + rng.randint(2, 5)
        process = start(killed)
        while len(lines(killed)) < most:  # until it has made some batches
            assert process.is_alive()
            time.sleep(0.002)
        # Anywhere within batches and checkpoints: two and one take about 20 ms.
        time.sleep(rng.uniform(0.0, 0.02))
        process.kill()
        assert exit_code(process) == -signal.SIGKILL
    assert sorted(hashes(killed)) != list(range(NUM_BATCHES))
    assert exit_code(start(killed)) == 0
    starts = [x.split()[1] for x in lines(killed) if x.startswith("start ")]
    assert len(starts) == num_kills + 1
    # Most were killed after a checkpoint, so the next one went on from there.
    assert sum(int(number) > 0 for number in starts) > num_kills / 2
    assert hashes(killed) == hashes(whole)
    assert sorted(hashes(whole)) == list(range(NUM_BATCHES))


def test_files_of_others_are_never_touched(tmp_path):
    (tmp_path / "2023").mkdir()
    others = ["0", "1.npz", "2023/5.checkpoint.npz", "notes.txt", "a.checkpoint.npz"]
    others += [".DS_Store", "._0.checkpoint.npz"]  # of a file manager
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    for step in range(3):  # without a number the next one is taken
        checkpoint.save(tmp_path, {"n": step})
    assert checkpoint.steps(tmp_path) == [2]
    assert checkpoint.restore(tmp_path, {"n": 0})["n"] == 2
    assert {(tmp_path / name).read_bytes() for name in others} == {b"mine"}


def test_other_programs_read_the_arrays_by_numpy(tmp_path):
    checkpoint.save(tmp_path, {"a": jnp.arange(3), "b": jnp.ones((2, 1))})
    with np.load(tmp_path / "0.checkpoint.npz") as archive:
        assert archive["arr_0"].tolist() == ["['a'] int32[3]", "['b'] float32[2,1]"]
        np.testing.assert_array_equal(archive["arr_1"], np.arange(3))
        np.testing.assert_array_equal(archive["arr_2"], np.ones((2, 1)))


def test_damaged_checkpoint_is_refused_and_the_one_before_named(tmp_path):
    tree = {"w": jnp.arange(64.0), "b": jnp.ones(3)}
    checkpoint.save(tmp_path, tree, step=1, keep=2)
    checkpoint.save(tmp_path, tree, step=2, keep=2)
    path, rng, messages = tmp_path / "2.checkpoint.npz", random.Random(0), []
    content = path.read_bytes()
    for _ in range(200):
        place = rng.randrange(len(content))
        flipped = content[place] ^ (1 << rng.randrange(8))
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        try:  # parts that are not read may be damaged
            chex.assert_trees_all_equal(checkpoint.restore(tmp_path, tree), tree)
        except ValueError as error:
            messages.append(str(error))
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"Checkpoint 2 in .* is damaged"):
        checkpoint.restore(tmp_path, tree)
    named = ("Checkpoint 2 in", "`step=1` is the previous one")
    assert len(messages) > 100
    assert all(name in message for message in messages for name in named)
    chex.assert_trees_all_equal(checkpoint.restore(tmp_path, tree, step=1), tree)
