"""Compares the kernel with a plain Python loop over one environment."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    NUM_STEPS,
    CountEnv,
    PlainPolicy,
    collect,
    make_collector,
)
from flax import struct

import rollout
from rollout import envs

pytestmark = pytest.mark.usefixtures("quick_compile")
slow = pytest.mark.slow
NUM_LANES = 16  # of 64 steps each: 1,024 steps in plain Python


def make_plain_env():
    """Returns jitted `start` and `step` of an environment with the documented keys."""
    env = CountEnv()

    @jax.jit
    def start(root, lane, number):
        lane_key = jax.random.fold_in(jax.random.fold_in(root, 1), lane)
        episode_key = jax.random.fold_in(lane_key, number)
        reset_key = jax.random.fold_in(episode_key, envs.types.RESET)
        return episode_key, *env.reset(reset_key)

    @jax.jit
    def step(episode_key, length, state, action):
        return env.step(jax.random.fold_in(episode_key, length), state, action)

    return start, step


def play_lane(plain, root, lane, actions):
    """Plays one lane; yields a dict of fields per step."""
    start, step = plain
    number, length, total = 0, 0, np.float32(0)
    episode_key, state, obs = start(root, lane, number)
    for action in actions:
        length += 1
        result = step(episode_key, length, state, action)
        state, row = result.state, jax.device_get(result.replace(state=()))
        total += np.float32(row.reward)
        yield {
            "obs": obs,
            "action": action,
            "reward": row.reward,
            "terminated": row.terminated,
            "truncated": row.truncated,
            "next_obs": row.obs,
            "mask": True,
            "episode_id": number * NUM_LANES + lane,
            "episode_return": total,
            "episode_length": length,
            "info": row.info,
        }
        obs = row.obs
        if row.terminated or row.truncated:
            number, length, total = number + 1, 0, np.float32(0)
            episode_key, state, obs = start(root, lane, number)


def test_trajectory_equals_a_plain_loop():
    plain, root = make_plain_env(), jax.random.key(7)
    _, trajectory = collect("count")
    trajectory = jax.tree.map(np.asarray, trajectory)
    assert trajectory.reward.size >= 1000
    assert (trajectory.truncated & trajectory.terminated).any()
    for lane in range(NUM_LANES):
        actions = trajectory.action[:, lane]
        rows = list(play_lane(plain, root, lane, actions))
        for field in vars(trajectory).keys() - {"extras", "accumulated", "final_value"}:
            want = jax.tree.map(lambda *x: np.stack(x), *[row[field] for row in rows])
            got = getattr(trajectory, field)
            got = jax.tree.map(lambda x, lane=lane: x[:, lane], got)
            chex.assert_trees_all_equal(got, want)
    assert trajectory.extras == ()
    np.testing.assert_array_equal(trajectory.first, trajectory.episode_length == 1)


def act_and_count(params, obs, state, key):
    """Counts the steps of its episode; records the count and a word of its key."""
    state = {"steps": state["steps"] + 1, "key": state["key"]}
    word = jnp.broadcast_to(jax.random.bits(key), obs.shape[:1])
    action = jnp.zeros(obs.shape[0], jnp.int32)
    return action, state, {"steps": state["steps"], "word": word}


def initial_state(num_envs):
    keys = jax.random.split(jax.random.key(5), num_envs)
    return {"steps": jnp.zeros(num_envs, jnp.int32), "key": keys}


@functools.cache
def collect_counts():
    """Returns first carry, last carry and trajectory of `act_and_count`."""
    env = envs.render.expose_state(CountEnv())  # which holds a key
    env = envs.vectorize(env, 8, auto_reset="select")
    policy = rollout.recurrent_policy(act_and_count, initial_state)
    collector = rollout.Collector(env=env, policy=policy)
    start = collector.init(jax.random.key(3))
    return start, *collector.collect_steps(start, None, NUM_STEPS)


def test_policy_key_depends_on_the_step_counter():
    _, carry, trajectory = collect_counts()

    @jax.jit
    def word(t):
        key = jax.random.fold_in(jax.random.key(3), 0)
        return jax.random.bits(jax.random.fold_in(key, t))

    words = np.array([word(t) for t in range(NUM_STEPS)])
    got = np.asarray(trajectory.extras["word"])
    np.testing.assert_array_equal(got, np.broadcast_to(words[:, None], got.shape))
    assert len(set(words.tolist())) == NUM_STEPS
    assert carry.step == NUM_STEPS


@pytest.mark.usefixtures("key_reuse")
def test_step_keys_are_independent_of_the_reset_key():
    """Step keys differ from the keys that a reset splits from its key."""
    _, trajectory = collect("count")
    noise = np.asarray(trajectory.info["noise"])
    assert len(np.unique(noise)) == noise.size

    def children(key):
        return np.asarray(jax.random.key_data(jax.random.split(key, 4)))

    episode_key = jax.random.key(0)
    reset_children = children(jax.random.fold_in(episode_key, envs.types.RESET))
    for n in range(1, 5):
        words = np.asarray(jax.random.key_data(jax.random.fold_in(episode_key, n)))
        assert not (reset_children == words).all(axis=-1).any()


def test_policy_state_resets_at_episode_boundaries():
    _, carry, trajectory = collect_counts()
    steps = trajectory.extras["steps"]
    np.testing.assert_array_equal(steps, trajectory.episode_length)
    length = carry.episode.episode_length
    np.testing.assert_array_equal(carry.policy_state["steps"], length)
    want, got = initial_state(8)["key"], carry.policy_state["key"]
    np.testing.assert_array_equal(jax.random.key_data(want), jax.random.key_data(got))


def test_program_names_the_four_parts():
    collector = make_collector("count")
    carry = jax.eval_shape(collector.init, jax.random.key(0))
    text = jax.jit(collector.step).lower(carry, None).compile().as_text()
    for part in ("policy", "env_step", "auto_reset", "bookkeeping"):
        assert f"/{part}/" in text


@struct.dataclass
class Line:
    """Moves by its action times the scale; the reward is minus the squared position."""

    scale: jax.Array
    observation_space = envs.Box(-9.0, 9.0, (1,))
    action_space = envs.Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return jnp.ones(1), jnp.ones(1)

    def step(self, key, state, action):
        state = state + self.scale * action
        return envs.EnvStep(
            state=state,
            obs=state,
            reward=-jnp.sum(state**2),
            terminated=jnp.any(state > 100.0),
            truncated=jnp.bool_(False),
            info={},
        )


@pytest.mark.parametrize("auto_reset", ["select", pytest.param("compact", marks=slow)])
def test_gradients_flow_through_the_kernel(auto_reset):
    policy = rollout.stateless_policy(lambda gain, obs, key: gain * obs)

    def total(gain, scale):
        env = envs.vectorize(Line(scale), 2, auto_reset=auto_reset)
        collector = rollout.Collector(env=env, policy=policy)
        carry = collector.init(jax.random.key(0))
        _, trajectory = collector.collect_steps(carry, gain, 2)
        return trajectory.reward[:, 0].sum()

    # x_1 = 1 + g s, x_2 = (1 + g s)^2: the derivative of -(x_1^2 + x_2^2) by g s is
    # -(2 (1 + g s) + 4 (1 + g s)^3) = -1.5 at g = -0.5, s = 1.
    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))(-0.5, 1.0)
    np.testing.assert_allclose(gradient, (-1.5 * 1.0, -1.5 * -0.5), rtol=1e-6)


@struct.dataclass
class EndlessLine(Line):
    """A `Line` that never terminates."""

    def step(self, key, state, action):
        return super().step(key, state, action).replace(terminated=jnp.bool_(False))


def test_endless_environment_compiles_no_resets():
    policy = rollout.stateless_policy(lambda gain, obs, key: jnp.tanh(gain * obs))

    def make(scale):
        env = envs.vectorize(EndlessLine(scale), 8)
        return rollout.Collector(env=env, policy=policy)

    def total(gain, scale, carry):
        return make(scale).collect_steps(carry, gain, 6)[1].reward.sum()

    def plain(gain, scale, carry):
        def step(obs, _):
            obs = obs + scale * jnp.tanh(gain * obs)
            return obs, -jnp.sum(obs**2)

        return jax.lax.scan(step, carry.obs, length=6)[1].sum()

    args = -0.5, 0.7, make(0.7).init(jax.random.key(1))
    kernel_program, plain_program = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1))).lower(*args)
        for fn in (total, plain)
    )
    assert "auto_reset" not in kernel_program.as_text(debug_info=True)
    # The order of 48 summands differs.
    got, want = (x.compile()(*args) for x in (kernel_program, plain_program))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


def test_trajectory_contains_keys_of_info():
    start, _, trajectory = collect_counts()
    got = np.asarray(jax.random.key_data(trajectory.info["state"]["key"]))
    want = np.asarray(jax.random.key_data(start.env_state["key"]))
    assert got.shape == (NUM_STEPS, *want.shape)
    np.testing.assert_array_equal(got[0], want)


@slow
def test_policy_reads_the_key_of_each_episode():
    policy = PlainPolicy(
        lambda num_envs: {
            "key": rollout.types.EpisodeKey(),
            "n": jnp.zeros(num_envs),
        },
        lambda params, obs, state, key: rollout.types.PolicyStep(
            action=jnp.zeros(obs.shape[:1], jnp.int32),
            state=state,
            extras=jax.random.key_data(state["key"].value),
        ),
    )
    trajectories = []
    for num_envs in (2, 5):
        env = envs.vectorize(CountEnv(), num_envs)
        collector = rollout.Collector(env=env, policy=policy)
        start = collector.init(jax.random.key(3))
        trajectories.append(collector.collect_steps(start, None, 24)[1])
    two_lanes, five_lanes = trajectories
    np.testing.assert_array_equal(two_lanes.extras, five_lanes.extras[:, :2])
    words, ids = (
        np.asarray(five_lanes.extras).reshape(-1, 2),
        np.asarray(five_lanes.episode_id),
    )
    pairs = {(*word, number) for word, number in zip(words, ids.ravel(), strict=True)}
    assert len(pairs) == len(np.unique(ids)) == len(np.unique(words, axis=0)) > 10
    # The key differs from the key of the episode and from the keys of its steps.
    fold = jax.vmap(jax.random.fold_in, (0, None))
    want = jax.random.key_data(fold(start.episode.key, np.uint32(2**32 - 1)))
    np.testing.assert_array_equal(five_lanes.extras[0], want)
