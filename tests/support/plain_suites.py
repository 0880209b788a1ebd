"""Plain loops over the functions of each suite, the references for adapters.

Each function for a suite returns a `Plain`, whose state is the state of the suite.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct
from jax.interpreters import batching

from rollout import envs
from rollout.envs.multi_agent import MultiAgentStep
from rollout.envs.suites.physics import adapt as adapt_physics

LAVA = 14  # `BlockType.LAVA` of Craftax


class Plain(NamedTuple):
    """The reset and step functions of a suite's environment, and its adapter.

    Attributes:
        adapt: `() -> Env`, creates a new adapter of the suite's object.
        begin: `keys -> (state, obs)`, a reset.
        advance: `(keys, state, action) -> (state, obs, reward, terminated, truncated,
            info)`, a step without auto-reset.
    """

    adapt: Callable[[], Any]
    begin: Callable[..., Any]
    advance: Callable[..., Any]


def make_plain(
    adapt: Callable,
    begin: Callable,
    advance: Callable,
    params: Any = (),
    jit: Any = quick_jit,
) -> Plain:
    """Maps both functions over lanes, and passes `params` as an argument."""
    begin = jit(jax.vmap(begin, (None, 0)))
    advance = jit(jax.vmap(advance, (None, 0, 0, 0)))
    fns = (functools.partial(fn, params) for fn in (begin, advance))
    return Plain(adapt, *fns)


@quick_jit
def choose(flag, new, old):
    """Selects lanes from `new` if the flag is set; leaves may be typed keys."""

    def pick(x, y):
        return jnp.where(flag.reshape(flag.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)


@functools.cache
def gymnax(name: str, **params: Any) -> Plain:
    def endings(params, state, done):
        return done, state.time >= params.max_steps_in_episode

    return gymnax_style(envs.make(name, **params), envs.from_gymnax, endings)


@functools.cache
def craftax(name: str, limit: int) -> Plain:
    def endings(params, state, done):
        at_limit = state.timestep >= params.max_timesteps
        row, column = state.player_position
        is_dead = (state.player_health <= 0) | (state.map[row, column] == LAVA)
        return is_dead, done & at_limit & ~is_dead

    env = envs.make(f"craftax:{name}", max_timesteps=limit)
    return gymnax_style(env, envs.suites.from_craftax, endings)


def gymnax_style(env: Any, from_suite: Callable, endings: Callable) -> Plain:
    """Returns a `Plain` for the gymnax environment in an adapter."""

    def begin(params, key):
        obs, state = env.env.reset_env(key, params)
        return state, obs

    def advance(params, key, state, action):
        result = env.env.step_env(key, state, action, params)
        obs, state, reward, done, info = result
        return state, obs, reward, *endings(params, state, done), info

    adapt = functools.partial(from_suite, env.env, env.env_params)
    return make_plain(adapt, begin, advance, env.env_params)


@functools.cache
def navix(name: str) -> Plain:
    grid = pytest.importorskip("navix").make(name, max_steps=20)

    def endings(timestep):
        return timestep.is_termination(), timestep.is_truncation()

    return timestep_style(grid, (), endings, envs.suites.from_navix)


@functools.cache
def xminigrid(name: str) -> Plain:
    grid, params = pytest.importorskip("xminigrid").make(name, max_steps=20)

    def endings(timestep):
        last, ends = timestep.last(), timestep.discount == 0
        return last & ends, last & ~ends

    return timestep_style(grid, (params,), endings, envs.suites.from_xminigrid)


def timestep_style(
    grid: Any, params: tuple, endings: Callable, from_suite: Callable
) -> Plain:
    """Returns a `Plain` for a grid whose state contains the key of the next step."""

    def begin(params, key):
        timestep = grid.reset(*params, key)
        return timestep, timestep.observation

    def advance(params, key, timestep, action):
        # `step` resets only after the last time step of an episode.
        old_timestep = timestep.replace(state=timestep.state.replace(key=key))
        result = grid.step(*params, old_timestep, action)
        return result, result.observation, result.reward, *endings(result), {}

    adapt = functools.partial(from_suite, grid, *params)
    return make_plain(adapt, begin, advance, params)


@functools.cache
def jumanji(name: str, **options: Any) -> Plain:
    game = pytest.importorskip("jumanji").make(name, **options)

    def begin(_, key):
        state, timestep = game.reset(key)
        return state, timestep.observation

    def advance(_, key, state, action):
        state, timestep = game.step(state.replace(key=key), action)
        last, ends = timestep.last(), timestep.discount == 0
        obs, reward = timestep.observation, timestep.reward
        return state, obs, reward, last & ends, last & ~ends, timestep.extras

    adapt = functools.partial(envs.suites.from_jumanji, game)
    return make_plain(adapt, begin, advance)


@functools.cache
def brax(name: str) -> Plain:
    suite_env = import_quietly("brax.envs").get_environment(name)
    return physics(suite_env, "sys", envs.suites.from_brax)


@functools.cache
def playground(name: str) -> Plain:
    registry = import_quietly("mujoco_playground").registry
    suite_env = registry.load(name, config_overrides={"impl": "jax"})
    return physics(suite_env, "_mjx_model", envs.suites.from_playground)


@struct.dataclass
class State:
    """The state of brax and of MuJoCo Playground."""

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict
    info: dict


class Suite:
    """An environment with the interface of brax.

    A step adds `model` to the data, keeps a part of the last observation and writes
    into its state.
    """

    action_size = 2

    def __init__(self):
        self.model = jnp.float32(2.0)
        self.reward = self.model_reward  # bound to this object

    def model_reward(self):
        return self.model

    def reset(self, rng) -> Any:
        assert rng.dtype == jnp.uint32
        obs = {"state": jax.random.normal(rng, (3,)), "privileged_state": jnp.zeros(1)}
        info = {"rng": jax.random.split(rng)[0]}
        return State(jnp.float32(0), obs, 0.0, 0.0, {"drawn": jnp.float32(0)}, info)

    def step(self, state, action):
        state.info["rng"], key = jax.random.split(state.info["rng"])
        state.metrics["drawn"] = jax.random.uniform(key)
        data = state.data + self.model
        obs = {**state.obs, "privileged_state": data[None]}
        done = jnp.where(data > 3, 1.0, 0.0)
        return state.replace(data=data, obs=obs, reward=self.reward(), done=done)


@struct.dataclass
class Contacts:
    """Data of a lane, and an array without a lane axis, as in MuJoCo Warp."""

    position: Any
    limits: Any  # [2], the least and the greatest position of all lanes


def _contacts_to_lanes(take, _, contacts, axis):
    return contacts.replace(position=take(contacts.position, axis))


def _contacts_from_lanes(stack, size, contacts, axis):
    return contacts.replace(position=stack(size, contacts.position, axis))


batching.register_vmappable(
    Contacts, int, int, _contacts_to_lanes, _contacts_from_lanes, None
)


@jax.custom_batching.custom_vmap
def move(contacts, velocity):
    position = contacts.position + velocity
    return Contacts(position, jnp.stack([position, position]))


@move.def_vmap
def _(size, is_mapped, contacts, velocity):
    position = jnp.broadcast_to(contacts.position + velocity, (size,))
    limits = jnp.stack([position.min(), position.max()])
    return Contacts(position, limits), Contacts(True, False)


class ContactSuite(Suite):
    """A `Suite` with the same episodes, whose data has an array without a lane axis."""

    def reset(self, rng):
        state = super().reset(rng)
        return state.replace(data=Contacts(state.data, jnp.zeros(2)))

    def step(self, state, action):
        next_state = super().step(state.replace(data=state.data.position), action)
        return next_state.replace(data=move(state.data, self.model))


@functools.cache
def custom_physics(name: str) -> Plain:
    del name  # there is only one environment
    adapt = functools.partial(adapt_physics, model_field="model", frame_field=None)
    return physics(Suite(), "model", adapt)


def physics(suite_env: Any, field: str, from_suite: Callable) -> Plain:
    """Passes the model as an argument: XLA rounds differently with constants."""

    def begin(model, key):
        words = jax.random.key_data(key)
        state = call_with_model(suite_env, field, model, "reset", words)
        return state, state.obs

    def advance(model, key, state, action):
        if "rng" in state.info:  # replace the random numbers of the suite
            words = jax.random.key_data(key)
            state = state.replace(info={**state.info, "rng": words})
        next_state = call_with_model(suite_env, field, model, "step", state, action)
        ends = next_state.done == 1, jnp.bool_(False)
        return next_state, next_state.obs, next_state.reward, *ends, next_state.metrics

    adapt, model = functools.partial(from_suite, suite_env), getattr(suite_env, field)
    return make_plain(adapt, begin, advance, model, jit=jax.jit)


def call_with_model(suite_env, field, model, method, *args):
    """Calls a method with a different model, as domain randomization does."""
    original_model = getattr(suite_env, field)
    setattr(suite_env, field, model)
    try:
        return getattr(suite_env, method)(*args)
    finally:
        setattr(suite_env, field, original_model)


def import_quietly(module: str) -> Any:
    """Imports a physics suite and ignores its deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module)


