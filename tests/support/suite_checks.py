"""Shared by tests of suites: a plain loop through a suite's own functions."""

import io

import chex
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import rollout
from rollout import envs
from rollout.kernel import episode_keys

KEY = jax.random.key(5)


def collect(env, mask_fn=None, *, num_envs=4, num_steps=250):
    """A trajectory of the random policy, and the keys of its episodes by id."""
    env = envs.vectorize(env, num_envs)
    policy = rollout.random_policy(env.action_space, mask_fn=mask_fn)
    collector = rollout.Collector(env=env, policy=policy)
    _, trajectory = collector.collect_steps(collector.init(KEY), None, num_steps)
    return jax.device_get(trajectory)


def check_is_as_in_plain_loop(trajectory, begin, advance, *, rtol=0.0):
    """Plays every row again with the same keys and actions, one lane after the other.

    Args:
        trajectory: the collected trajectory.
        begin: `key -> (state, obs)`, an episode of the suite.
        advance: `(key, state, action) -> (state, obs, reward, terminated, truncated,
            info)`, a step of the suite, which resets nothing.
        rtol: how far floats may be off, where a batch is computed otherwise.
    """
    num_steps, num_envs = trajectory.reward.shape
    for lane in range(num_envs):
        number, length = -1, 0
        for t in range(num_steps):
            if length == 0:
                number, total = number + 1, np.float32(0.0)
                episode_key = key_of(lane, number, num_envs)
                state, obs = begin(jax.random.fold_in(episode_key, 0))
            row = jax.tree.map(lambda x: x[t, lane], trajectory)  # noqa: B023
            length += 1
            key = jax.random.fold_in(episode_key, length)
            after = advance(key, state, row.action)
            state, next_obs, reward, terminated, truncated, info = after
            total += np.float32(reward)
            done = bool(terminated) or bool(truncated)
            want = {
                "obs": obs,
                "next_obs": next_obs,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "info": info,
                "episode_return": total,
                "episode_length": length,
                "episode_id": number * num_envs + lane,
                "mask": True,
            }
            for name, value in want.items():
                check_equal(getattr(row, name), value, rtol, (name, t, lane))
            obs, length = next_obs, 0 if done else length


def check_equal(got, want, rtol, where):
    assert jax.tree.structure(got) == jax.tree.structure(want), where
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=str(where))


def key_of(lane, number, num_envs):
    """The key of a lane's episode, from 0."""
    lanes = episode_keys.LaneIds(jnp.array([lane], jnp.int32), num_envs)
    ids = jnp.array([number * num_envs + lane], jnp.int32)
    return episode_keys.keys_of(KEY, lanes, ids)[0]


def check_contract(env):
    """Traces a reset and a step: what comes out is like what went in."""
    state, obs = jax.eval_shape(env.reset, KEY)
    action = jax.eval_shape(env.action_space.sample, KEY)
    step = jax.eval_shape(env.step, KEY, state, action)
    before, after = (state, obs), (step.state, step.obs)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert step.reward.shape == step.terminated.shape == step.truncated.shape == ()


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
