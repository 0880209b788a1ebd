"""How fast are environments of the suites, compared with the loop of each suite?

Reports medians of single runs in random order, in one process, under the random policy
(with action masks if the suite has them). The loop of a suite follows the documentation
of the suite: the auto-reset of the suite, vmapped in a `lax.scan`, with one key split
per step. Both programs return observation, action, reward, flags, the observation after
the step, and return and length of the episode so far.

The observation after the step is the true successor in this library. In the loops of
XLand-MiniGrid, Craftax, pgx, brax and Playground it is the reset observation at the end
of an episode, which costs no extra time. The wrappers of brax and Playground reset to
the first state of the lane, which also costs no extra time.

    python benchmarks/suites_speed.py
    python benchmarks/suites_speed.py --only navix --num-envs 64 256
"""

import functools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from harness import Program, lanes, measure, rows_of, run, steps
from jax import lax

import rollout
from rollout import envs

NUM_STEPS = 128
LIMIT = 1000  # steps of an episode of brax and Playground


class Peer(NamedTuple):
    """Functions of a suite for a single environment.

    Attributes:
        reset: `key -> state`, the carry of the suite's loop.
        step: `(key, state, action) -> state`; resets at the end of an episode.
        read: `state -> (obs, reward, terminated, truncated, successor)`.
        act: `(key, obs) -> action`.
    """

    reset: Callable
    step: Callable
    read: Callable
    act: Callable


def jumanji_peer(name: str) -> Peer:
    """Makes functions of Jumanji: `AutoResetWrapper` with final observations."""
    import jumanji
    from jumanji.wrappers import AutoResetWrapper

    env = AutoResetWrapper(jumanji.make(name), next_obs_in_extras=True)

    def read(state: tuple) -> tuple:
        timestep = state[1]
        last, over = timestep.last(), timestep.discount == 0
        obs, successor = timestep.observation, timestep.extras["next_obs"]
        return obs, timestep.reward, last & over, last & ~over, successor

    step = lambda key, state, action: env.step(state[0], action)  # noqa: E731
    return Peer(env.reset, step, read, lambda key, obs: sample(key, obs.action_mask))


def navix_peer(name: str) -> Peer:
    """Makes functions of Navix: `step` resets one call after the end of an episode."""
    import navix

    env = navix.make(name)

    def read(timestep: Any) -> tuple:
        ends = timestep.is_termination(), timestep.is_truncation()
        return timestep.observation, timestep.reward, *ends, timestep.observation

    step = lambda key, state, action: env.step(state, action)  # noqa: E731
    return Peer(env.reset, step, read, uniform(int(env.action_space.maximum) + 1))


def xminigrid_peer(name: str) -> Peer:
    """Makes functions of XLand-MiniGrid with `GymAutoResetWrapper`."""
    import xminigrid
    from xminigrid.wrappers import GymAutoResetWrapper

    env, params = xminigrid.make(name)
    env = GymAutoResetWrapper(env)

    def read(timestep: Any) -> tuple:
        last, over = timestep.last(), timestep.discount == 0
        obs = timestep.observation
        return obs, timestep.reward, last & over, last & ~over, obs

    step = lambda key, state, action: env.step(params, state, action)  # noqa: E731
    reset = functools.partial(env.reset, params)
    return Peer(reset, step, read, uniform(env.num_actions(params)))


def craftax_peer(name: str) -> Peer:
    """Makes functions of Craftax with auto-reset, as in the README of Craftax."""
    from craftax.craftax_env import make_craftax_env_from_name

    env = make_craftax_env_from_name(name, auto_reset=True)
    params = env.default_params

    def reset(key: jax.Array) -> tuple:
        obs, state = env.reset(key, params)
        return obs, state, jnp.float32(0.0), jnp.bool_(False)

    def step(key: jax.Array, state: tuple, action: jax.Array) -> tuple:
        return env.step(key, state[1], action, params)[:4]

    def read(state: tuple) -> tuple:
        obs, _, reward, done = state
        return obs, reward, done, jnp.zeros_like(done), obs

    return Peer(reset, step, read, uniform(env.action_space(params).n))


