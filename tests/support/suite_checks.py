"""Checks for any environment: parity with a plain loop, spaces and rendering."""

import io
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit, raw
from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from plain_suites import choose

import rollout
from rollout import envs

KEY = jax.random.key(5)


def collect(env, action_mask_fn=None, *, num_steps=250):
    """Collects a trajectory of the random policy in the lanes of `env`."""
    policy = rollout.random_policy(env.action_space, action_mask_fn=action_mask_fn)
    collector = rollout.Collector(env=env, policy=policy)
    _, trajectory = collector.collect_steps(collector.init(KEY), None, num_steps)
    return jax.device_get(trajectory)


def play(env, num_steps, key=KEY):
    """Returns the last carry and a trajectory of the random policy, in one program."""
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    run = quick_jit(
        lambda x: collector.collect_steps(collector.init(x), None, num_steps)
    )
    return jax.device_get(run(key))


def check_plain_loop_parity(rows, plain, *, limit=0, atol=0.0):
    """Compares a trajectory with a plain loop with the same keys and actions.

    Args:
        rows: the collected trajectory.
        plain: a `plain_suites.Plain`.
        limit: limit of the `TimeLimit` around the environment, or 0.
        atol: absolute tolerance, if programs round differently.
    """
    num_envs = rows.reward.shape[1]
    number, length = np.zeros((2, num_envs), np.int32)
    total = np.zeros(num_envs, np.float32)
    state, obs = plain.begin(keys_of(number, length))
    expected = []
    for action in rows.action:
        length = length + 1
        result = plain.advance(keys_of(number, length), state, action)
        state, next_obs, reward, terminated, truncated, info = result
        total = total + np.asarray(reward, np.float32)
        row = {
            "obs": obs,
            "next_obs": next_obs,
            "reward": reward,
            "terminated": terminated,
            "truncated": np.asarray(truncated) | (length == limit),
            "info": info,
            "episode_return": total,
            "episode_length": length,
            "episode_id": number * num_envs + np.arange(num_envs),
            "mask": np.ones(num_envs, bool),
        }
        expected.append(jax.device_get(row))
        done = np.asarray(row["terminated"] | row["truncated"])
        number, length = number + done, np.where(done, 0, length)
        total = np.where(done, np.float32(0.0), total)
        first = plain.begin(keys_of(number, np.zeros_like(number)))
        state, obs = choose(done, first, (state, next_obs))
    for name in expected[0]:
        got, want = getattr(rows, name), [row[name] for row in expected]
        want = jax.tree.map(lambda *x: np.stack(x), *want)
        assert jax.tree.structure(got) == jax.tree.structure(want), name
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


@jax.jit
def keys_of(number, step):
    """Returns the key of step `step` in episode `number` (from 0) of each lane.

    `rollout.envs.types` documents these keys. Step 0 is the reset.
    """
    fold = jax.random.fold_in

    def lane_key(lane, number, step):
        return fold(fold(fold(fold(KEY, 1), lane), number), step)

    return jax.vmap(lane_key)(np.arange(len(number)), number, step)


def check_successors(rows):
    """Checks that `next_obs` equals the next row's `obs` except at endings."""
    done = (rows.terminated | rows.truncated)[:-1]
    next_row = jax.tree.leaves(jax.tree.map(lambda x: x[1:], rows.obs))
    successor = jax.tree.leaves(jax.tree.map(lambda x: x[:-1], rows.next_obs))
    differ = [
        (x != y).reshape(*done.shape, -1).any(axis=-1)
        for x, y in zip(next_row, successor, strict=True)
    ]
    differ = np.any(differ, axis=0)
    assert not differ[~done].any()
    assert differ[done].any() or not done.any()


def check_spaces(env, rows):
    """Checks that observations, successors and actions are in the spaces."""
    spaces = env.observation_space, env.observation_space, env.action_space
    values = rows.obs, rows.next_obs, rows.action

    @quick_jit
    def is_contained(values):
        pairs = zip(spaces, values, strict=True)
        return [jax.vmap(jax.vmap(space.contains))(x).all() for space, x in pairs]

    assert all(is_contained(values))
    for space, value in zip(spaces, values, strict=True):
        sample = jax.eval_shape(space.sample, KEY)
        row = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[0, 0], x), value)
        chex.assert_trees_all_equal_shapes_and_dtypes(sample, row)