def sample_uniformly(params, obs, key):
    """Samples a valid action, as the default opponent does."""
    del params  # unused
    return jax.random.categorical(key, jnp.log(obs["action_mask"])).astype(jnp.int32)


def first_valid_action(params, obs, key):
    """Returns the first valid action from number `params` on, cyclically."""
    del key  # unused
    mask = jnp.roll(obs["action_mask"], -params)
    return ((jnp.argmax(mask) + params) % mask.size).astype(jnp.int32)


def pgx_obs(state, observation):
    return {"observation": observation, "action_mask": state.legal_action_mask}


@functools.cache
def pgx_seat(name: str, opponent: Callable | None = None, params: Any = None) -> Plain:
    """Returns a `Plain` for player 0; the opponents reply one after another."""
    game = pytest.importorskip("pgx").make(name)
    split = jax.vmap(jax.random.split, out_axes=1)
    init = quick_jit(jax.vmap(game.init))

    @quick_jit
    @jax.vmap
    def observe_seat(state):
        return pgx_obs(state, game._observe(state, jnp.int32(0)))

    @quick_jit
    @jax.vmap
    def move(state, action, key):
        return game.step(state, action, key), ~state.legal_action_mask[action]

    @quick_jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def reply(state, key, number):
        action_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        choose_fn = opponent or sample_uniformly
        action = choose_fn(params, pgx_obs(state, state.observation), action_key)
        return game.step(state, action, step_key)

    def finish_round(state, keys):
        number, reward = 0, np.float32(0.0)
        while True:
            is_done = state.terminated | state.truncated
            is_waiting = ~is_done & (state.current_player != 0)
            if not is_waiting.any():
                return state, reward
            next_state = reply(state, keys, number)
            rewards = np.asarray(next_state.rewards)
            reward = reward + np.where(is_waiting, rewards[:, 0], 0)
            state, number = choose(is_waiting, next_state, state), number + 1

    def begin(keys):
        init_keys, keys = split(keys)
        state, _ = finish_round(init(init_keys), keys)
        return state, observe_seat(state)

    def advance(keys, state, action):
        step_keys, keys = split(keys)
        moved_state, is_illegal = move(state, action, step_keys)
        next_state, reward = finish_round(moved_state, keys)
        reward = np.asarray(moved_state.rewards)[:, 0] + reward
        flags = next_state.terminated, next_state.truncated
        info = {"illegal_action": is_illegal}
        return next_state, observe_seat(next_state), reward, *flags, info

    adapt = functools.partial(envs.suites.from_pgx_seat, game, opponent, params)
    return Plain(adapt, begin, advance)