def pgx_peer(name: str) -> Peer:
    """Makes functions of pgx with `auto_reset`."""
    import pgx
    from pgx.experimental import auto_reset

    env = pgx.make(name)
    resetting = auto_reset(env.step, env.init)

    def read(state: Any) -> tuple:
        obs = state.observation, state.legal_action_mask
        ends = state.terminated, state.truncated
        return obs, state.rewards, *ends, state.observation

    step = lambda key, state, action: resetting(state, action, key)  # noqa: E731
    return Peer(env.init, step, read, lambda key, obs: sample(key, obs[1]))


def brax_env(name: str) -> Any:
    """Makes a batched environment with `brax.envs.training.wrap`."""
    from brax.envs import get_environment, training

    return training.wrap(get_environment(name), LIMIT)


def playground_env(name: str) -> Any:
    """Makes a batched environment with `wrap_for_brax_training`."""
    from mujoco_playground import registry, wrapper

    env = registry.load(name, config_overrides={"impl": "jax"})
    return wrapper.wrap_for_brax_training(env, episode_length=LIMIT)


def run_physics(env: Any, num_envs: int) -> Program:
    """Makes the loop of a suite with batched environments."""
    reset_keys = jax.random.split(jax.random.PRNGKey(0), num_envs)
    start = jax.jit(env.reset)(reset_keys), jax.random.key(1)
    shape = num_envs, env.action_size

    def step(carry: tuple, _: None) -> tuple:
        state, key = carry
        key, action_key = jax.random.split(key)
        action = jax.random.uniform(action_key, shape, minval=-1.0, maxval=1.0)
        obs = state.obs
        # Copy the dicts of the state: the wrappers write into them.
        state = env.step(jax.tree.map(lambda x: x, state), action)
        truncated = state.info["truncation"].astype(bool)
        flags = state.done.astype(bool) & ~truncated, truncated
        totals = state.info["episode_metrics"]["sum_reward"], state.info["steps"]
        return (state, key), (obs, action, state.reward, *flags, state.obs, *totals)

    loop = jax.jit(lambda carry: lax.scan(step, carry, length=NUM_STEPS))
    return functools.partial(loop, start)


def sample(key: jax.Array, mask: jax.Array) -> jax.Array:
    """Samples a valid action."""
    return jax.random.categorical(key, jnp.log(mask.astype(jnp.float32)))


def uniform(num_actions: int) -> Callable:
    """Makes a policy that samples one of `num_actions` actions."""
    return lambda key, obs: jax.random.randint(key, (), 0, num_actions)


def run_peer(peer: Peer, num_envs: int) -> Program:
    """Makes the loop of a suite from functions for a single environment."""

    def step(carry: tuple, _: None) -> tuple:
        state, (total, length), key = carry
        obs, *_ = jax.vmap(peer.read)(state)
        key, action_key, step_key = jax.random.split(key, 3)
        action = jax.vmap(peer.act)(jax.random.split(action_key, num_envs), obs)
        state = jax.vmap(peer.step)(jax.random.split(step_key, num_envs), state, action)
        _, reward, terminated, truncated, successor = jax.vmap(peer.read)(state)
        done = terminated | truncated
        total, length = total + reward.reshape(num_envs, -1)[:, 0], length + 1
        row = obs, action, reward, terminated, truncated, successor, total, length
        totals = jnp.where(done, 0.0, total), jnp.where(done, 0, length)
        return (state, totals, key), row

    totals = jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.int32)
    reset_keys = jax.random.split(jax.random.key(0), num_envs)
    start = jax.jit(jax.vmap(peer.reset))(reset_keys), totals, jax.random.key(1)
    loop = jax.jit(lambda carry: lax.scan(step, carry, length=NUM_STEPS))
    return functools.partial(loop, start)


