"""Environments that users write: collection, `check_env` and rendering.

Trajectories are compared with plain loops over the same actions; see `files_of_others`.
"""

import functools
import io

import gymnax
import jax
import numpy as np
import pytest
from cases import quick_jit
from files_of_others import Arm, FromOldGym, OldGym, Runners, Team
from PIL import Image
from plain_suites import Suite

import rollout
from rollout import agents, envs
from rollout.envs.spaces import EnvSpec
from rollout.gif import draw_episode
from rollout.recipes import ppo

KEY, B = jax.random.key(5), 4
CONFIG = ppo.Config(
    num_updates=2, num_steps=24, num_minibatches=2, hidden_layer_sizes=(8, 8)
)
LIMITS = np.array(Runners().limits)


def make_random_collector(env):
    collector_type = (
        rollout.Collector if hasattr(env, "reset_done") else rollout.HostCollector
    )
    return collector_type(env=env, policy=rollout.random_policy(env.action_space))


@functools.cache
def play(make_fn):
    """Collects rows of Gymnasium environments."""
    collector = make_random_collector(envs.from_gymnasium(make_fn, B))
    return collector.collect_steps(collector.init(KEY), None, 40)[1]


@pytest.mark.parametrize(
    ("env", "adapter"),
    [
        (gymnax.make("CartPole-v1")[0], "from_gymnax"),
        (Suite(), "suites.from_brax"),
        (Team(LIMITS), "suites.from_jaxmarl"),
        (OldGym(), "from_gymnasium"),
    ],
)
def test_error_names_the_adapter(env, adapter):
    for function in (envs.vectorize, rollout.check_env):
        with pytest.raises(ValueError, match=f"`rollout.envs.{adapter}`"):
            function(env, 3)


def test_old_gym_environment_raises():
    with pytest.raises(ValueError, match=r"OldGym of gym before 0.26"):
        envs.from_gymnasium(OldGym, B)


class SeededArm(Arm):
    """Has an attribute `seed`, and a reset without `options`."""

    seed = 7

    def reset(self, *, seed=None):
        return super().reset(seed=seed)


def test_seed_attribute_is_not_old_gym():
    jax.tree.map(np.testing.assert_array_equal, play(Arm), play(SeededArm))

    class PlainEnv:
        reset = step = None

        def __init__(self):
            self.seed = 7

    with pytest.raises(ValueError, match=r"got a plain PlainEnv\.$"):
        envs.vectorize(PlainEnv(), B)


def test_wrapped_old_gym_environment_returns_same_episodes():
    def make_adapted():
        return FromOldGym(OldGym())

    jax.tree.map(np.testing.assert_array_equal, play(Arm), play(make_adapted))
    assert rollout.check_env(envs.from_gymnasium(make_adapted, B), num_steps=60) == ()


def test_brax_style_environment_renders_with_render_frames():
    class RenderedSuite(Suite):
        def render_frames(self, states):
            for state in states:
                yield np.full((9, 30, 3), 20 * int(state.data), np.uint8)

    def adapt(suite):
        return envs.vectorize(envs.suites.from_brax(suite), B)

    gif, episode = draw_episode(
        make_random_collector(adapt(RenderedSuite())), None, KEY, 99
    )
    (length,) = episode.episode_length
    with Image.open(io.BytesIO(gif)) as image:
        for number in range(length + 1):
            image.seek(number)
            assert np.asarray(image.convert("RGB"))[21:].max() == 40 * number
        assert image.n_frames == length + 1
    assert not envs.render.can_render(adapt(Suite()))
    with pytest.raises(ValueError, match=r"`render_frames`, got Suite"):
        rollout.record_gif(make_random_collector(adapt(Suite())), None, KEY, "a.gif")


RUNNERS = {
    "runners": Runners(),
    "team": envs.suites.from_jaxmarl(Team(LIMITS)),
    "team_by_name": envs.suites.from_jaxmarl(Team({"a": 2, "b": 5, "c": 3})),
}


def make_runners(name):
    """Returns an agent, and a collector of agents that share its policy and critic."""
    env = envs.vectorize(RUNNERS[name], B)
    (space,) = env.action_spaces.values()
    (observation_space,) = env.observation_spaces.values()
    agent = ppo.PPO(EnvSpec(observation_space, space, B), CONFIG)
    policy = agents.policy_map({"one": agent.policy}, agents.static_mapping("one"), env)
    return agent, rollout.Collector(env=env, policy=policy)


def check_agent_rows(t, is_merged):
    """Compares rows and flags of each agent with a plain loop.

    If `is_merged`, the environment has a single flag, and truncation has precedence.
    """
    flags_by_agent = set()
    for lane in range(B):
        for agent, limit in enumerate(LIMITS):
            column = lane * len(LIMITS) + agent
            position = time = 0
            has_ended = False
            for row in range(len(t.mask)):
                if t.obs[row, column, 1] == 0 and t.mask[row, column]:
                    position, time, has_ended = 0, 0, False
                assert t.mask[row, column] == (not has_ended)
                if has_ended:
                    continue
                assert t.obs[row, column].tolist() == [position, time]
                position, time = position + 2 * t.action[row, column] - 1, time + 1
                assert t.next_obs[row, column].tolist() == [position, time]
                assert t.reward[row, column] == position
                is_late = time >= limit
                flags = abs(position) == 2 and not (is_merged and is_late), is_late
                assert (t.terminated[row, column], t.truncated[row, column]) == flags
                has_ended = any(flags)
                flags_by_agent.add((agent, *map(bool, flags)))
    assert {(0, False, True), (1, True, False), (2, False, True)} <= flags_by_agent


@functools.cache
def collect_agent_rows(name):
    """Returns an agent with its state, and its rows with values."""
    agent, collector = make_runners(name)
    (group,) = collector.env.groups

    @quick_jit
    def collect(key):
        init_key, key = jax.random.split(key)
        carry = collector.init(key)
        state = agent.init_learner(init_key, carry.obs[group])
        params = {"one": state.params}
        pending = agents.Pending.init(collector, carry, params)
        carry, t = collector.collect_steps(carry, params, 24)
        pending, rows = agents.agent_transitions(pending, t)
        last = agents.last_values(pending, collector.value(carry, params))
        rows, last_value = rows[group], last[group]
        next_value = rollout.next_values(rows, rows.extras["value"], last_value)
        _, expected = agent.model.apply(state.params, rows.next_obs)
        return state.replace(key=key), rows, last_value, next_value, expected

    return agent, *collect(jax.random.key(5))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("runners", marks=pytest.mark.slow),
        "team",
        pytest.param("team_by_name", marks=pytest.mark.slow),
    ],
)
def test_agent_time_limits_truncate_and_bootstrap(name):
    _, _, rows, _, *values = collect_agent_rows(name)
    rows, next_value, expected = jax.device_get((rows, *values))
    check_agent_rows(rows, is_merged=name != "runners")
    valid = rows.mask & ~rows.terminated
    np.testing.assert_allclose(next_value[valid], expected[valid], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_ppo_learns_from_agent_rows():
    agent, state, rows, last_value, *_ = collect_agent_rows("runners")
    _, metrics = quick_jit(agent.learn)(state, rows, last_value)
    assert 0 < metrics["kl"] < 0.5
