"""Environments as other people write them, played, checked and drawn.

What is collected is compared with plain loops over its actions; see `files_of_others`.
"""

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


def at_random(env):
    kind = rollout.Collector if hasattr(env, "reset_done") else rollout.HostCollector
    return kind(env=env, policy=rollout.random_policy(env.action_space))


def play(make_fn):
    """Rows of environments of Gymnasium."""
    collector = at_random(envs.from_gymnasium(make_fn, B))
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
def test_environment_that_was_not_adapted_is_told_by_what(env, adapter):
    for use in (envs.vectorize, rollout.check_env):
        with pytest.raises(ValueError, match=f"`rollout.envs.{adapter}` adapts it"):
            use(env, 3)


def test_old_gym_is_refused_with_what_to_put_around_it():
    with pytest.raises(ValueError, match=r"got OldGym of gym before 0.26.*Wrap it in"):
        envs.from_gymnasium(OldGym, B)


class Seeded(Arm):
    """Takes a seed, keeps it, and knows no options."""

    seed = 7

    def reset(self, *, seed=None):
        return super().reset(seed=seed)


def test_seed_of_ones_own_is_not_taken_for_old_gym():
    jax.tree.map(np.testing.assert_array_equal, play(Arm), play(Seeded))

    class Plain:
        reset = step = None

        def __init__(self):
            self.seed = 7

    with pytest.raises(ValueError, match=r"got a plain Plain\.$"):
        envs.vectorize(Plain(), B)


def test_old_gym_with_a_class_around_it_plays_the_same_episodes():
    def adapted():
        return FromOldGym(OldGym())

    jax.tree.map(np.testing.assert_array_equal, play(Arm), play(adapted))
    assert rollout.check_env(envs.from_gymnasium(adapted, B), num_steps=60) == ()


def test_class_in_the_style_of_brax_is_drawn_if_it_draws_itself():
    class Drawn(Suite):
        def render_frames(self, states):
            for state in states:
                yield np.full((9, 30, 3), 20 * int(state.data), np.uint8)

    def adapt(suite):
        return envs.vectorize(envs.suites.from_brax(suite), B)

    gif, episode = draw_episode(at_random(adapt(Drawn())), None, KEY, 99)
    (length,) = episode.episode_length
    with Image.open(io.BytesIO(gif)) as image:
        for number in range(length + 1):
            image.seek(number)
            assert np.asarray(image.convert("RGB"))[21:].max() == 40 * number
        assert image.n_frames == length + 1
    assert not envs.render.can_render(adapt(Suite()))
    with pytest.raises(ValueError, match=r"method `render_frames`, got Suite"):
        rollout.record_gif(at_random(adapt(Suite())), None, KEY, "a.gif")


RUNNERS = {
    "runners": Runners(),
    "team": envs.suites.from_jaxmarl(Team(LIMITS)),
    "team by name": envs.suites.from_jaxmarl(Team({"a": 2, "b": 5, "c": 3})),
}


def runners(name):
    """Lanes of agents with a shared policy, which also values what it sees."""
    env = envs.vectorize(RUNNERS[name], B)
    (space,) = env.action_spaces.values()
    (observation_space,) = env.observation_spaces.values()
    agent = ppo.PPO(EnvSpec(observation_space, space, B), CONFIG)
    policy = agents.policy_map({"one": agent.policy}, agents.static_mapping("one"), env)
    return agent, rollout.Collector(env=env, policy=policy)


def check_runners(t, is_merged):
    """Rows and flags of each agent, by a plain loop; one flag cannot tell of both."""
    seen = set()
    for lane in range(B):
        for agent, limit in enumerate(LIMITS):
            column = lane * len(LIMITS) + agent
            place = time = 0
            over = False
            for row in range(len(t.mask)):
                if t.obs[row, column, 1] == 0 and t.mask[row, column]:
                    place, time, over = 0, 0, False
                assert t.mask[row, column] == (not over)
                if over:
                    continue
                assert t.obs[row, column].tolist() == [place, time]
                place, time = place + 2 * t.action[row, column] - 1, time + 1
                assert t.next_obs[row, column].tolist() == [place, time]
                assert t.reward[row, column] == place
                late = time >= limit
                flags = abs(place) == 2 and not (is_merged and late), late
                assert (t.terminated[row, column], t.truncated[row, column]) == flags
                over = any(flags)
                seen.add((agent, *map(bool, flags)))
    assert {(0, False, True), (1, True, False), (2, False, True)} <= seen


@pytest.mark.parametrize(
    "name", ["runners", "team", pytest.param("team by name", marks=pytest.mark.slow)]
)
def test_limits_of_single_agents_cut_and_bootstrap_these_alone(name):
    agent, collector = runners(name)
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
        rows = rows[group]
        next_value = rollout.next_values(rows, rows.extras["value"], last[group])
        _, expected = agent.model.apply(state.params, rows.next_obs)
        _, metrics = agent.learn(state.replace(key=key), rows, last[group])
        return rows, next_value, expected, metrics

    rows, next_value, expected, metrics = jax.device_get(collect(jax.random.key(5)))
    check_runners(rows, is_merged=name != "runners")
    valid = rows.mask & ~rows.terminated
    np.testing.assert_allclose(next_value[valid], expected[valid], rtol=1e-5, atol=1e-6)
    assert 0 < metrics["kl"] < 0.5
