"""brax and MuJoCo Playground in a plain loop, by the suites' own functions alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import rollout
from rollout import envs

NUM_ENVS, NUM_STEPS = 4, 250


class Rows(NamedTuple):
    """The expected steps, `[NUM_STEPS, NUM_ENVS, ...]`."""

    obs: Any
    next_obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: Any
    episode_return: np.ndarray
    episode_length: np.ndarray
    episode_id: np.ndarray


def collect(env: envs.Env, limit: int, seed: int) -> rollout.Transition:
    """The rows of a random policy."""
    lanes = envs.vectorize(envs.TimeLimit(env, limit), NUM_ENVS)
    policy = rollout.random_policy(lanes.action_space)
    collector = rollout.Collector(env=lanes, policy=policy)
    carry = collector.init(jax.random.key(seed))
    return collector.collect_steps(carry, None, NUM_STEPS)[1]


def play(
    suite_env: Any, model_field: str, actions: np.ndarray, limit: int, seed: int
) -> Rows:
    """The same rows, by a loop through a suite's environment.

    The keys of an episode are those that `rollout.envs.types` promises: lane i's n-th
    episode has the key `fold_in(fold_in(fold_in(root, 1), i), n)`, its reset
    `fold_in(key, 0)` and its step number n `fold_in(key, n)`.
    """
    reset, step = (_batched(suite_env, model_field, x) for x in ("reset", "step"))
    number, length = np.zeros((2, NUM_ENVS), np.int32)
    total = np.zeros(NUM_ENVS, np.float32)
    state, rows = reset(_words(seed, number, length)), []
    for action in actions:
        length, before = length + 1, state
        if "rng" in state.info:  # randomness is from counters
            words = _words(seed, number, length)
            state = state.replace(info={**state.info, "rng": words})
        after = step(state, action)
        total = total + np.asarray(after.reward)
        row = Rows(
            obs=before.obs,
            next_obs=after.obs,
            reward=after.reward,
            terminated=np.asarray(after.done) == 1,
            truncated=length == limit,
            info=after.metrics,
            episode_return=total,
            episode_length=length,
            episode_id=number * NUM_ENVS + np.arange(NUM_ENVS),
        )
        rows.append(jax.device_get(row))
        done = row.terminated | row.truncated
        number = number + done
        length, total = np.where(done, 0, length), np.where(done, 0, total)
        total = total.astype(np.float32)
        fresh = reset(_words(seed, number, np.zeros_like(length)))
        state = jax.tree.map(lambda x, y: _choose(done, x, y), fresh, after)  # noqa: B023
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def check(trajectory: rollout.Transition, rows: Rows, atol: float = 0.0) -> None:
    """Every field of every row: bit for bit, but floats within `atol`."""
    assert trajectory.mask.all()
    for name, want in rows._asdict().items():
        got = getattr(trajectory, name)
        assert jax.tree.structure(got) == jax.tree.structure(want), name
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if np.issubdtype(y.dtype, np.floating):
                np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)
            else:
                np.testing.assert_array_equal(x, y, err_msg=name)


DRAW = """
import sys, jax, suite_checks
from rollout import envs
suite_checks.check_is_drawn(envs.make(sys.argv[1]))
"""


def check_is_drawn(env_id: str) -> None:
    """Draws with EGL, which must be chosen before mujoco is imported."""
    support = os.path.dirname(__file__)
    path = os.pathsep.join([support, os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "MUJOCO_GL": "egl", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRAW, env_id],
        capture_output=True,
        text=True,
        env=environ,
    )
    if "EGL" in done.stderr or "Drawing needs OpenGL" in done.stderr:
        pytest.skip("there is no EGL")
    assert done.returncode == 0, done.stderr


def _batched(env: Any, model_field: str, method: str) -> Callable:
    """A method for all lanes at once, jitted, with the model as an argument.

    Single lanes, or a model of constants, give other bits: XLA then computes in another
    order.
    """

    @jax.jit
    def call(model: Any, *args: Any) -> Any:
        own = getattr(env, model_field)
        setattr(env, model_field, model)  # as the suites' domain randomization does
        try:
            return jax.vmap(getattr(env, method))(*args)
        finally:
            setattr(env, model_field, own)

    return lambda *args: call(getattr(env, model_field), *args)


@jax.jit
def _words(seed: int, number: jax.Array, step: jax.Array) -> jax.Array:
    """The words of the keys of these steps of these episodes; step 0 is the reset."""
    fold = jax.random.fold_in
    root = fold(jax.random.key(seed), 1)

    def one(lane: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
        return jax.random.key_data(fold(fold(fold(root, lane), number), step))

    return jax.vmap(one)(np.arange(NUM_ENVS), number, step)


def _choose(done: np.ndarray, x: jax.Array, y: jax.Array) -> np.ndarray:
    done = done.reshape(done.shape + (1,) * (x.ndim - 1))
    return np.where(done, x, y)
