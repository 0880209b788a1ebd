"""Bad input is refused by name: what must hold, what was got, and by us, not by jax."""

import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector
from flax import struct

import rollout
from rollout import buffers, checkpoint, envs

ROOT = pathlib.Path(__file__).parent.parent
OURS = tuple(str(ROOT / package) for package in ("buffers", "envs", "rollout"))
B = 4
KEY = jax.random.key(0)
COUNT, DISCRETE = CountEnv(), envs.Discrete(3)
BOX = envs.Box(-1.0, 1.0, (2,))
COUNTED = rollout.Accumulator(jnp.zeros, lambda count, t: count + 1)
NOT_COUNTS = (0, 2.5, "3", True)


@functools.cache
def collector():
    return make_collector("count", B)


@functools.cache
def carry():
    return collector().init(KEY)


@functools.cache
def trajectory():
    return collector().collect_steps(carry(), None, 5)[1]


@functools.cache
def buffer():
    return buffers.ReplayBuffer(32, B)


@functools.cache
def stored():
    return buffer().add(buffer().init(collector()), trajectory())


@functools.cache
def prioritized():
    memory = buffers.PrioritizedReplayBuffer(32, B)
    return memory, memory.add(memory.init(collector()), trajectory())


def mesh():
    return jax.make_mesh((2,), ("lanes",))


def learned():
    act = policy(lambda params, obs, key: (obs @ params["w"]).astype(jnp.int32)[:, 0])
    return collector().replace(policy=act)


def stream(**options):
    options = {"key": KEY, "steps_per_batch": 8, **options}
    return rollout.Stream(collector(), **options)


def policy(fn=lambda params, obs, key: jnp.zeros((B,), jnp.int32)):
    return rollout.stateless_policy(fn)


def step_with(acting=None, env=None, **fields):
    """Takes a step of a collector some part of which is wrong."""
    env = env or envs.vectorize(COUNT, B)
    made = rollout.Collector(env=env, policy=acting or policy(), **fields)
    return made.step(made.init(KEY), None)


@struct.dataclass
class Wrong(CountEnv):
    """A counting environment whose `reset` or `step` returns something else."""

    reset_fn: object = struct.field(pytree_node=False, default=None)
    step_fn: object = struct.field(pytree_node=False, default=None)

    def reset(self, key):
        result = super().reset(key)
        return self.reset_fn(*result) if self.reset_fn else result

    def step(self, key, state, action):
        result = super().step(key, state, action)
        return self.step_fn(result) if self.step_fn else result


def vector(**parts):
    return envs.vectorize(Wrong(**parts), B)


def plain_class():
    return type("Plain", (), {"reset": lambda s, k: 0, "step": lambda s, k, x, a: 0})()


