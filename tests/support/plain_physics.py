"""brax and MuJoCo Playground in a plain loop, by the suites' own functions alone."""

from typing import Any, NamedTuple

import jax
import numpy as np

import envs
import rollout

NUM_ENVS, NUM_STEPS = 4, 250


class Row(NamedTuple):
    """What a step must have been, in one lane."""

    obs: Any
    next_obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: Any
    episode_return: np.float32
    episode_length: int
    episode_id: int


def collect(env: envs.Env, limit: int, seed: int) -> rollout.Transition:
    """Rows of a random policy, `[NUM_STEPS, NUM_ENVS, ...]`."""
    lanes = envs.vectorize(envs.TimeLimit(env, limit), NUM_ENVS)
    policy = rollout.random_policy(lanes.action_space)
    collector = rollout.Collector(env=lanes, policy=policy)
    carry = collector.init(jax.random.key(seed))
    return collector.collect_steps(carry, None, NUM_STEPS)[1]


def play(suite_env: Any, actions: np.ndarray, limit: int, seed: int) -> Row:
    """The same rows, by a loop through a suite's jitted environment, lane by lane.

    The keys of an episode are those that `envs.types` promises: lane i's n-th episode
    has the key `fold_in(fold_in(fold_in(root, 1), i), n)`.
    """
    reset, step = jax.jit(suite_env.reset), jax.jit(suite_env.step)
    fold_in = jax.jit(jax.random.fold_in)
    lanes = []
    for lane in range(actions.shape[1]):
        stream = fold_in(fold_in(jax.random.key(seed), 1), lane)
        rows, number, state = [], -1, None
        for action in actions[:, lane]:
            if state is None:
                number, length, total = number + 1, 0, np.float32(0)
                episode_key = fold_in(stream, number)
                state = reset(jax.random.key_data(fold_in(episode_key, 0)))
            length += 1
            if "rng" in state.info:  # randomness is from counters
                words = jax.random.key_data(fold_in(episode_key, length))
                state = state.replace(info={**state.info, "rng": words})
            after = step(state, action)
            total += np.float32(after.reward)
            row = Row(
                obs=state.obs,
                next_obs=after.obs,
                reward=np.float32(after.reward),
                terminated=bool(after.done),
                truncated=length == limit,
                info=after.metrics,
                episode_return=total,
                episode_length=length,
                episode_id=number * NUM_ENVS + lane,
            )
            rows.append(jax.device_get(row))
            state = None if row.terminated or row.truncated else after
        lanes.append(jax.tree.map(lambda *x: np.stack(x), *rows))
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *lanes)


def check(trajectory: rollout.Transition, rows: Row, **tolerance: float) -> None:
    """Every field of every row: exactly, but floats within `tolerance` if given."""
    assert trajectory.mask.all()
    for name, want in rows._asdict().items():
        got = getattr(trajectory, name)
        assert jax.tree.structure(got) == jax.tree.structure(want), name
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if tolerance and np.issubdtype(y.dtype, np.floating):
                np.testing.assert_allclose(x, y, err_msg=name, **tolerance)
            else:
                np.testing.assert_array_equal(x, y, err_msg=name)
