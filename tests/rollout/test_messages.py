"""What cannot be done raises a message that says what must hold, and what was got.

`tests/test_bad_input.py` has the counts, keys, carries and kinds of all packages.
"""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import WithCritic, collect, make_collector
from host_count import on_host
from streams import B, make_stream, new_stream

import rollout
from rollout import checkpoint
from rollout.gif import draw_episode
from rollout.host import AsyncInfo
from rollout.recipes.ppo import PPO

KEY, ROWS = jax.random.key(0), jnp.zeros((64, 16))


def restore(state=None, **options):
    """Restores a stream with these options from one without, with a part replaced."""
    stream = make_stream()
    new_stream(**options).restore(stream.state() | (state or {}))


def save(tree=1, times=1, **options):
    for _ in range(times):
        checkpoint.save("folder", tree, **options)


def save_within_save():
    """Saves while another thread, or a signal handler, saves to the same folder."""
    with mock.patch("os.fsync", side_effect=lambda _: save()):
        save()


def load(saved, like, **options):
    save(saved, step=5)
    checkpoint.restore("folder", like, **options)


def step_with(value_fn=None, **fields):
    collector = make_collector("count", 5)
    policy = WithCritic(collector.policy, value_fn)
    collector = collector.replace(policy=policy, **fields)
    return collector.step(collector.init(KEY), None)


def record(field):
    """Stores a copy of a field that statistics read."""
    step_with(record_fn=lambda t: t.replace(**{field: getattr(t, field) * 1}))


def next_values(value=ROWS, last_value=ROWS[0], **fields):
    trajectory = collect("count")[1].replace(**fields)
    return rollout.next_values(trajectory, value, last_value)


def gae(**arguments):
    """Computes advantages of all that they need, with one part wrong."""
    floats = dict.fromkeys(["reward", "value", "next_value"], ROWS)
    flags = dict.fromkeys(["terminated", "truncated"], ROWS > 0)
    return rollout.gae(**{**floats, **flags, **arguments}, gamma=0.9, lambda_=0.9)


def wrong(count, transition):
    """Returns bool for a float."""
    return transition.done


def scan_minibatches(tree, num_minibatches, **options):
    options["num_minibatches"] = num_minibatches
    rollout.scan_minibatches(lambda *args: args, (), KEY, tree, **options)


def from_carry(spoil_fn=lambda carry: carry, **fields):
    """Takes steps from a carry of a collector with other fields, or a spoiled one."""
    collector = make_collector("count", B)
    made = spoil_fn(collector.init(KEY))
    collector.replace(**fields).collect_steps(made, None, 2)


def shard(num_envs, num_devices):
    mesh = jax.make_mesh(
        (num_devices,), ("lanes",), devices=jax.devices()[:num_devices]
    )
    rollout.shard(rollout.shard(make_collector("count", num_envs), mesh), mesh)


