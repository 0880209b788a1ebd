"""Flat observations compared with NumPy, and observations that contain the state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, in_one_program, quick_jit
from suite_checks import KEY

import rollout
from rollout import envs
from rollout.envs import spaces
from rollout.envs.spaces import get_action_mask
from rollout.envs.wrappers import FlattenObs, ObserveState, flatten_obs

PARTS = {"a": envs.Discrete(3, start=-1), "b": envs.Box(-2.0, 5.0, (2, 1))}
SPACES = {
    "discrete": envs.Discrete(4, start=10),
    "multi_discrete": spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[5, 0], [0, -1]]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "flags": envs.Box(False, True, (3,), jnp.dtype(bool)),
    "image": envs.Box(0, 255, (2, 2, 1), jnp.uint8),
    "dict": spaces.Dict(PARTS),
    "tuple": spaces.Tuple((PARTS["a"], spaces.Dict({"c": PARTS["b"]}))),
    "repeated_dict": spaces.Repeated(spaces.Dict(PARTS), 2),
}


def flatten_with_numpy(space, x):
    """Flattens leaf by leaf, entry by entry."""
    entries = []
    for part, leaf in zip(space.leaves(), jax.tree.leaves(x), strict=True):
        inner = part.space if isinstance(part, spaces.Repeated) else part
        low = np.broadcast_to(np.asarray(part.bounds[0]), leaf.shape).reshape(-1)
        if isinstance(inner, envs.Discrete | spaces.MultiDiscrete):
            sizes = np.ravel(getattr(inner, "nvec", getattr(inner, "n", 0)))
            sizes = np.tile(sizes, low.size // sizes.size)
            for value, least, size in zip(leaf.reshape(-1), low, sizes, strict=True):
                entries += [float(value - least == i) for i in range(size)]
        else:
            entries += leaf.reshape(-1).astype(float).tolist()
    return np.array(entries, np.float32)


@functools.cache
def sample_flat():
    """Returns 24 observations, their flat form and the result of `contains`."""

    def run(space, key):
        obs = jax.vmap(space.sample)(jax.random.split(key, 24))
        flat_obs = flatten_obs(space, obs)
        return obs, flat_obs, jax.vmap(flat_space(space).contains)(flat_obs)

    return in_one_program(run, SPACES)


def flat_space(space):
    """Returns the flat space of an environment with the observation space `space`."""
    env = envs.TransformObs(CountEnv(), lambda obs: space.sample(KEY), space)
    return FlattenObs(env).observation_space


@pytest.mark.parametrize("name", SPACES)
def test_flat_observations_equal_numpy(name):
    obs_batch, flat_obs, is_contained = sample_flat()[name]
    for n, flat_row in enumerate(flat_obs):
        obs = jax.tree.map(lambda x, n=n: x[n], obs_batch)
        np.testing.assert_array_equal(flat_row, flatten_with_numpy(SPACES[name], obs))
    assert is_contained.all()
    space = flat_space(SPACES[name])
    assert flat_obs.dtype == space.dtype == np.float32
    assert flat_obs.shape[1:] == space.shape


def test_action_mask_is_not_flattened():
    mask = spaces.MultiBinary((3,), jnp.dtype(bool))
    space = spaces.Dict({"place": envs.Discrete(3), "action_mask": mask})

    def add_mask(obs):
        n = obs[0].astype(jnp.int32) % 3
        return {"place": n, "action_mask": jnp.arange(3) == n}

    env = FlattenObs(envs.TransformObs(CountEnv(), add_mask, space))
    assert env.observation_space.spaces["action_mask"] == mask
    action_mask_fn = lambda obs: obs["action_mask"]  # noqa: E731
    policy = rollout.random_policy(env.action_space, action_mask_fn=action_mask_fn)
    lanes = envs.vectorize(env, 4)

    def step(carry, keys):
        state, obs = carry
        action = policy.apply(None, obs, (), keys[0]).action
        result = lanes.step(keys[1:], state, action)
        return (result.state, result.obs), (obs["obs"], action)

    @quick_jit
    def run(keys):
        return jax.lax.scan(step, lanes.reset(keys[0, 1:]), keys[1:])[1]

    obs, action = run(jax.random.split(KEY, (13, 5)))
    assert obs.shape == (12, 4, 3)
    np.testing.assert_array_equal(obs.argmax(-1), action)
    assert get_action_mask({"obs": 1, "info": {"action_mask": 2}}) == 2
    assert get_action_mask((1, {"mask": 2})) is None


def test_unsupported_spaces_raise():
    class UnboundedSpace(spaces.Space):
        shape, dtype = (), np.dtype(np.int32)

        def sample(self, key):
            return jnp.int32(0)

    unbounded_env = envs.TransformObs(
        CountEnv(), lambda obs: jnp.int32(0), UnboundedSpace()
    )
    with pytest.raises(ValueError, match=r"Box, Discrete, .* flattened"):
        _ = FlattenObs(unbounded_env).observation_space
    pair = spaces.Dict({"a": envs.Discrete(2), "b": envs.Discrete(3)})
    with pytest.raises(ValueError, match=r"2 parts of .*, got \['a'\]"):
        flatten_obs(pair, {"a": 1})


def test_policy_can_search_from_observed_state():
    """The policy simulates both actions and selects the better action."""
    env = ObserveState(envs.make("CartPole-v1"))

    def search(params, obs, key):
        def predicted_angle(action):
            step_lanes = jax.vmap(lambda state: env.env.step(KEY, state, action).obs)
            return jnp.abs(step_lanes(obs["state"]) @ jnp.array([0.0, 0.0, 1.0, 0.5]))

        return (predicted_angle(jnp.int32(1)) < predicted_angle(jnp.int32(0))).astype(
            jnp.int32
        )

    def record(t):
        return t.replace(obs=t.obs["obs"], next_obs=t.next_obs["obs"])

    collector = rollout.Collector(
        env=envs.vectorize(env, 4),
        policy=rollout.stateless_policy(search),
        record_fn=record,
    )
    rows = quick_jit(
        lambda key: collector.collect_steps(collector.init(key), None, 150)[1]
    )(KEY)
    assert rows.obs.shape == (150, 4, 4)
    # Half of random episodes terminate within 20 steps.
    assert not rows.terminated.any()
    assert env.observation_space.spaces["state"]


def test_frame_stack_keeps_newest_mask():
    parts = {"obs": envs.Box(0.0, 9.0, (1,)), "action_mask": spaces.MultiBinary((2,))}

    def add_parity_mask(obs):
        return {"obs": obs, "action_mask": jnp.array([1, 0]) == obs[0] % 2}

    env = envs.TransformObs(CountEnv(), add_parity_mask, spaces.Dict(parts))
    stacked = envs.FrameStack(env, 3)
    assert stacked.observation_space.spaces["action_mask"] == parts["action_mask"]
    lanes = envs.vectorize(stacked, 2)

    @quick_jit
    def step_lanes(keys):
        def step(state, keys):
            result = lanes.step(keys, state, jnp.zeros(2, jnp.int32))
            return result.state, result.obs

        return jax.lax.scan(step, lanes.reset(keys[0])[0], keys[1:])[1]

    obs = jax.device_get(step_lanes(jax.random.split(KEY, (6, 2))))
    assert obs["obs"].shape == (5, 2, 3, 1)
    want = np.array([1, 0]) == obs["obs"][:, :, -1] % 2
    np.testing.assert_array_equal(obs["action_mask"], want)