@functools.cache
def pgx_game(name: str) -> Plain:
    """Returns a `Plain` for all players; `advance` returns a step of one lane."""
    game = pytest.importorskip("pgx").make(name)
    players = np.arange(game.num_players)

    def observe(state):
        player_obs = pgx_obs(state, state.observation)
        obs = jax.tree.map(lambda x: jnp.stack([x] * len(players)), player_obs)
        return {"players": obs}, players == state.current_player

    def begin(key):
        state = game.init(key)
        return state, *observe(state)

    def advance(key, state, action):
        player_action = action["players"][state.current_player]
        next_state = game.step(state, player_action, key)
        no_player = np.zeros(len(players), bool)
        flags = no_player, no_player, next_state.terminated, False
        info = {"illegal_action": ~state.legal_action_mask[player_action]}
        obs, acting = observe(next_state)
        return make_step(next_state, obs, acting, next_state.rewards, flags, info)

    return Plain(functools.partial(envs.suites.from_pgx, game), begin, advance)


def make_step(state, obs, acting, reward, flags, info) -> MultiAgentStep:
    """Returns a step; the first two flags are per agent, the last two per episode."""
    terminated, truncated, episode_terminated, episode_truncated = flags
    return MultiAgentStep(
        state=state,
        obs=obs,
        acting=acting,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        episode_terminated=episode_terminated,
        episode_truncated=episode_truncated,
        info=info,
    )


