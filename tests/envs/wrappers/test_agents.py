"""Wrappers around environments of several agents: what each agent sees and earns."""

import functools

import agents
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, in_one_program, quick_jit

import rollout
from rollout import envs

KEY = jax.random.key(4)
T, B = 40, 3


@jax.tree_util.register_static
class AllAct(agents.ChanceEnv):
    """Everyone who is left acts."""

    simultaneous = True

    def choose(self, word):
        return jnp.ones(3, bool)


BARE, IN_TURN = AllAct(), agents.ChanceEnv(is_turn_based=True)
ENVS = {
    "bare": BARE,
    "limited": envs.TimeLimit(BARE, 3),
    "limited in turn": envs.TimeLimit(IN_TURN, 3),
    "reward": envs.TransformReward(BARE, lambda reward: 2 * reward + 1),
    "one group": envs.TransformObs(BARE, lambda x: jnp.stack([x, -x]), group="two"),
    "each group": envs.TransformObs(BARE, lambda obs: obs.sum().reshape(1)),
    "frames": envs.FrameStack(BARE, 3),
    "previous": envs.wrappers.ObservePrevious(BARE),
    "number": envs.wrappers.AgentNumber(BARE),
    "number beside": envs.wrappers.AgentNumber(envs.wrappers.ObservePrevious(BARE)),
}
each_env = pytest.mark.parametrize("name", ENVS)


@functools.cache
def played():
    """Rows `[T, B]` of every environment, in one program, with equal keys and actions.

    A plain loop, which costs a quarter of a collector's compiling.
    """
    rng = np.random.default_rng(0)
    action = {
        "two": rng.integers(4, size=(T, B, 2), dtype=np.int32),
        "one": rng.random((T, B, 1, 2), np.float32),
    }

    def one(env, first_key, keys, action):
        def step(carry, given):
            (state, obs, acting), length = carry
            (step_key, reset_key), action = given
            result, length = env.step(step_key, state, action), length + 1
            done = result.episode_terminated | result.episode_truncated
            row = {
                "obs": obs,
                "acting": acting,
                "action": action,
                "reward": result.reward,
                "next_obs": result.obs,
                "truncated": result.episode_truncated,
                "done": done,
                "length": length,
            }
            after = (result.state, result.obs, result.acting), length
            fresh = env.reset(reset_key), 0
            return jax.tree.map(lambda x, y: jnp.where(done, x, y), fresh, after), row

        start = env.reset(first_key), jnp.int32(0)
        return jax.lax.scan(step, start, (keys, action))[1]

    def lanes(env, _):
        first, *keys = jax.random.split(KEY, (3, T, B))  # all have the same
        fn = functools.partial(one, env)
        return jax.vmap(fn, (0, 1, 1), 1)(first[0], tuple(keys), action)

    with jax.debug_key_reuse(False):
        return in_one_program(lanes, ENVS)


@each_env
def test_observations_are_of_the_spaces(name):
    env = ENVS[name]
    obs = jax.eval_shape(env.reset, KEY)[1]
    for group, members in env.groups.items():
        space = envs.spaces.Repeated(env.observation_spaces[group], len(members))
        want = jax.eval_shape(space.sample, KEY)
        chex.assert_trees_all_equal_shapes_and_dtypes(obs[group], want)


@pytest.mark.parametrize("name", ["limited", "limited in turn"])
def test_time_limit_truncates_the_episode_of_all(name):
    rows = played()[name]
    assert rows["length"].max() == 3
    at_limit = rows["length"] == 3
    assert rows["truncated"][at_limit].all()
    short = rows["done"] & ~at_limit
    assert short.any()


def test_reward_of_every_agent_is_transformed():
    want = 2 * played()["bare"]["reward"] + 1
    np.testing.assert_array_equal(played()["reward"]["reward"], want)
    _, trajectory, _ = normalized()
    reward = trajectory.info.agents.reward
    assert (reward % 2 == 1).all()
    np.testing.assert_array_equal(trajectory.reward, reward.sum(-1))


def test_observations_of_one_group_or_all_are_transformed():
    bare, one, every = (played()[x] for x in ("bare", "one group", "each group"))
    two = bare["obs"]["two"]
    np.testing.assert_array_equal(one["obs"]["two"], np.stack([two, -two], -1))
    np.testing.assert_array_equal(one["obs"]["one"], bare["obs"]["one"])
    want = bare["next_obs"]["one"].sum(-1, keepdims=True)
    np.testing.assert_array_equal(every["next_obs"]["one"], want)
    np.testing.assert_array_equal(every["acting"], bare["acting"])


def test_frames_of_every_agent_are_its_last_observations():
    raw, length = (played()["bare"][x] for x in ("obs", "length"))
    frames = played()["frames"]["obs"]["one"]
    assert frames.shape == (T, B, 1, 3, 2)
    for lane in range(B):
        for t in range(T):
            back = [min(k, length[t, lane] - 1) for k in (2, 1, 0)]
            want = np.stack([raw["one"][t - k, lane] for k in back], axis=1)
            np.testing.assert_array_equal(frames[t, lane], want)


