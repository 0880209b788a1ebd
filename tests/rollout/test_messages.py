"""What cannot be done raises a message that says what must hold, and what was got.

`tests/test_bad_input.py` has the counts, keys, carries and kinds of all packages.
"""

import functools
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, WithCritic, collect, make_collector
from host_count import on_host
from streams import EPISODES, B, make_stream, new_stream

import rollout
from rollout import checkpoint, envs
from rollout.gif import draw_episode
from rollout.host import AsyncInfo

KEY, ROWS = jax.random.key(0), jnp.zeros((64, 16))


def restore(state=None, **options):
    """Restores a stream with these options from one without, with a part replaced."""
    stream = make_stream()
    new_stream(**options).restore(stream.state() | (state or {}))


def save(tree=1, times=1, **options):
    for _ in range(times):
        checkpoint.save("folder", tree, **options)


def save_at(path, link_to=None):
    if link_to:
        Path(path).symlink_to(link_to)
    checkpoint.save(path, 1)


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


def from_carry(of=None, spoil_fn=lambda carry: carry, **fields):
    """Takes a step from the carry of another collector, or one with a part replaced."""
    collector = make_collector("count", B)
    made = (of or collector).init(KEY)
    collector.replace(**fields).collect_steps(spoil_fn(made), None, 2)


def summarize_agents():
    collector = make_collector("count")
    play = functools.partial(
        collector.collect_episodes, num_episodes=2, max_episode_steps=3
    )
    episodes = jax.eval_shape(lambda: play(collector.init(KEY), None)[1])
    rollout.agents.summarize_agents(episodes)


def add_to_window(data, **options):
    rollout.EpisodeWindow.init(4, **options).add(data)


def log(leaf):
    rollout.log_stats({"a": {"b": leaf}})


def shard(num_envs, num_devices, axis="lanes"):
    mesh = jax.make_mesh((num_devices,), (axis,), devices=jax.devices()[:num_devices])
    rollout.shard(rollout.shard(make_collector("count", num_envs), mesh), mesh)


def scan_minibatches(tree=ROWS, num_minibatches=4, **options):
    step = lambda *args: args  # noqa: E731
    options["num_minibatches"] = num_minibatches
    rollout.scan_minibatches(step, (), KEY, tree, **options)


def inspect(program, *args, accelerator="h100", **options):
    rollout.inspect_program(program, *args, accelerator=accelerator, **options)