def check_steps_of_agents(
    plain, action_mask_fn=None, *, observe_fn=lambda obs: obs, num_steps
):
    """Compares the steps of an adapter and of the suite until an episode ends.

    Args:
        plain: a `plain_suites.Plain` of several agents.
        action_mask_fn: maps the observation of a group to its action mask.
        observe_fn: maps an observation of the adapter to an observation of the suite.
        num_steps: maximum number of steps.

    Returns:
        The last step.
    """
    env, rng = plain.adapt(), np.random.default_rng(1)
    reset, step, advance = map(quick_jit, (env.reset, env.step, plain.advance))
    first = reset(KEY)
    state, obs, acting = first
    expected = quick_jit(plain.begin)(KEY)
    chex.assert_trees_all_equal(raw((state, observe_fn(obs), acting)), raw(expected))
    suite_state = expected[0]
    for number in range(num_steps):
        key = jax.random.fold_in(KEY, number)
        action = sample_actions(env, obs, action_mask_fn, rng)
        result, expected = step(key, state, action), advance(key, suite_state, action)
        suite_result = result.replace(obs=observe_fn(result.obs))
        chex.assert_trees_all_equal(raw(suite_result), raw(expected))
        state, obs, suite_state = result.state, result.obs, expected.state
        outputs = state, obs, result.acting
        chex.assert_trees_all_equal_shapes_and_dtypes(first, outputs)
        assert result.reward.dtype == jnp.float32
        if result.episode_terminated | result.episode_truncated:
            break
    return result


def sample_actions(env, obs, action_mask_fn, rng):
    """Samples actions of all agents, including agents that do not act."""
    actions = {}
    for group, names in env.groups.items():
        num_actions = env.action_spaces[group].n
        mask = np.ones((len(names), num_actions), bool)
        mask = (
            mask if action_mask_fn is None else np.asarray(action_mask_fn(obs[group]))
        )
        choices = [rng.choice(np.flatnonzero(row)) for row in mask]
        actions[group] = np.array(choices, np.int32)
    return actions


def check_contract(env):
    """Checks by tracing that a step keeps the types of the state and observation."""
    state, obs = jax.eval_shape(env.reset, KEY)
    action = jax.eval_shape(env.action_space.sample, KEY)
    step = jax.eval_shape(env.step, KEY, state, action)
    inputs, outputs = (state, obs), (step.state, step.obs)
    chex.assert_trees_all_equal_shapes_and_dtypes(inputs, outputs)
    assert step.reward.shape == step.terminated.shape == step.truncated.shape == ()
    sample = jax.eval_shape(env.observation_space.sample, KEY)
    chex.assert_trees_all_equal_shapes_and_dtypes(sample, obs)


def check_render(env):
    """Renders two states; checks that the frames differ and are not blank."""
    assert envs.render.can_render(env)
    keys = jax.random.split(KEY, 2)
    state, _ = jax.jit(jax.vmap(env.reset))(keys)
    gif = envs.render_gif(env, state, jnp.ones(1))
    with Image.open(io.BytesIO(gif)) as image:
        assert isinstance(image, GifImageFile)
        assert image.n_frames == 2
        first = np.asarray(image.convert("RGB"))
        image.seek(1)
        second = np.asarray(image.convert("RGB"))
    assert first.shape == second.shape
    assert 200 <= first.shape[1] <= 600
    assert first[20:].std() > 1  # below the title
    assert (first != second).any()


RENDER_PROGRAM = """
import sys, suite_checks
from rollout import envs
suite_checks.check_render(envs.make(sys.argv[1]))
"""


def check_render_with_egl(env_id):
    """Renders in a new process: EGL must be selected before mujoco is imported."""
    support = os.path.dirname(__file__)
    path = os.pathsep.join([support, os.getcwd(), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RENDER_PROGRAM, env_id],
        capture_output=True,
        text=True,
        env={**os.environ, "MUJOCO_GL": "egl", "PYTHONPATH": path},
    )
    if "EGL" in process.stderr or "Rendering needs OpenGL" in process.stderr:
        pytest.skip("there is no EGL")
    assert process.returncode == 0, process.stderr