COUNTS = {
    "collect_steps": (
        "num_steps",
        lambda n: collector().collect_steps(carry(), None, n),
    ),
    "fold_steps": (
        "num_steps",
        lambda n: collector().fold_steps(carry(), None, max, 0, num_steps=n),
    ),
    "collect_episodes": (
        "num_episodes",
        lambda n: collector().collect_episodes(carry(), None, n, max_steps=9),
    ),
    "max_steps": (
        "max_steps",
        lambda n: collector().collect_episodes(carry(), None, 2, max_steps=n),
    ),
    "min_steps": (
        "min_steps",
        lambda n: collector().collect_episodes(
            carry(), None, 2, max_steps=9, min_steps=n
        ),
    ),
    "collect_episodes_per_env": (
        "episodes_per_env",
        lambda n: collector().collect_episodes_per_env(carry(), None, n, max_steps=9),
    ),
    "fold_episodes": (
        "num_episodes",
        lambda n: collector().fold_episodes(
            carry(), None, max, 0, num_episodes=n, max_steps=9
        ),
    ),
    "collect_padded_episodes": (
        "max_length",
        lambda n: collector().collect_padded_episodes(carry(), None, 2, max_length=n),
    ),
    "evaluate": ("num_episodes", lambda n: rollout.evaluate(collector(), KEY, None, n)),
    "profile": (
        "num_repeats",
        lambda n: rollout.profile(collector(), None, 2, num_repeats=n),
    ),
    "minibatches": (
        "epochs",
        lambda n: rollout.minibatches(KEY, jnp.zeros((2, 2)), 2, n),
    ),
    "random_warmup": (
        "num_steps",
        lambda n: rollout.random_warmup(policy(), DISCRETE, n),
    ),
    "checkpoint": ("keep", lambda n: checkpoint.save("nowhere", {"n": 1}, keep=n)),
    "stream steps": ("steps_per_batch", lambda n: stream(steps_per_batch=n)),
    "stream total": ("total_steps", lambda n: stream(total_steps=n)),
    "stream limit": ("max_episode_steps", lambda n: stream(max_episode_steps=n)),
    "vectorize": ("num_envs", lambda n: envs.vectorize(COUNT, n)),
    "TimeLimit": ("num_steps", lambda n: envs.TimeLimit(COUNT, n)),
    "ActionRepeat": ("num_repeats", lambda n: envs.ActionRepeat(COUNT, n)),
    "FrameStack": ("num_frames", lambda n: envs.FrameStack(COUNT, n)),
    "Discrete": ("n", lambda n: envs.Discrete(n)),
    "ReplayBuffer": ("capacity", lambda n: buffers.ReplayBuffer(n, 1)),
    "buffer lanes": ("num_envs", lambda n: buffers.ReplayBuffer(8, n)),
    "EpisodeBuffer": (
        "max_length",
        lambda n: buffers.EpisodeBuffer(8, 1, max_length=n),
    ),
    "sample": ("batch_size", lambda n: buffer().sample(stored(), KEY, n)),
    "n_step": (
        "n_step",
        lambda n: buffer().sample(stored(), KEY, 2, n_step=n, gamma=1),
    ),
    "stack": ("stack", lambda n: buffer().sample(stored(), KEY, 2, stack=n)),
    "can_sample": ("batch_size", lambda n: buffer().can_sample(stored(), n)),
    "sequences": ("length", lambda n: buffer().sample_sequences(stored(), KEY, 2, n)),
    "episodes": ("max_length", lambda n: buffer().count_episodes(stored(), n)),
}
OTHERS = {
    # What a collector is made of.
    "function as policy": lambda: step_with(acting=lambda *args: 0),
    "None as policy": lambda: rollout.Collector(env=collector().env, policy=None),
    "one environment": lambda: step_with(env=COUNT),
    "record_fn": lambda: step_with(record_fn=3),
    "accumulators": lambda: step_with(accumulators={"a": max}),
    "no accumulators": lambda: step_with(accumulators=None),
    "one accumulator": lambda: step_with(accumulators=COUNTED),
    "accumulators of one name": lambda: step_with(
        accumulators=[("a", COUNTED), ("a", COUNTED)]
    ),
    "accumulator named like a part of another": lambda: step_with(
        accumulators={"a/b": COUNTED}
    ),
    "accumulator of numbers": lambda: step_with(
        accumulators={"a": rollout.Accumulator(0, 1)}
    ),
    "record_fn without lanes": lambda: step_with(
        record_fn=lambda t: t.replace(extras={"sum": t.reward.sum()})
    ),
    "rewards that are no scalars": lambda: step_with(
        env=envs.vectorize(envs.TransformReward(COUNT, lambda reward: reward[None]), B)
    ),
    "observations of another space": lambda: step_with(
        env=envs.vectorize(
            envs.TransformObs(COUNT, lambda obs: obs, envs.Box(0, 1, (7,))), B
        )
    ),
    "record_fn drops a flag": lambda: step_with(
        record_fn=lambda t: t.replace(terminated=~t.terminated)
    ),
    "record_fn returns a dict": lambda: step_with(record_fn=lambda t: {}),
    # Keys and carries.
    "seed as key": lambda: collector().init(0),
    "old key": lambda: collector().init(jax.random.PRNGKey(0)),
    "several keys": lambda: collector().init(jax.random.split(KEY)),
    "no key": lambda: collector().init(None),
    "key of evaluate": lambda: rollout.evaluate(collector(), 1, None, 2),
    "carry and params swapped": lambda: collector().collect_steps(None, carry(), 2),
    "no carry, episodes": lambda: collector().collect_episodes(
        None, None, 2, max_steps=3
    ),
    "no carry, whole episodes": lambda: collector().collect_padded_episodes(
        None, None, 2, max_length=3
    ),
    "no carry, folded episodes": lambda: collector().fold_episodes(
        None, None, max, 0, num_episodes=2, max_steps=3
    ),
    "carry is a state": lambda: collector().step(carry().env_state, None),
    "carry of other lanes": lambda: make_collector("count", 8).step(carry(), None),
    "carry of other lanes, episodes": lambda: make_collector(
        "count", 8
    ).collect_episodes(carry(), None, 2, max_steps=3),
    "carry of another environment": lambda: make_collector("CartPole-v1", B).step(
        carry(), None
    ),
    # What policies return.
    "action of another shape": lambda: step_with(
        policy(lambda p, o, k: jnp.zeros((B, 1)))
    ),
    "action of another dtype": lambda: step_with(
        policy(lambda p, o, k: jnp.zeros((B,)))
    ),
    "one action": lambda: step_with(policy(lambda p, o, k: jnp.int32(0))),
    "extras without lanes": lambda: step_with(
        policy(lambda p, o, k: (jnp.zeros((B,), jnp.int32), {"v": jnp.float32(0)}))
    ),
    "no PolicyStep": lambda: step_with(
        rollout.Policy(
            init=lambda n: (), apply=lambda *args: jnp.zeros((B,), jnp.int32)
        )
    ),
    "recurrent policy without a state": lambda: step_with(
        rollout.recurrent_policy(lambda *args: jnp.zeros((B,), jnp.int32), jnp.zeros)
    ),
    "state of another shape": lambda: step_with(
        rollout.recurrent_policy(
            lambda p, o, s, k: (jnp.zeros((B,), jnp.int32), s[:, 0]),
            lambda n: jnp.zeros((n, 1)),
        )
    ),
    "state without lanes": lambda: step_with(
        rollout.recurrent_policy(
            lambda p, o, s, k: (jnp.zeros((B,), jnp.int32), s), lambda n: jnp.zeros(3)
        )
    ),
    "policy without a mode": lambda: rollout.greedy(policy()),
    # Environments.
    "no environment": lambda: envs.vectorize(3, B),
    "no pytree": lambda: envs.vectorize(plain_class(), B),
    "many of many": lambda: envs.vectorize(collector().env, B),
    "wrapper of many": lambda: envs.TimeLimit(collector().env, 3),
    "stack of many": lambda: envs.FrameStack(collector().env, 3),
    "observing many": lambda: envs.wrappers.ObservePrevious(collector().env),
    "normalize one": lambda: envs.NormalizeObs(COUNT),
    "normalize rewards of one": lambda: envs.NormalizeReward(COUNT),
    "epsilon": lambda: envs.NormalizeObs(collector().env, epsilon=0.0),
    "gamma": lambda: envs.NormalizeReward(collector().env, gamma=1.5),
    "auto_reset of several": lambda: envs.vectorize(COUNT, B, auto_reset=["select"]),
    "auto_reset": lambda: envs.vectorize(COUNT, B, auto_reset="never"),
    "bound": lambda: envs.RescaleAction(COUNT, "sigmoid"),
    "rescaled discrete": lambda: envs.RescaleAction(COUNT),
    "reset of one": lambda: step_with(env=vector(reset_fn=lambda s, o: o)),
    "reset of three": lambda: step_with(env=vector(reset_fn=lambda s, o: (s, o, {}))),
    "Gymnasium's step": lambda: step_with(
        env=vector(step_fn=lambda r: (r.obs, r.reward, r.terminated, r.truncated, {}))
    ),
    "reward of another shape": lambda: step_with(
        env=vector(step_fn=lambda r: r.replace(reward=jnp.zeros(2)))
    ),
    "flag of another shape": lambda: step_with(
        env=vector(step_fn=lambda r: r.replace(terminated=jnp.zeros(2, bool)))
    ),
    "obs of another dtype": lambda: step_with(
        env=vector(step_fn=lambda r: r.replace(obs=r.obs.astype(jnp.int32)))
    ),
    "obs of another shape": lambda: step_with(
        env=vector(step_fn=lambda r: r.replace(obs=jnp.zeros(3)))
    ),
    "state of another structure": lambda: step_with(
        env=vector(step_fn=lambda r: r.replace(state={"n": r.state["n"]}))
    ),
    "no gymnax environment": lambda: envs.from_gymnax(object(), {}),
    "limit_field": lambda: envs.from_gymnax(
        types.SimpleNamespace(**dict.fromkeys(GYMNAX, max)), {}, limit_field="limit"
    ),
    "unknown id": lambda: envs.make("CartPole"),
    "unknown parameter": lambda: envs.make("CartPole-v1", mass=3),
    "parameter of another kind": lambda: envs.make("CartPole-v1", gravity="high"),
    # Spaces and exploration.
    "low above high": lambda: envs.Box(1, 0, ()),
    "NaN bound": lambda: envs.Box(0.0, np.nan, ()),
    "dtype that is too small": lambda: envs.Discrete(300, dtype=jnp.uint8),
    "dtype without what is below 0": lambda: envs.Discrete(
        3, start=-1, dtype=jnp.uint8
    ),
    "dtype of floats": lambda: envs.Discrete(3, dtype=jnp.float32),
    "dtype of the largest": lambda: envs.spaces.MultiDiscrete(
        [2, 300], dtype=jnp.uint8
    ),
    "environment for a space": lambda: rollout.random_policy(
        envs.make_vec("CartPole-v1", 2)
    ),
    "infinite box": lambda: rollout.random_policy(envs.Box(-np.inf, 1.0, ())),
    "mask of a box": lambda: rollout.random_policy(BOX, mask_fn=lambda obs: obs),
    "epsilon above 1": lambda: rollout.epsilon_greedy(policy(), DISCRETE, 1.5),
    "NaN epsilon": lambda: rollout.epsilon_greedy(policy(), DISCRETE, np.nan),
    "epsilon of a word": lambda: rollout.epsilon_greedy(policy(), DISCRETE, "0.1"),
    "schedule of a vector": lambda: rollout.epsilon_greedy(
        policy(), DISCRETE, lambda step: jnp.zeros(2)
    ),
    "negative noise": lambda: rollout.gaussian_noise(policy(), BOX, -1.0),
    "noise on integers": lambda: rollout.gaussian_noise(policy(), DISCRETE, 1.0),
    "theta": lambda: rollout.ornstein_uhlenbeck(policy(), BOX, 1.0, theta=-1.0),
    "dt": lambda: rollout.ornstein_uhlenbeck(policy(), BOX, 1.0, dt=0.0),
    # Statistics, targets, trajectories.
    "summarize a batch": lambda: rollout.summarize(next(stream())),
    "summarize a dict": lambda: rollout.summarize({}),
    "fn": lambda: collector().fold_steps(carry(), None, 3, 0, num_steps=2),
    "fn of episodes": lambda: collector().fold_episodes(
        carry(), None, None, 0, num_episodes=2, max_steps=3
    ),
    "finished of one step": lambda: rollout.finished(
        jax.tree.map(lambda x: x[0], trajectory())
    ),
    "split of one step": lambda: rollout.split_trajectories(
        jax.tree.map(lambda x: x[0], trajectory())
    ),
    "log_stats of one name": lambda: rollout.log_stats({"a/b": 1, "a": {"b": 2}}),
    "log_stats of arrays": lambda: rollout.log_stats({"a": jnp.zeros(2)}),
    "gae without values": lambda: rollout.gae(
        trajectory(), jnp.zeros((5, B)), gamma=1.0, lam=1.0
    ),
    "minibatches that do not divide": lambda: rollout.minibatches(KEY, trajectory(), 3),
    "minibatches of an axis": lambda: rollout.minibatches(KEY, trajectory(), 2, axis=2),
    # Streams.
    "nothing asked for": lambda: stream(steps_per_batch=None),
    "both asked for": lambda: stream(episodes_per_batch=3),
    "word for a flag": lambda: stream(recycle="no"),
    "number for a flag": lambda: stream(check_finite=1),
    "word for progress": lambda: stream(progress="yes"),
    "at_batch_end": lambda: stream(at_batch_end="stop"),
    "on_fault": lambda: stream(on_fault="ignore"),
    "prefetch": lambda: stream(prefetch=2),
    "placement": lambda: stream(placement="disk"),
    "postprocess": lambda: stream(postprocess=3),
    "recycle on the host": lambda: stream(recycle=True, placement="host"),
    "episodes without a limit": lambda: stream(
        steps_per_batch=None, episodes_per_batch=3
    ),
    "other parameters": lambda: stream(params=jnp.zeros(2)).set_params(jnp.zeros(3)),
    "words as parameters": lambda: stream(params={"w": "0.5"}),
    "function as parameters": lambda: stream(params=jnp.tanh),
    "words for new parameters": lambda: stream(params={"w": 0.5}).set_params(
        {"w": "0.5"}
    ),
    "stream inside jit": lambda: jax.jit(lambda: next(stream()).trajectory)(),
    "state of another stream": lambda: stream().restore({"carry": 3}),
    "key of a stream": lambda: stream(key=0),
    # Buffers.
    "capacity below the lanes": lambda: buffers.ReplayBuffer(2, 4),
    "successor": lambda: buffers.ReplayBuffer(8, 4, next_obs="next"),
    "final_obs_capacity": lambda: buffers.ReplayBuffer(8, 4, final_obs_capacity=4),
    "nothing to spread over": lambda: buffers.shard(None, mesh()),
    "word as a mesh": lambda: buffers.shard(buffer(), "lanes"),
    "alpha": lambda: buffers.PrioritizedReplayBuffer(8, 4, alpha=2.0),
    "no array": lambda: buffer().init({"obs": 1.0}),
    "empty transition": lambda: buffer().init({}),
    "transition without lanes": lambda: buffer().init({"obs": jnp.zeros(3)}),
    "flags that are floats": lambda: buffer().init(
        {
            "obs": jnp.zeros(B),
            "terminated": jnp.zeros(B),
            "truncated": jnp.zeros(B, bool),
        }
    ),
    "lists": lambda: buffer().add(stored(), [[1.0, 2.0]]),
    "rows of another shape": lambda: buffer().add(
        stored(), trajectory().replace(reward=jnp.zeros((5, B, 1)))
    ),
    "rows of another dtype": lambda: buffer().add(
        stored(), trajectory().replace(reward=jnp.zeros((5, B), jnp.int32))
    ),
    "no rows": lambda: buffer().add(
        stored(), jax.tree.map(lambda x: x[:0], trajectory())
    ),
    "mask the other way round": lambda: buffer().add(
        stored(), trajectory().replace(mask=jnp.ones((B, 5), bool))
    ),
    "mask of numbers": lambda: buffer().add(
        stored(), trajectory().replace(mask=jnp.ones((5, B)))
    ),
    "gamma without n_step": lambda: buffer().sample(stored(), KEY, 2, gamma=0.9),
    "gamma above 1": lambda: buffer().sample(stored(), KEY, 2, n_step=2, gamma=1.5),
    "beta": lambda: prioritized()[0].sample(prioritized()[1], KEY, 2, 1.5),
    "relabel_fn": lambda: buffer().sample(stored(), KEY, 2, relabel_fn=3),
    "relabelled n_step": lambda: buffer().sample(
        stored(), KEY, 2, n_step=2, gamma=1.0, relabel_fn=lambda key, x, y: x
    ),
    "relabelled to another kind": lambda: buffer().sample(
        stored(), KEY, 2, relabel_fn=lambda key, x, y: x.replace(reward=x.obs)
    ),
    "merge of other lanes": lambda: buffers.ReplayBuffer(32, 2).merge(
        buffers.ReplayBuffer(32, 2).init({"a": jnp.zeros(2)}), stored()
    ),
    "seed for a sample": lambda: buffer().sample(stored(), 0, 2),
    "old key for a sample": lambda: buffer().sample(stored(), jax.random.PRNGKey(0), 2),
    "keys for sequences": lambda: prioritized()[0].sample_sequences(
        prioritized()[1], jax.random.split(KEY), 2, 2
    ),
    "no key for episodes": lambda: buffer().sample_episodes(stored(), None, 2, 5),
    "no state": lambda: buffer().sample(None, KEY, 2),
    "state and rows swapped": lambda: buffer().add(trajectory(), stored()),
    "state of another capacity": lambda: buffers.EpisodeBuffer(16, B).add(
        buffers.EpisodeBuffer(32, B).init(collector()), trajectory()
    ),
    "priorities of another capacity": lambda: buffers.PrioritizedReplayBuffer(
        64, B
    ).sample(prioritized()[1], KEY, 2),
    "states of several buffers": lambda: buffer().add(
        jax.tree.map(lambda x: jnp.stack([x, x]), stored()), trajectory()
    ),
    "floats as indices": lambda: buffer().get(stored(), jnp.zeros(2)),
    "flags as indices": lambda: buffer().following(stored(), jnp.ones(2, bool)),
    "priorities that are flags": lambda: prioritized()[0].update(
        prioritized()[1], jnp.arange(2), jnp.ones(2, bool)
    ),
    "policy without its params": lambda: buffer().init(learned()),
    # Checkpoints.
    "save of text": lambda: checkpoint.save("nowhere", {"a": "text"}),
    "save of nothing": lambda: checkpoint.save("nowhere", {}),
    "restore of a word": lambda: checkpoint.restore("nowhere", {"n": 1}, step="0"),
    # Wrong kinds of objects.
    "environment as a collector": lambda: rollout.Stream(
        collector().env, key=KEY, steps_per_batch=8
    ),
    "word as a collector": lambda: rollout.Stream("a", key=KEY, steps_per_batch=8),
    "environment to shard": lambda: rollout.shard(collector().env, mesh()),
    "word to shard": lambda: rollout.shard("a", mesh()),
    "word for a mesh": lambda: rollout.shard(collector(), "lanes"),
    "devices for a mesh": lambda: rollout.shard(collector(), jax.devices()),
    "split of a list": lambda: rollout.split_trajectories([trajectory()]),
    "finished of rewards": lambda: rollout.finished(trajectory().reward),
    "step below": lambda: checkpoint.save("nowhere", {"n": 1}, step=-1),
    "every without a step": lambda: checkpoint.save("nowhere", {"n": 1}, every=2),
    "no checkpoint": lambda: checkpoint.restore("nowhere", {"n": 1}),
}
GYMNAX = ("reset_env", "step_env", "action_space", "observation_space")
CASES = {
    **{
        f"{name} {value!r}": (functools.partial(call, value), f"`{option}`")
        for name, (option, call) in COUNTS.items()
        for value in NOT_COUNTS
    },
    **{name: (call, "") for name, call in OTHERS.items()},
}


def test_there_are_two_hundred():
    assert len(CASES) >= 200


@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, option = CASES[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
        call()
    message = str(caught.value)
    assert re.search("must|needs|go together|goes with|counts by|are ", message), (
        message
    )
    assert re.search(r"`\w[^`]*`|parameters of", message), message
    assert option in message
    assert str(caught.traceback[-1].path).startswith(OURS), caught.traceback[-1]
    assert not list(tmp_path.iterdir())