# By what is called, with the options of each call.
STREAM = [
    ({"steps_per_batch": 2**31}, "`steps_per_batch` must be at most 2147483647"),
    ({"steps_per_batch": 7}, "of num_envs=4, got 7; the nearest are 4 or 8."),
    ({"total_steps": 3}, "multiple of num_envs=4, got 3; the nearest are 4."),
    ({"prefetch": True}, "`prefetch` must be 0 or 1, got True"),
    (
        EPISODES | {"total_steps": 8},
        "`total_steps` must not be given with `episodes_per",
    ),
    (
        EPISODES | {"check_finite": True, "on_fault": "drop"},
        '`on_fault="drop"` must not be given with `episodes_per_batch`',
    ),
]
RESTORE = [
    ({"prefetch": 1}, "['next_params']['odds'], got another structure: float32 of"),
    ({"params": {"odds": jnp.ones(7)}}, "(7,) at ['params']['odds'], got float32"),
]
SAVE = [
    ({"tree": [np.ma.masked_array([1, 2], [0, 1])]}, "typed keys and bytes, got int64"),
    ({"tree": {"a": np.array([{}])}}, "got object of shape (1,) at ['a']"),
    ({"tree": {"a": object()}}, "`tree` must have numbers, arrays of numbers"),
    ({"times": 2, "step": 5}, "`step` must be an int of at least 6, got 5"),
]
LOAD = [
    ({"critic": 1.0, "actor": 2.0}, {"critic": 0.0, "policy": 0.0}, "['actor'] float"),
    ({"w1": 1.0, "w2": 2.0}, {"w2": 0.0, "z1": 0.0}, "['w1'] float64[], got ['w2']"),
    ({"a": 1.0, "b": 2.0}, [0.0, 0.0], "['a'] float64[], got [0]"),
    ({"a": 1.0}, {"a": 0.0, "b": 0.0}, "no more, got ['b']"),
    ({"a": 1.0, "b": 2.0}, {"a": 0.0}, "['b'] float64[], got no more"),
    ({"a": jnp.int32(1)}, {"a": jnp.float32(0)}, "['a'] int32[], got ['a'] float32[]"),
    (jnp.zeros(3), jnp.zeros(4), "the root float32[3], got the root float32[4]"),
    (
        jax.random.key(0, impl="rbg"),
        jax.random.key(0, impl="unsafe_rbg"),
        "the root key<rbg>[]",
    ),
]
FOLDERS = [
    (("gs://bucket/run",), "`path` must name a folder of this machine, got 'gs://"),
]
VALUE_FN = [
    (lambda params, obs, state: obs, "of shape (5,), got float32 of shape (5, 1)"),
    (lambda params, obs, state: obs.sum(), "got float32 of shape ()"),
    (lambda params, obs, state: obs[:, 0] > 0, "got bool of shape (5,)"),
    (lambda params, obs, state: (obs[:, 0], obs), "of shape (5,), got 2 values"),
]
COUNTED = {"n": rollout.Accumulator(jnp.zeros, lambda count, t: count + 1)}
MEMORY = rollout.recurrent_policy(
    lambda params, obs, state, key: (jnp.zeros(len(obs), jnp.int32), state), jnp.zeros
)
CARRY = [
    ({"policy": MEMORY}, "`carry.policy_state` must match the output of this collecto"),
    ({"accumulators": COUNTED}, "float32 of shape (4,) at .accumulated['n'], got ano"),
    ({"of": make_collector("CartPole-v1", B)}, "`carry.env_state` must match the"),
    (
        {"spoil_fn": lambda carry: carry.replace(obs=carry.obs[:, :0])},
        "must match the output of this collector's `init`: float32 of shape (4",
    ),
    (
        {"spoil_fn": lambda x: x.replace(key=jax.random.key(0, impl="rbg"))},
        "key<rbg> of shape (4,) at ['key'], got key<fry> of shape (4,)",
    ),
]
TARGETS = [
    ({"next_value": ROWS[0]}, "`next_value` must be an array of shape"),
    ({"next_value": None}, "got NoneType"),
    ({"truncated": ROWS}, "`truncated` must be bool, got float32"),
    ({"mask": ROWS}, "`mask` must be bool, got float32"),
]
KEPT = (
    "terminated",
    "truncated",
    "mask",
    "episode_id",
    "episode_return",
    "episode_length",
)
INSPECT = [
    ((3,), {}, "`program` must be"),
    ((jnp.sin, ROWS), {"num_steps": 3}, "`num_steps` must be None for a function"),
    (
        (jnp.sin, ROWS),
        {"accelerator": "tpu"},
        "one of h100, a100, tpu-v5e, v5e, got 'tpu'",
    ),
]
MESSAGES = [
    *((functools.partial(new_stream, **options), what) for options, what in STREAM),
    *((functools.partial(restore, **options), what) for options, what in RESTORE),
    *((functools.partial(save, **options), what) for options, what in SAVE),
    *((functools.partial(save_at, *x), what) for x, what in FOLDERS),
    *((functools.partial(load, *x), f"leaves that were saved: {y}") for *x, y in LOAD),
    *((functools.partial(step_with, value_fn=fn), what) for fn, what in VALUE_FN),
    *((functools.partial(inspect, *args, **x), what) for args, x, what in INSPECT),
    *((functools.partial(from_carry, **x), what) for x, what in CARRY),
    *((functools.partial(gae, **x), what) for x, what in TARGETS),
    (lambda: rollout.next_values(3, ROWS, ROWS[0]), "must be a `Transition`"),
    (
        lambda: rollout.next_values(next(make_stream()), ROWS, ROWS[0]),
        "such as `batch.trajectory`",
    ),
    (
        lambda: step_with(record_fn=lambda t: t.replace(final_value=None, obs=None)),
        "set a dropped",
    ),
    *((functools.partial(record, x), f"must leave `{x}` as it is") for x in KEPT),
    (
        lambda: restore({"carry": make_collector("count", 2 * B).init(KEY)}),
        "`state` must be the state of a stream of the same kind",
    ),
    (lambda: jax.jit(save)(ROWS), "`checkpoint.save` runs in Python, so it must"),
    (
        save_within_save,
        "`path` must have one writer at a time, got folder, to which another process",
        RuntimeError,
    ),
    (
        lambda: load({"n": 1}, {"n": 1}, step=4),
        "must hold a checkpoint 4, got folder with [5]",
        FileNotFoundError,
    ),
    (
        lambda: inspect(on_host(), None, KEY),
        "environments are in JAX, got HostCollector",
    ),
    (
        lambda: step_with(
            accumulators={"wrong": rollout.Accumulator(jnp.zeros, lambda x, t: t.done)}
        ),
        "The accumulator `wrong` must return",
    ),
    (
        lambda: next_values(),
        "it is recorded if the policy has a critic",
    ),
    (
        lambda: next_values(last_value=ROWS, final_value=ROWS),
        "`last_value` must be an array of shape",
    ),
    (
        lambda: add_to_window(next(make_stream())),
        "such as `batch.trajectory`",
    ),
    (
        lambda: add_to_window(jax.tree.map(lambda x: x[0], collect("count")[1])),
        "must be `[T, B, ...]`, got a `mask` of shape (16,)",
    ),
    (
        lambda: add_to_window(collect("count")[1].replace(info=AsyncInfo(1, 2, 3))),
        "got rows of a `HostCollector` with `num_ready`",
    ),
    (
        lambda: rollout.stats.ended_episodes(
            collect("count")[1].replace(info=AsyncInfo(1, 2, 3))
        ),
        "`trajectory` must have a column for each lane",
    ),
    (
        lambda: add_to_window(collect("count")[1], accumulated=["best"]),
        "must have the accumulated value 'best' of the window",
    ),
    (
        lambda: rollout.log_stats({"a/b": 1.0, "a": {"b": 2.0}}),
        "`stats` must have different names, got 'a/b' twice.",
    ),
    (lambda: log("text"), "of `num_seeds`, got str 'text' at a/b"),
    (lambda: log(jnp.array(1j)), "of `num_seeds`, got complex64 of shape () at a/b"),
    (lambda: log(KEY), "of `num_seeds`, got key<fry> of shape () at a/b"),
    (lambda: log(ROWS[0]), "got float32 of shape (16,) at a/b and None"),
    (lambda: jax.jit(log)(ROWS[0, 0]), "`log_stats` runs in Python, so it must"),
    (summarize_agents, "`data` must be a trajectory, or `Episodes`"),
    (lambda: shard(6, 4), "got 6; the nearest are 4 or 8"),
    (lambda: shard(2, 4), "got 2; the nearest are 4"),
    (lambda: shard(8, 2, "x"), "`axis` must be one of the mesh, x, got 'lanes'"),
    (lambda: shard(8, 2), "and not be sharded already, got _Sha"),
    (lambda: draw_episode(on_host(), None, KEY, 9), "render frames, got HostCount"),
    (
        lambda: draw_episode(make_collector("count"), None, KEY, 9),
        "in its suite or a method `render_frames`",
    ),
    (lambda: rollout.record_gif(ROWS, None, KEY, "a.gif"), "`collector` must be a `C"),
    (
        lambda: rollout.record_gif(on_host(), None, KEY, "a.png"),
        "`path` must end in .gif, got a.png.",
    ),
    (
        lambda: rollout.record_gif(on_host(), None, KEY, "gone/a.gif"),
        "`path` must be in a folder that exists, got gone/a.gif.",
        FileNotFoundError,
    ),
    (
        lambda: envs.render.expose_lane_states(CountEnv()),
        "must have lanes of one environment of one",
    ),
    (lambda: scan_minibatches(num_minibatches=3, axis=1), "divide the 16 items, got 3"),
    (lambda: scan_minibatches({"a": ROWS, "b": jnp.zeros(64)}), "`[T, B, ...]`"),
    (lambda: scan_minibatches({}), "got none"),
]


@pytest.mark.parametrize("entry", MESSAGES, ids=[what for _, what, *_ in MESSAGES])
def test_call_raises_its_message(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message, kind = (*entry, ValueError)[:3]
    with pytest.raises(kind, match=re.escape(message)) as raised:
        call()
    assert len(str(raised.value)) < 400
    assert not (tmp_path / "a.gif").exists()
