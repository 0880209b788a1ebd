"""User code with types. A type checker reads this file, and pytest runs it.

An ignore comment names each expected error. The type checker reports an ignore comment
without an error.
"""

# pyright: basic, reportUnnecessaryTypeIgnoreComment=error

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, assert_type

import jax
import jax.numpy as jnp
from flax import struct

import rollout
from rollout import buffers, envs


class Params(TypedDict):
    weight: jax.Array  # [4, 2]
    bias: jax.Array  # [1, 2]


class Obs(NamedTuple):
    position: jax.Array  # [B, 2]
    velocity: jax.Array  # [B, 2]


class Gains(NamedTuple):
    gain: jax.Array  # ()


@struct.dataclass
class Walk:
    """A custom environment without a base class."""

    size: jax.Array | float = 1.0

    @property
    def observation_space(self) -> envs.Box:
        return envs.Box(-9.0, 9.0, (4,))

    @property
    def action_space(self) -> envs.Discrete:
        return envs.Discrete(2)

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jax.random.normal(key, (4,))
        return state, state

    def step(
        self, key: jax.Array, state: jax.Array, action: jax.Array
    ) -> envs.EnvStep[jax.Array, jax.Array]:
        del key  # unused
        state = state + self.size * (2 * action - 1).astype(jnp.float32)
        over = jnp.abs(state[0]) > 3
        return envs.EnvStep(
            state=state,
            obs=state,
            reward=1.0,
            terminated=over,
            truncated=False,
            info={},
        )


def act(params: Params, obs: jax.Array, key: jax.Array) -> jax.Array:
    logits = obs @ params["weight"] + params["bias"]
    return jax.random.categorical(key, logits).astype(jnp.int32)


def act_with_extras(
    params: Params, obs: jax.Array, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    return act(params, obs, key), {"norm": jnp.abs(obs).sum(axis=1)}


def act_with_state(
    params: Params, obs: jax.Array, state: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return act(params, obs + state, key), state + 1


def init_state(num_envs: int) -> jax.Array:
    return jnp.zeros((num_envs, 4))


def act_on_tree(params: Gains, obs: Obs, key: jax.Array) -> dict[str, jax.Array]:
    del params, key  # unused
    return {"force": obs.position - obs.velocity}


def count(total: jax.Array, row: rollout.Transition[jax.Array, jax.Array]) -> jax.Array:
    return total + row.mask.sum()


def make_params() -> Params:
    return {"weight": jnp.ones((4, 2)), "bias": jnp.zeros((1, 2))}


def test_collector_keeps_types_of_params_obs_and_action():
    params, key = make_params(), jax.random.key(0)
    env = envs.vectorize(Walk(), 2)
    policy = rollout.stateless_policy(act)
    assert_type(policy, rollout.Policy[Params, jax.Array, jax.Array])
    collector = rollout.Collector(env=env, policy=policy)
    assert_type(collector, rollout.Collector[Params, jax.Array, jax.Array])

    def use(key: jax.Array) -> None:
        carry, trajectory = collector.collect_steps(collector.init(key), params, 3)
        assert_type(trajectory, rollout.Transition[jax.Array, jax.Array])
        assert_type(trajectory.next_obs, jax.Array)
        assert_type(trajectory.action, jax.Array)
        trajectory = trajectory.replace(extras=())
        assert_type(trajectory, rollout.Transition[jax.Array, jax.Array])
        assert trajectory.obs.shape == (3, 2, 4)

        carry, total = collector.fold_steps(
            carry, params, count, jnp.int32(0), num_steps=2
        )
        assert_type(total, jax.Array)
        assert total.shape == ()
        carry, episodes = collector.collect_episodes(
            carry, params, 2, max_episode_steps=5
        )
        assert_type(episodes, rollout.types.Episodes)
        assert episodes.episode_return.shape == (2,)
        carry, episodes = collector.collect_episodes(
            carry, params, 2, max_episode_steps=5, return_trajectory=True
        )
        rows = episodes.trajectory
        assert rows.obs.shape == (5, 2, 4)

    jax.eval_shape(use, key)


def test_policies_keep_types_of_params_obs_and_action():
    policy = rollout.stateless_policy(act_with_extras, mode_fn=act)
    assert_type(policy, rollout.Policy[Params, jax.Array, jax.Array])
    assert_type(
        rollout.policies.Greedy(policy),
        rollout.policies.Greedy[Params, jax.Array, jax.Array],
    )
    epsilon_greedy = rollout.policies.EpsilonGreedy(
        policy, envs.Discrete(2), epsilon=0.1
    )
    assert_type(
        epsilon_greedy, rollout.policies.EpsilonGreedy[Params, jax.Array, jax.Array]
    )
    recurrent = rollout.recurrent_policy(act_with_state, init_state)
    assert_type(recurrent, rollout.Policy[Params, jax.Array, jax.Array])
    untyped = rollout.stateless_policy(
        lambda params, obs, key: obs.x @ params["weight"]
    )
    assert_type(untyped, rollout.Policy)
    tree_policy = rollout.stateless_policy(act_on_tree)
    assert_type(tree_policy, rollout.Policy[Gains, Obs, dict[str, jax.Array]])
    assert not tree_policy.has_mode


def test_untyped_transition_has_fields_of_any_type():
    collector = rollout.Collector(
        env=envs.vectorize(Walk(), 2), policy=rollout.random_policy(envs.Discrete(2))
    )
    assert_type(collector, rollout.Collector)

    def use(key: jax.Array) -> jax.Array:
        return position(collector.step(collector.init(key), None)[1])

    assert jax.eval_shape(use, jax.random.key(0)).shape == (2,)


def position(transition: rollout.Transition) -> jax.Array:
    assert_type(transition.obs, Any)
    return transition.obs[:, 0]


def test_sample_has_the_annotated_type():
    buffer = buffers.ReplayBuffer(4, 2)

    def use(key: jax.Array) -> None:
        state = buffer.init({"x": jnp.zeros(2)})
        state = buffer.add(state, {"x": jnp.ones(2)})
        batch: buffers.types.Batch[dict[str, jax.Array]] = buffer.sample(state, key, 2)
        assert_type(batch.experience["x"], jax.Array)
        assert batch.experience["x"].shape == (2,)

    jax.eval_shape(use, jax.random.key(0))


if TYPE_CHECKING:

    def errors(collector: rollout.Collector[Params, jax.Array, jax.Array]) -> None:
        params = {"weight": jnp.ones((4, 2))}
        carry = collector.init(jax.random.key(0))
        collector.collect_steps(carry, params, 3)  # pyright: ignore[reportArgumentType]
        collector.step(carry, 1.0)  # pyright: ignore[reportArgumentType]
        rollout.Stream(collector, key=carry.key, params=1.0)  # pyright: ignore[reportArgumentType]
        rollout.evaluate(collector, Gains(carry.step), carry.key, 3)  # pyright: ignore[reportArgumentType, reportCallIssue]
        _, trajectory = collector.collect_steps(carry, make_params(), 3)
        rollout.stateless_policy(act_with_state)  # pyright: ignore[reportArgumentType, reportCallIssue]
        print(trajectory.rewards)  # pyright: ignore[reportAttributeAccessIssue]
        print(trajectory.obs.position)  # pyright: ignore[reportAttributeAccessIssue]