@functools.cache
def jumanji_team(name: str) -> Plain:
    """Returns a `Plain` for a team; `advance` returns a step of one lane."""
    game = pytest.importorskip("jumanji").make(name)
    (num_agents,) = game.reward_spec.shape

    def observe(observation):
        def split(x):
            return x if x.shape[:1] == (num_agents,) else jnp.stack([x] * num_agents)

        return {"agents": jax.tree.map(split, observation)}

    def begin(key):
        state, timestep = game.reset(key)
        acting = np.ones(num_agents, bool)
        return state.replace(key=()), observe(timestep.observation), acting

    def advance(key, state, action):
        state, timestep = game.step(state.replace(key=key), action["agents"])
        is_terminated, is_last = timestep.discount == 0, timestep.last()
        ends = is_last & is_terminated.all(), is_last & ~is_terminated.all()
        flags = is_terminated, np.zeros(num_agents, bool), *ends
        obs, reward = observe(timestep.observation), timestep.reward
        state = state.replace(key=())
        return make_step(state, obs, ~is_terminated, reward, flags, timestep.extras)

    adapt = functools.partial(envs.suites.from_jumanji, game)
    return Plain(adapt, begin, advance)


@functools.cache
def jaxmarl(name: str, **options: Any) -> Plain:
    """Returns a `Plain` for several agents; `advance` returns a step of one lane."""
    return jaxmarl_style(pytest.importorskip("jaxmarl").make(name, **options))


def jaxmarl_style(suite_env: Any) -> Plain:
    """Returns a `Plain` for an object with the interface of JaxMARL."""
    adapt = functools.partial(envs.suites.from_jaxmarl, suite_env)
    agents, groups = suite_env.agents, adapt().groups

    def stack(values):
        return {
            group: jnp.stack([values[agent] for agent in names])
            for group, names in groups.items()
        }

    def begin(key):
        obs, state = suite_env.reset(key)
        return state, stack(obs), np.ones(len(agents), bool)

    def advance(key, state, action):
        actions = {
            agent: action[group][index]
            for group, names in groups.items()
            for index, agent in enumerate(names)
        }
        # Some environments read actions in the order of the agents.
        actions = {agent: actions[agent] for agent in agents}
        obs, state, reward, dones, info = suite_env.step_env(key, state, actions)
        at_limit = getattr(state, "state", state).step >= suite_env.max_steps
        done = jnp.stack([dones[agent] for agent in agents])
        reward = jnp.stack([reward[agent] for agent in agents])
        all_done = dones["__all__"]
        ends = all_done & ~at_limit, all_done & at_limit
        flags = done & ~at_limit, done & at_limit, *ends
        return make_step(state, stack(obs), ~done, reward, flags, info)

    return Plain(adapt, begin, advance)
