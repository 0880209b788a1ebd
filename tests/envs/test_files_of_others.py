"""Environments as other people write them, played, checked and drawn.

What is collected is compared with plain loops over its actions; see `files_of_others`.
"""

import io

import jax
import numpy as np
import pytest
from cases import quick_jit
from files_of_others import (
    GOAL,
    LIMIT,
    Arm,
    Before,
    FromOldGym,
    OldGym,
    Point,
    Renamed,
    Runners,
    Team,
)
from PIL import Image

import rollout
from rollout import agents, envs
from rollout.envs.spaces import EnvSpec
from rollout.gif import draw_episode
from rollout.recipes import ppo

KEY, B = jax.random.key(5), 4
CONFIG = ppo.Config(
    num_updates=2, num_steps=24, num_minibatches=2, hidden_layer_sizes=(8, 8)
)
WALKS = {
    "renamed": lambda: envs.from_gymnax(Renamed()),
    "brax": lambda: envs.suites.from_brax(Point()),
}
LIMITS = np.array(Runners().limits)


def make(name, **options):
    """Makes the lanes of a kind; Gymnasium's play in Python."""
    if name in WALKS:
        return envs.vectorize(WALKS[name](), B)
    made = {"arm": Arm, "old gym": lambda: FromOldGym(OldGym())}[name]
    return envs.from_gymnasium(made, B, **options)


def at_random(env):
    kind = rollout.Collector if hasattr(env, "reset_done") else rollout.HostCollector
    return kind(env=env, policy=rollout.random_policy(env.action_space))


def play(collector):
    carry = collector.init(KEY)
    return jax.device_get(collector.collect_steps(carry, None, 40)[1])


def check_walks(t):
    """Steps left and right, by a plain loop in each lane."""
    both = 0
    for lane in range(t.mask.shape[1]):
        place = time = total = None
        for row in range(len(t.mask)):
            obs, action = t.obs[row, lane], t.action[row, lane]
            if place is None:
                (place, time), total = obs, 0.0
                assert (abs(place) in (0, 2), time) == (True, 0)
            assert obs.tolist() == [place, time]
            reward = 1.5 if abs(place) == 2 else -0.5
            place, time = place + (1 if action > 0 else -1), time + 1
            total += reward
            assert t.next_obs[row, lane].tolist() == [place, time]
            flags = abs(place) >= GOAL, abs(place) < GOAL and time >= LIMIT
            assert (t.terminated[row, lane], t.truncated[row, lane]) == flags
            got = t.reward[row, lane], t.episode_return[row, lane]
            assert got == (reward, total)
            if any(flags):
                place = None
                both |= 1 << flags[1]
    assert both == 3  # terminations and limits


def brightness(path):
    with Image.open(path) as image:
        shades = []
        for number in range(image.n_frames):
            image.seek(number)
            shades.append(int(np.asarray(image.convert("RGB"))[21:].max()))
        return shades


@pytest.mark.parametrize("name", WALKS)
def test_random_play_is_that_of_a_plain_loop(name):
    check_walks(play(at_random(make(name))))


@pytest.mark.parametrize("name", ["renamed", "old gym"])
@pytest.mark.usefixtures("quick_compile")
def test_probe_finds_nothing_to_mend(name):
    env = WALKS[name]() if name in WALKS else make(name)
    assert rollout.check_env(env, num_steps=60) == ()


def test_file_from_before_gymnax_1_needs_one_line():
    line = "write `is_terminated = is_terminal` below it"
    (issue,) = rollout.check_env(envs.from_gymnax(Before()))
    assert line in issue.message
    with pytest.raises(ValueError, match=line):
        play(at_random(envs.vectorize(envs.from_gymnax(Before()), B)))


@pytest.mark.parametrize(
    ("env", "adapter"),
    [
        (Renamed(), "from_gymnax"),
        (Point(), "suites.from_brax"),
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
    old, new = (play(at_random(envs.from_gymnasium(x, B))) for x in (Arm, Seeded))
    jax.tree.map(np.testing.assert_array_equal, old, new)

    class Plain:
        reset = step = None

        def __init__(self):
            self.seed = 7

    with pytest.raises(ValueError, match=r"got a plain Plain\.$"):
        envs.vectorize(Plain(), B)


def test_old_gym_with_a_class_around_it_plays_the_same_episodes():
    new, old = (play(at_random(make(name))) for name in ("arm", "old gym"))
    jax.tree.map(np.testing.assert_array_equal, new, old)


@pytest.mark.parametrize("name", ["renamed", "arm"])
def test_game_with_a_drawing_of_its_own_is_drawn(name, tmp_path):
    options = {"render_mode": "rgb_array"} if name == "arm" else {}
    collector = at_random(make(name, **options))
    path = tmp_path / "a.gif"
    episode = rollout.record_gif(collector, None, KEY, path)
    (length,), first = episode.episode_length, 10 if name == "renamed" else 0
    step = 40 if name == "renamed" else 10
    assert brightness(path) == [first + step * n for n in range(length + 1)]


def test_class_in_the_style_of_brax_may_draw_itself():
    class Drawn(Point):
        def render_frames(self, states):
            for state in states:
                yield np.full((9, 30, 3), 10 * state.obs[1], np.uint8)

    env = envs.vectorize(envs.suites.from_brax(Drawn()), B)
    gif, episode = draw_episode(at_random(env), None, jax.random.key(5), 99)
    shown = brightness(io.BytesIO(gif))
    assert shown == [10 * n for n in range(episode.episode_length[0] + 1)]


def test_environment_in_the_style_of_brax_without_physics_is_not_drawn():
    env = WALKS["brax"]()
    assert not envs.render.can_render(env)
    with pytest.raises(ValueError, match=r"method `render_frames`, got Point"):
        rollout.record_gif(at_random(envs.vectorize(env, B)), None, KEY, "a.gif")


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
