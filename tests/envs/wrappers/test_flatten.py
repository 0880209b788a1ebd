"""Flat observations against NumPy, and observations with the state for a search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, in_one_program, quick_jit
from suite_checks import KEY, play

import rollout
from rollout import envs
from rollout.envs import spaces
from rollout.envs.spaces import get_action_mask
from rollout.envs.wrappers import FlattenObs, ObserveState, flatten_obs

TWO = {"a": envs.Discrete(3, start=-1), "b": envs.Box(-2.0, 5.0, (2, 1))}
SPACES = {
    "discrete": envs.Discrete(4, start=10),
    "multi discrete": spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[5, 0], [0, -1]]),
    "multi binary": spaces.MultiBinary((2, 2)),
    "flags": envs.Box(False, True, (3,), jnp.dtype(bool)),
    "image": envs.Box(0, 255, (2, 2, 1), jnp.uint8),
    "dict": spaces.Dict(TWO),
    "tuple": spaces.Tuple((TWO["a"], spaces.Dict({"c": TWO["b"]}))),
    "repeated dict": spaces.Repeated(spaces.Dict(TWO), 2),
}


def plain(space, x):
    """One leaf after another, entry by entry."""
    flat = []
    for part, leaf in zip(space.leaves(), jax.tree.leaves(x), strict=True):
        inner = part.space if isinstance(part, spaces.Repeated) else part
        low = np.broadcast_to(np.asarray(part.bounds[0]), leaf.shape).reshape(-1)
        if isinstance(inner, envs.Discrete | spaces.MultiDiscrete):
            sizes = np.ravel(getattr(inner, "nvec", getattr(inner, "n", 0)))
            sizes = np.tile(sizes, low.size // sizes.size)
            for value, least, size in zip(leaf.reshape(-1), low, sizes, strict=True):
                flat += [float(value - least == i) for i in range(size)]
        else:
            flat += leaf.reshape(-1).astype(float).tolist()
    return np.array(flat, np.float32)


@functools.cache
def shown():
    """By space: 24 observations, the same ones flat, and whether these are in space."""

    def show(space, key):
        seen = jax.vmap(space.sample)(jax.random.split(key, 24))
        flat = flatten_obs(space, seen)
        return seen, flat, jax.vmap(flat_space(space).contains)(flat)

    return in_one_program(show, SPACES)


def flat_space(space):
    """That of an environment which shows elements of `space`."""
    env = envs.TransformObs(CountEnv(), lambda obs: space.sample(KEY), space)
    return FlattenObs(env).observation_space


@pytest.mark.parametrize("name", SPACES)
def test_flat_observations_are_those_of_numpy(name):
    seen, flat, inside = shown()[name]
    for n, obs in enumerate(flat):
        one = jax.tree.map(lambda x, n=n: x[n], seen)
        np.testing.assert_array_equal(obs, plain(SPACES[name], one))
    assert inside.all()
    space = flat_space(SPACES[name])
    assert flat.dtype == space.dtype == np.float32
    assert flat.shape[1:] == space.shape


def test_mask_of_actions_stays_apart():
    mask = spaces.MultiBinary((3,), jnp.dtype(bool))
    space = spaces.Dict({"place": envs.Discrete(3), "action_mask": mask})

    def see(obs):
        n = obs[0].astype(jnp.int32) % 3
        return {"place": n, "action_mask": jnp.arange(3) == n}

    env = FlattenObs(envs.TransformObs(CountEnv(), see, space))
    assert env.observation_space.spaces["action_mask"] == mask
    action_mask_fn = lambda obs: obs["action_mask"]  # noqa: E731
    policy = rollout.random_policy(env.action_space, action_mask_fn=action_mask_fn)
    collector = rollout.Collector(env=envs.vectorize(env, 4), policy=policy)
    rows = quick_jit(
        lambda key: collector.collect_steps(collector.init(key), None, 12)[1]
    )(KEY)
    assert rows.obs["obs"].shape == (12, 4, 3)
    np.testing.assert_array_equal(rows.obs["obs"].argmax(-1), rows.action)
    assert get_action_mask({"obs": 1, "info": {"action_mask": 2}}) == 2
    assert get_action_mask((1, {"mask": 2})) is None


def test_space_without_bounds_is_refused():
    class Odd(spaces.Space):
        shape, dtype = (), np.dtype(np.int32)

        def sample(self, key):
            return jnp.int32(0)

    odd = envs.TransformObs(CountEnv(), lambda obs: jnp.int32(0), Odd())
    with pytest.raises(
        ValueError, match=r"consist of Box, Discrete, .* to be flattened"
    ):
        _ = FlattenObs(odd).observation_space
    two = spaces.Dict({"a": envs.Discrete(2), "b": envs.Discrete(3)})
    with pytest.raises(ValueError, match=r"have the 2 parts of .*, got \['a'\]"):
        flatten_obs(two, {"a": 1})


def test_policy_may_search_from_the_state_of_its_lane():
    """It tries both actions in the environment itself, and takes the better one."""
    env = ObserveState(envs.make("CartPole-v1"))

    def act(params, obs, key):
        def angle(action):
            take = jax.vmap(lambda state: env.env.step(KEY, state, action).obs)
            return jnp.abs(take(obs["state"]) @ jnp.array([0.0, 0.0, 1.0, 0.5]))

        return (angle(jnp.int32(1)) < angle(jnp.int32(0))).astype(jnp.int32)

    def record(t):
        return t.replace(obs=t.obs["obs"], next_obs=t.next_obs["obs"])

    collector = rollout.Collector(
        env=envs.vectorize(env, 4),
        policy=rollout.stateless_policy(act),
        record_fn=record,
    )
    rows = quick_jit(
        lambda key: collector.collect_steps(collector.init(key), None, 150)[1]
    )(KEY)
    assert rows.obs.shape == (150, 4, 4)
    assert not rows.terminated.any()  # at random half fall within 20 steps
    assert env.observation_space.spaces["state"]


def test_frames_show_the_newest_mask():
    seen = {"obs": envs.Box(0.0, 9.0, (1,)), "action_mask": spaces.MultiBinary((2,))}

    def see(obs):
        return {"obs": obs, "action_mask": jnp.array([1, 0]) == obs[0] % 2}

    env = envs.TransformObs(CountEnv(), see, spaces.Dict(seen))
    stacked = envs.FrameStack(env, 3)
    assert stacked.observation_space.spaces["action_mask"] == seen["action_mask"]
    _, rows = play(envs.vectorize(stacked, 2), 5)
    assert rows.obs["obs"].shape == (5, 2, 3, 1)
    want = np.array([1, 0]) == rows.obs["obs"][:, :, -1] % 2
    np.testing.assert_array_equal(rows.obs["action_mask"], want)