def run_ours(env_id: str, num_envs: int, action_mask_fn: Callable | None) -> Program:
    """Makes `collect_steps` for an environment of a suite."""
    env = envs.make(env_id)
    policy = rollout.random_policy(env.action_space, action_mask_fn=action_mask_fn)
    return steps(lanes(env, num_envs, policy), NUM_STEPS, read=rows_of)


def run_game(env_id: str, num_envs: int) -> Program:
    """Makes `collect_steps` for a pgx game; all players share the observation."""
    env = envs.vectorize(envs.make(env_id), num_envs)
    space = env.action_spaces["players"]
    policy = rollout.random_policy(space, action_mask_fn=lambda obs: obs["action_mask"])
    policy = rollout.agents.policy_map(
        {"all": policy}, rollout.agents.static_mapping("all"), env
    )

    def read(t: rollout.Transition) -> tuple:
        obs = jax.tree.map(lambda x: x[:, :, 0], t.obs["players"])
        successor = t.next_obs["players"]["observation"][:, :, 0]
        flags, info = (t.terminated, t.truncated), t.info.agents
        action = t.action["players"], info.reward
        totals = info.agent_return, t.episode_length
        return obs, *action, *flags, successor, *totals

    collector = rollout.Collector(env=env, policy=policy)
    return steps(collector, NUM_STEPS, {"all": None}, read)


PHYSICS = {"brax": brax_env, "playground": playground_env}
# Function that makes a `Peer`, function that returns the action mask, environments.
SUITES = {
    "brax": (None, None, ("inverted_pendulum", "reacher")),
    "jumanji": (
        jumanji_peer,
        lambda obs: obs.action_mask,
        ("Snake-v1", "Game2048-v1"),
    ),
    "navix": (navix_peer, None, ("Navix-Empty-8x8-v0", "Navix-DoorKey-8x8-v0")),
    "xminigrid": (
        xminigrid_peer,
        None,
        ("MiniGrid-Empty-8x8", "XLand-MiniGrid-R1-9x9"),
    ),
    "craftax": (craftax_peer, None, ("Craftax-Classic-Symbolic-v1",)),
    "pgx": (pgx_peer, None, ("tic_tac_toe", "connect_four")),
    "playground": (None, None, ("CartpoleBalance",)),
}


def make_programs(suite: str, name: str, num_envs: int) -> dict[str, Program]:
    """Makes `collect_steps` and the loop of the suite."""
    make_peer, action_mask_fn, _ = SUITES[suite]
    env_id = f"{suite}:{name}"
    if suite == "pgx":
        ours = run_game(env_id, num_envs)
    else:
        ours = run_ours(env_id, num_envs, action_mask_fn)
    if suite in PHYSICS:
        theirs = run_physics(PHYSICS[suite](name), num_envs)
    else:
        theirs = run_peer(make_peer(name), num_envs)
    return {"ours": ours, "theirs": theirs}


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times every environment of the suites."""
    for suite in args.only:
        for name in SUITES[suite][2]:
            for num_envs in args.num_envs:
                with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
                    warnings.simplefilter("ignore")
                    programs = make_programs(suite, name, num_envs)
                    timing = measure(programs, args.repeats)
                rate = num_envs * NUM_STEPS / timing["ours"].wall / 1e3
                ratio = timing["theirs"].wall / timing["ours"].wall
                yield {
                    "environment": f"`{suite}:{name}`",
                    "version": metadata.version(suite),
                    "`rollout`, thousand steps/s": f"{rate:,.0f}",
                    "`rollout` / the suite's own loop": f"{ratio:.2f}",
                }


if __name__ == "__main__":
    run(__doc__, 15, {"suites": rows}, only=tuple(SUITES), num_envs=(256,))