LOAD = [
    ({"critic": 1.0, "actor": 2.0}, {"critic": 0.0, "policy": 0.0}, "['actor'] float"),
    ({"a": 1.0, "b": 2.0}, {"a": 0.0}, "['b'] float64[], got no more"),
    ({"a": jnp.int32(1)}, {"a": jnp.float32(0)}, "['a'] int32[], got ['a'] float32[]"),
    (jnp.zeros(3), jnp.zeros(4), "the root float32[3], got the root float32[4]"),
    (
        jax.random.key(0, impl="rbg"),
        jax.random.key(0, impl="unsafe_rbg"),
        "the root key<rbg>[]",
    ),
]
COUNTED = {"n": rollout.Accumulator(jnp.zeros, lambda count, t: count + 1)}
CARRY = [
    ({"accumulators": COUNTED}, "float32 of shape (4,) at .accumulated['n'], got ano"),
    (
        {"spoil_fn": lambda x: x.replace(key=jax.random.key(0, impl="rbg"))},
        "key<rbg> of shape (4,) at ['key'], got key<fry> of shape (4,)",
    ),
]
VALUE_FN = [
    (lambda params, obs, state: obs, "of shape (5,), got float32 of shape (5, 1)"),
    (lambda params, obs, state: obs[:, 0] > 0, "got bool of shape (5,)"),
]
KEPT = "terminated", "mask", "episode_id", "episode_return"
OUT_OF_ORDER = AsyncInfo(1, 2, 3)
log_stats, window = rollout.log_stats, rollout.EpisodeWindow.init(4)
MESSAGES = [
    # Counts that do not fit one another, and options that exclude each other.
    (lambda: save(times=2, step=5), "`step` must be an int of at least 6, got 5"),
    (lambda: shard(6, 4), "got 6; the nearest are 4 or 8"),
    (lambda: shard(8, 2), "and not be sharded already, got _Sha"),
    (lambda: scan_minibatches(ROWS, 3, axis=1), "divide the 16 items, got 3"),
    # States of something else.
    (
        lambda: restore(params={"odds": jnp.ones(7)}),
        "(7,) at ['params']['odds'], got float32",
    ),
    (
        lambda: restore({"carry": make_collector("count", 2 * B).init(KEY)}),
        "`state` must be the state of a stream of the same kind",
    ),
    *((functools.partial(from_carry, **x), what) for x, what in CARRY),
    *((functools.partial(load, *x), f"leaves that were saved: {y}") for *x, y in LOAD),
    # Leaves that cannot be saved or logged.
    (
        lambda: save([np.ma.masked_array([1, 2], [0, 1])]),
        "typed keys and bytes, got int64",
    ),
    (lambda: save({"a": np.array([{}])}), "got object of shape (1,) at ['a']"),
    (lambda: log_stats({"a": ROWS[0]}), "got float32 of shape (16,) at a and None"),
    (
        lambda: log_stats({"a/b": 1.0, "a": {"b": 2.0}}),
        "`stats` must have different names, got 'a/b' twice.",
    ),
    # What runs in Python, in one thread, on this machine.
    (lambda: jax.jit(save)(ROWS), "`checkpoint.save` runs in Python and must"),
    (
        lambda: checkpoint.save("gs://bucket/run", 1),
        "`path` must name a folder of this machine, got 'gs://",
    ),
    (
        save_within_save,
        "`path` must have one writer at a time, got folder, to which another process",
        RuntimeError,
    ),
    # What functions of users return.
    *((functools.partial(step_with, value_fn=fn), what) for fn, what in VALUE_FN),
    (
        lambda: step_with(accumulators={"n": rollout.Accumulator(jnp.zeros, wrong)}),
        "The accumulator `n` must return",
    ),
    (lambda: step_with(record_fn=lambda t: t.replace(obs=None)), "set a dropped"),
    *((functools.partial(record, x), f"must leave `{x}` as it is") for x in KEPT),
    # Configurations and states of another kind.
    (lambda: PPO(None, {"gamma": 0.9}), "`config` must be a dataclass, such as"),
    (lambda: PPO(None).train({"params": 1}), "`state` must be a result of `agent.init"),
    # Rows of another shape, dtype or kind.
    (lambda: gae(next_value=ROWS[0]), "`next_value` must be an array of shape"),
    (lambda: gae(truncated=ROWS), "`truncated` must be bool, got float32"),
    (lambda: next_values(), "collectors record it if the policy has a critic"),
    (
        lambda: next_values(last_value=ROWS, final_value=ROWS),
        "`last_value` must be an array of shape",
    ),
    (
        lambda: window.add(collect("count")[1].replace(info=OUT_OF_ORDER)),
        "got rows of a `HostCollector` with `num_ready`",
    ),
    (
        lambda: rollout.EpisodeWindow.init(4, accumulated=["best"]).add(
            collect("count")[1]
        ),
        "must have the accumulated value 'best' of the window",
    ),
    # Programs and pictures.
    (
        lambda: rollout.inspect_program(jnp.sin, ROWS, accelerator="tpu"),
        "one of h100, a100, tpu-v5e, v5e, got 'tpu'",
    ),
    (lambda: draw_episode(on_host(), None, KEY, 9), "render frames, got HostCount"),
    (
        lambda: draw_episode(make_collector("count"), None, KEY, 9),
        "in its suite or a method `render_frames`",
    ),
    (
        lambda: rollout.record_gif(on_host(), None, KEY, "a.png"),
        "`path` must end in .gif, got a.png.",
    ),
    (
        lambda: rollout.record_gif(on_host(), None, KEY, "gone/a.gif"),
        "`path` must be in a folder that exists, got gone/a.gif.",
        FileNotFoundError,
    ),
]


@pytest.mark.parametrize("entry", MESSAGES, ids=[what for _, what, *_ in MESSAGES])
def test_call_raises_its_message(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message, kind = (*entry, ValueError)[:3]
    with pytest.raises(kind, match=re.escape(message)) as raised:
        call()
    assert len(str(raised.value)) < 400
    assert not (tmp_path / "a.gif").exists()
