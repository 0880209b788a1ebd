"""Checks of any environment: rows against a plain loop, spaces, drawings."""

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
from plain_suites import choose

import rollout
from rollout import envs

KEY = jax.random.key(5)


def collect(env, action_mask_fn=None, *, num_steps=250):
    """A trajectory of the random policy in the lanes of `env`."""
    policy = rollout.random_policy(env.action_space, action_mask_fn=action_mask_fn)
    collector = rollout.Collector(env=env, policy=policy)
    _, trajectory = collector.collect_steps(collector.init(KEY), None, num_steps)
    return jax.device_get(trajectory)


def play(env, num_steps, key=KEY):
    """The last carry and the trajectory of the random policy, in one program."""
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    run = quick_jit(
        lambda x: collector.collect_steps(collector.init(x), None, num_steps)
    )
    return jax.device_get(run(key))


def check_is_as_in_plain_loop(rows, plain, *, limit=0, atol=0.0):
    """Plays every row again with the same keys and actions.

    Args:
        rows: the collected trajectory.
        plain: a `plain_suites.Plain`.
        limit: that of a `TimeLimit` around the environment, or 0.
        atol: how far floats may be off, where another program rounds otherwise.
    """
    num_envs = rows.reward.shape[1]
    number, length = np.zeros((2, num_envs), np.int32)
    total = np.zeros(num_envs, np.float32)
    state, obs = plain.begin(keys_of(number, length))
    expected = []
    for action in rows.action:
        length = length + 1
        after = plain.advance(keys_of(number, length), state, action)
        state, next_obs, reward, terminated, truncated, info = after
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
        fresh = plain.begin(keys_of(number, np.zeros_like(number)))
        state, obs = choose(done, fresh, (state, next_obs))
    for name in expected[0]:
        got, want = getattr(rows, name), [row[name] for row in expected]
        want = jax.tree.map(lambda *x: np.stack(x), *want)
        assert jax.tree.structure(got) == jax.tree.structure(want), name
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


@jax.jit
def keys_of(number, step):
    """The keys that `rollout.envs.types` promises to steps; step 0 is the reset.

    Those of each lane's episode `number`, from 0.
    """
    fold = jax.random.fold_in

    def one(lane, number, step):
        return fold(fold(fold(fold(KEY, 1), lane), number), step)

    return jax.vmap(one)(np.arange(len(number)), number, step)


def check_successors(rows):
    """Checks that `next_obs` is the next row, but at an ending, where it differs."""
    done = (rows.terminated | rows.truncated)[:-1]
    following = jax.tree.leaves(jax.tree.map(lambda x: x[1:], rows.obs))
    successor = jax.tree.leaves(jax.tree.map(lambda x: x[:-1], rows.next_obs))
    differ = [
        (x != y).reshape(*done.shape, -1).any(axis=-1)
        for x, y in zip(following, successor, strict=True)
    ]
    differ = np.any(differ, axis=0)
    assert not differ[~done].any()
    assert differ[done].any() or not done.any()


def check_spaces(env, rows):
    """Checks that observations, successors and actions are in the spaces."""
    spaces = env.observation_space, env.observation_space, env.action_space
    values = rows.obs, rows.next_obs, rows.action

    @quick_jit
    def contained(values):
        pairs = zip(spaces, values, strict=True)
        return [jax.vmap(jax.vmap(space.contains))(x).all() for space, x in pairs]

    assert all(contained(values))
    for space, value in zip(spaces, values, strict=True):
        drawn = jax.eval_shape(space.sample, KEY)
        row = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[0, 0], x), value)
        chex.assert_trees_all_equal_shapes_and_dtypes(drawn, row)


def check_steps_of_agents(
    plain, action_mask_fn=None, *, see=lambda obs: obs, num_steps
):
    """Compares each step of an adapter with that of the suite, to an ending.

    Args:
        plain: a `plain_suites.Plain` of several agents.
        action_mask_fn: the allowed actions of a group's observation.
        see: the suite's own part of the observation.
        num_steps: the most steps.

    Returns:
        The last step.
    """
    env, rng = plain.adapt(), np.random.default_rng(1)
    reset, step, advance = map(quick_jit, (env.reset, env.step, plain.advance))
    first = reset(KEY)
    state, obs, acting = first
    want = quick_jit(plain.begin)(KEY)
    chex.assert_trees_all_equal(raw((state, see(obs), acting)), raw(want))
    own_state = want[0]
    for number in range(num_steps):
        key = jax.random.fold_in(KEY, number)
        action = draw(env, obs, action_mask_fn, rng)
        got, want = step(key, state, action), advance(key, own_state, action)
        chex.assert_trees_all_equal(raw(got.replace(obs=see(got.obs))), raw(want))
        state, obs, own_state = got.state, got.obs, want.state
        chex.assert_trees_all_equal_shapes_and_dtypes(first, (state, obs, got.acting))
        assert got.reward.dtype == jnp.float32
        if got.episode_terminated | got.episode_truncated:
            break
    return got


def draw(env, obs, action_mask_fn, rng):
    """Actions of all agents, also of those whose turn it is not."""
    actions = {}
    for group, names in env.groups.items():
        num_actions = env.action_spaces[group].n
        mask = np.ones((len(names), num_actions), bool)
        mask = (
            mask if action_mask_fn is None else np.asarray(action_mask_fn(obs[group]))
        )
        chosen = [rng.choice(np.flatnonzero(allowed)) for allowed in mask]
        actions[group] = np.array(chosen, np.int32)
    return actions


def check_contract(env):
    """Traces a reset and a step: what comes out is like what went in."""
    state, obs = jax.eval_shape(env.reset, KEY)
    action = jax.eval_shape(env.action_space.sample, KEY)
    step = jax.eval_shape(env.step, KEY, state, action)
    before, after = (state, obs), (step.state, step.obs)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert step.reward.shape == step.terminated.shape == step.truncated.shape == ()
    drawn = jax.eval_shape(env.observation_space.sample, KEY)
    chex.assert_trees_all_equal_shapes_and_dtypes(drawn, obs)


def check_is_drawn(env):
    """Draws two states, as frames that differ from each other and from plain paper."""
    assert envs.render.can_render(env)
    keys = jax.random.split(KEY, 2)
    state, _ = jax.jit(jax.vmap(env.reset))(keys)
    gif = envs.render_gif(env, state, jnp.ones(1))
    with Image.open(io.BytesIO(gif)) as image:
        assert image.n_frames == 2
        first = np.asarray(image.convert("RGB"))
        image.seek(1)
        second = np.asarray(image.convert("RGB"))
    assert first.shape == second.shape
    assert 200 <= first.shape[1] <= 600
    assert first[20:].std() > 1  # below the title
    assert (first != second).any()


DRAW = """
import sys, suite_checks
from rollout import envs
suite_checks.check_is_drawn(envs.make(sys.argv[1]))
"""


def check_is_drawn_with_egl(env_id):
    """Draws in a process of its own: EGL must be chosen before mujoco is imported."""
    support = os.path.dirname(__file__)
    path = os.pathsep.join([support, os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRAW, env_id],
        capture_output=True,
        text=True,
        env={**os.environ, "MUJOCO_GL": "egl", "PYTHONPATH": path},
    )
    if "EGL" in done.stderr or "Rendering needs OpenGL" in done.stderr:
        pytest.skip("there is no EGL")
    assert done.returncode == 0, done.stderr