def test_every_agent_sees_its_previous_action_and_reward():
    rows, members = played()["previous"], [0, 2]
    seen = rows["next_obs"]["two"]
    np.testing.assert_array_equal(seen["action"], rows["action"]["two"])
    np.testing.assert_array_equal(seen["reward"], rows["reward"][..., members])
    first = np.repeat(rows["length"][..., None] == 1, 2, -1)
    np.testing.assert_array_equal(rows["obs"]["two"]["first"], first)
    assert not rows["obs"]["two"]["action"][first].any()


@pytest.mark.parametrize("name", ["number", "number beside"])
def test_every_agent_sees_its_number_also_beside_other_entries(name):
    obs, eye = played()[name]["obs"], np.eye(3)
    for group, members in (("two", [0, 2]), ("one", [1])):
        want = np.broadcast_to(eye[members], (T, B, len(members), 3))
        np.testing.assert_array_equal(obs[group]["agent"], want)
    beside = {"action", "reward", "first"} if name == "number beside" else set()
    assert set(obs["two"]) == {"agent", "obs"} | beside


@functools.cache
def normalized():
    """A carry and trajectory of mapped policies, and the rows of each group."""
    lanes = envs.NormalizeObs(envs.vectorize(ENVS["reward"], B))
    random = {x: rollout.random_policy(s) for x, s in lanes.action_spaces.items()}
    mapping = rollout.agents.static_mapping({"a": "two", "b": "one", "c": "two"})
    policy = rollout.agents.policy_map(random, mapping, lanes)
    collector = rollout.Collector(env=lanes, policy=policy)
    assert lanes.observation_spaces["one"].shape == (2,)

    @quick_jit
    def run(key):
        params = {"one": None, "two": None}
        carry, trajectory = collector.collect_steps(collector.init(key), params, T)
        _, rows = rollout.agents.team_transitions((), trajectory)
        return carry, trajectory, rows

    return jax.device_get(run(KEY))


def test_statistics_are_those_of_all_agents_of_a_group():
    carry, trajectory, _ = normalized()
    statistics = carry.env_state.statistics.value
    raw, raw_next = (trajectory.info.env[x] for x in ("raw_obs", "raw_next_obs"))
    length = trajectory.episode_length[..., None]
    # The observation of agent a after n steps is `10 n + a`.
    np.testing.assert_array_equal(raw["two"], 10 * (length - 1) + np.array([0, 2]))
    np.testing.assert_array_equal(raw_next["two"], 10 * length + np.array([0, 2]))
    # First observations count once, at their reset.
    is_first = np.asarray(trajectory.first) & (np.arange(len(length)) > 0)[:, None]
    seen = [raw["two"][0].ravel(), raw_next["two"].ravel(), raw["two"][is_first]]
    seen = np.concatenate([np.ravel(x) for x in seen]).astype(np.float64)
    # float32 sums of up to 10 * 9 over some 200 values.
    np.testing.assert_allclose(statistics.mean["two"], seen.mean(), rtol=1e-4)
    np.testing.assert_allclose(statistics.var["two"], seen.var(), rtol=1e-4)
    assert statistics.mean["acting"] is None
    np.testing.assert_array_equal(trajectory.obs["acting"], raw["acting"])
    assert trajectory.obs["acting"].dtype == bool
    scale = np.sqrt(statistics.var["two"] + 1e-8)
    want = (raw_next["two"][-1] - statistics.mean["two"]) / scale
    np.testing.assert_allclose(trajectory.next_obs["two"][-1], want, rtol=1e-5)


def test_normalised_agents_are_mapped_to_policies():
    _, trajectory, rows = normalized()
    want = trajectory.obs["two"].reshape(T, -1)
    np.testing.assert_array_equal(rows["two"].obs, want)


REFUSED = [
    (lambda: envs.RescaleAction(BARE), "of one agent for `RescaleAction`"),
    (lambda: envs.wrappers.FixedLength(BARE, 3), "of one agent for `FixedLength`"),
    (lambda: envs.NormalizeReward(envs.vectorize(BARE, B)), "for `NormalizeReward`"),
    (lambda: envs.wrappers.ObservePrevious(IN_TURN), "agents act at every step for"),
    (lambda: envs.NormalizeObs(envs.vectorize(IN_TURN, B)), "agents act at every step"),
    (lambda: envs.TransformObs(BARE, abs, group="x"), "be a group of `env`, two, one"),
    (lambda: envs.wrappers.AgentNumber(CountEnv()), "be a `MultiAgentEnv` for"),
    (
        lambda: jax.eval_shape(envs.wrappers.AgentNumber(ENVS["number"]).reset, KEY),
        "no entry `agent` for `AgentNumber`",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_agents_that_a_wrapper_cannot_serve_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
