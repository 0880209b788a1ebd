"""Tests of error messages.

`tests/test_bad_input.py` tests counts, keys, carries and types of all packages.
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
    """Restores a stream from the changed state of a stream with other options."""
    stream = make_stream()
    new_stream(**options).restore(stream.state() | (state or {}))


def save(tree=1, times=1, **options):
    for _ in range(times):
        checkpoint.save("folder", tree, **options)


def save_within_save():
    """Saves during another save to the same folder."""
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


def change_recorded_field(field):
    """Replaces a recorded field that statistics read."""
    step_with(record_fn=lambda t: t.replace(**{field: getattr(t, field) * 1}))


def next_values(value=ROWS, last_value=ROWS[0], **fields):
    trajectory = collect("count")[1].replace(**fields)
    return rollout.next_values(trajectory, value, last_value)


def gae(**arguments):
    """Computes advantages with one invalid argument."""
    floats = dict.fromkeys(["reward", "value", "next_value"], ROWS)
    flags = dict.fromkeys(["terminated", "truncated"], ROWS > 0)
    return rollout.gae(**{**floats, **flags, **arguments}, gamma=0.9, lambda_=0.9)


def bool_update(count, transition):
    """Returns bool instead of float."""
    return transition.done


def scan_minibatches(tree, num_minibatches, **options):
    options["num_minibatches"] = num_minibatches
    rollout.scan_minibatches(lambda *args: args, (), KEY, tree, **options)


def collect_from(change_fn=lambda carry: carry, **fields):
    """Collects from a changed carry, or with a collector with changed fields."""
    collector = make_collector("count", B)
    carry = change_fn(collector.init(KEY))
    collector.replace(**fields).collect_steps(carry, None, 2)


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
COUNT_ACCUMULATOR = {"n": rollout.Accumulator(jnp.zeros, lambda count, t: count + 1)}
CARRY = [
    (
        {"accumulators": COUNT_ACCUMULATOR},
        "float32 of shape (4,) at .accumulated['n'], got ano",
    ),
    (
        {"change_fn": lambda x: x.replace(key=jax.random.key(0, impl="rbg"))},
        "key<rbg> of shape (4,) at ['key'], got key<fry> of shape (4,)",
    ),
]
VALUE_FN = [
    (lambda params, obs, state: obs, "of shape (5,), got float32 of shape (5, 1)"),
    (lambda params, obs, state: obs[:, 0] > 0, "got bool of shape (5,)"),
]
RECORDED_FIELDS = "terminated", "mask", "episode_id", "episode_return"
OUT_OF_ORDER = AsyncInfo(1, 2, 3)
log_stats, window = rollout.log_stats, rollout.EpisodeWindow.init(4)
MESSAGES = [
    # Incompatible counts and options.
    (lambda: save(times=2, step=5), "`step` must be an int of at least 6, got 5"),
    (lambda: shard(6, 4), "got 6; the nearest are 4 or 8"),
    (lambda: shard(8, 2), "and not be sharded already, got _Sha"),
    (lambda: scan_minibatches(ROWS, 3, axis=1), "divide the 16 items, got 3"),
    # Invalid states.
    (
        lambda: restore(params={"odds": jnp.ones(7)}),
        "(7,) at ['params']['odds'], got float32",
    ),
    (
        lambda: restore({"carry": make_collector("count", 2 * B).init(KEY)}),
        "`state` must be the state of a stream of the same kind",
    ),
    *((functools.partial(collect_from, **x), message) for x, message in CARRY),
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
    # Limits of checkpoints.
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
    # Results of functions of users.
    *((functools.partial(step_with, value_fn=fn), message) for fn, message in VALUE_FN),
    (
        lambda: step_with(
            accumulators={"n": rollout.Accumulator(jnp.zeros, bool_update)}
        ),
        "The accumulator `n` must return",
    ),
    (lambda: step_with(record_fn=lambda t: t.replace(obs=None)), "set a dropped"),
    *(
        (functools.partial(change_recorded_field, x), f"must leave `{x}` as it is")
        for x in RECORDED_FIELDS
    ),
    # Invalid configurations and states of agents.
    (lambda: PPO(None, {"gamma": 0.9}), "`config` must be a dataclass, such as"),
    (
        lambda: PPO(make_collector("count", 5).env).train({"params": 1}),
        "`state` must be a result of `agent.init",
    ),
    # Invalid arrays.
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
    # Inspection and rendering.
    (
        lambda: rollout.inspect_program(jnp.sin, ROWS, accelerator="tpu"),
        "'tpu'",
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


@pytest.mark.parametrize(
    "entry", MESSAGES, ids=[message for _, message, *_ in MESSAGES]
)
def test_invalid_call_raises(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message, error_type = (*entry, ValueError)[:3]
    with pytest.raises(error_type, match=re.escape(message)) as error:
        call()
    assert len(str(error.value)) < 400
    assert not (tmp_path / "a.gif").exists()
