"""Episodes by the own functions of each suite, for all lanes side by side.

Each public function of one agent returns a `Plain`; its state is the suite's own.
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

from rollout import envs
from rollout.envs.multi_agent import MultiAgentStep

LAVA = 14  # `BlockType.LAVA` of Craftax


class Plain(NamedTuple):
    """How episodes of an environment of a suite begin and go on, and its adapter.

    Attributes:
        adapt: `() -> Env`, adapts the suite's object anew.
        begin: `keys -> (state, obs)`.
        advance: `(keys, state, action) -> (state, obs, reward, terminated, truncated,
            info)`, which resets nothing.
    """

    adapt: Callable[[], envs.types.Env]
    begin: Callable[..., Any]
    advance: Callable[..., Any]


def side_by_side(
    adapt: Callable, begin: Callable, advance: Callable, params: Any = (), jit=quick_jit
) -> Plain:
    """Makes both functions of one lane functions of all, with `params` as argument."""
    begin = jit(jax.vmap(begin, (None, 0)))
    advance = jit(jax.vmap(advance, (None, 0, 0, 0)))
    bound = (functools.partial(fn, params) for fn in (begin, advance))
    return Plain(adapt, *bound)


@quick_jit
def choose(flag, new, old):
    """Takes the lanes of `new` where the flag is set, with typed keys too."""

    def pick(x, y):
        return jnp.where(flag.reshape(flag.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)


@functools.cache
def gymnax(name: str, **params: Any) -> Plain:
    def endings(params, state, done):
        return done, state.time >= params.max_steps_in_episode

    return in_style_of_gymnax(envs.make(name, **params), envs.from_gymnax, endings)


@functools.cache
def craftax(name: str, limit: int) -> Plain:
    def endings(params, state, done):
        is_late = state.timestep >= params.max_timesteps
        row, column = state.player_position
        is_dead = (state.player_health <= 0) | (state.map[row, column] == LAVA)
        return is_dead, done & is_late & ~is_dead

    env = envs.make(f"craftax:{name}", max_timesteps=limit)
    return in_style_of_gymnax(env, envs.suites.from_craftax, endings)


def in_style_of_gymnax(env: Any, from_suite: Callable, endings: Callable) -> Plain:
    """Plays the object that an adapter holds."""

    def begin(params, key):
        obs, state = env.env.reset_env(key, params)
        return state, obs

    def advance(params, key, state, action):
        result = env.env.step_env(key, state, action, params)
        obs, state, reward, done, info = result
        return state, obs, reward, *endings(params, state, done), info

    adapt = functools.partial(from_suite, env.env, env.env_params)
    return side_by_side(adapt, begin, advance, env.env_params)


@functools.cache
def navix(name: str) -> Plain:
    grid = pytest.importorskip("navix").make(name, max_steps=20)

    def endings(timestep):
        return timestep.is_termination(), timestep.is_truncation()

    return of_timesteps(grid, (), endings, envs.suites.from_navix)


@functools.cache
def xminigrid(name: str) -> Plain:
    grid, params = pytest.importorskip("xminigrid").make(name, max_steps=20)

    def endings(timestep):
        last, ends = timestep.last(), timestep.discount == 0
        return last & ends, last & ~ends

    return of_timesteps(grid, (params,), endings, envs.suites.from_xminigrid)


def of_timesteps(
    grid: Any, params: tuple, endings: Callable, from_suite: Callable
) -> Plain:
    """Plays grids whose state has the key of the next step."""

    def begin(params, key):
        timestep = grid.reset(*params, key)
        return timestep, timestep.observation

    def advance(params, key, timestep, action):
        # `step` of a time step that is not the last one resets nothing.
        keyed = timestep.replace(state=timestep.state.replace(key=key))
        after = grid.step(*params, keyed, action)
        return after, after.observation, after.reward, *endings(after), {}

    adapt = functools.partial(from_suite, grid, *params)
    return side_by_side(adapt, begin, advance, params)


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
    return side_by_side(adapt, begin, advance)


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
    """That of brax and of MuJoCo Playground."""

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict
    info: dict


class Suite:
    """A suite of physics made up here.

    Adds `model`, remembers the last observation, and writes into its state.
    """

    action_size = 2

    def __init__(self):
        self.model = jnp.float32(2.0)
        self.reward = self.own_reward  # bound to this object

    def own_reward(self):
        return self.model

    def reset(self, rng):
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


@functools.cache
def made_up(name: str) -> Plain:
    del name  # there is one
    adapt = functools.partial(
        envs.suites.physics.adapt, model_field="model", frame_field=None
    )
    return physics(Suite(), "model", adapt)


def physics(suite_env: Any, field: str, from_suite: Callable) -> Plain:
    """The model is an argument: XLA computes constants in another order."""

    def begin(model, key):
        words = jax.random.key_data(key)
        state = call_with_model(suite_env, field, model, "reset", words)
        return state, state.obs

    def advance(model, key, state, action):
        if "rng" in state.info:  # randomness is from counters
            words = jax.random.key_data(key)
            state = state.replace(info={**state.info, "rng": words})
        after = call_with_model(suite_env, field, model, "step", state, action)
        ends = after.done == 1, jnp.bool_(False)
        return after, after.obs, after.reward, *ends, after.metrics

    adapt, model = functools.partial(from_suite, suite_env), getattr(suite_env, field)
    return side_by_side(adapt, begin, advance, model, jit=jax.jit)


def call_with_model(suite_env, field, model, method, *args):
    """Calls a method with another model, as the suites' randomization does."""
    own = getattr(suite_env, field)
    setattr(suite_env, field, model)
    try:
        return getattr(suite_env, method)(*args)
    finally:
        setattr(suite_env, field, own)


def import_quietly(module: str) -> Any:
    """Imports a suite of physics, whose imports warn of deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module)


def draw_evenly(params, obs, key):
    """Draws an allowed action, as the opponent of a seat does by default."""
    del params  # unused
    return jax.random.categorical(key, jnp.log(obs["action_mask"])).astype(jnp.int32)


def first_allowed(params, obs, key):
    """The first allowed action from number `params` on, in a circle."""
    del key  # unused
    mask = jnp.roll(obs["action_mask"], -params)
    return ((jnp.argmax(mask) + params) % mask.size).astype(jnp.int32)


def see_in_pgx(state, observation):
    return {"observation": observation, "action_mask": state.legal_action_mask}


@functools.cache
def pgx_seat(name: str, opponent: Callable | None = None, params: Any = None) -> Plain:
    """The part of player 0, against others who answer one move after the other."""
    game = pytest.importorskip("pgx").make(name)
    split = jax.vmap(jax.random.split, out_axes=1)
    init = quick_jit(jax.vmap(game.init))

    @quick_jit
    @jax.vmap
    def see_own(state):
        return see_in_pgx(state, game._observe(state, jnp.int32(0)))

    @quick_jit
    @jax.vmap
    def move(state, action, key):
        return game.step(state, action, key), ~state.legal_action_mask[action]

    @quick_jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def answer(state, key, number):
        action_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        choose_fn = opponent or draw_evenly
        action = choose_fn(params, see_in_pgx(state, state.observation), action_key)
        return game.step(state, action, step_key)

    def finish_round(state, keys):
        number, reward = 0, np.float32(0.0)
        while True:
            is_over = state.terminated | state.truncated
            waits = ~is_over & (state.current_player != 0)
            if not waits.any():
                return state, reward
            after = answer(state, keys, number)
            reward = reward + np.where(waits, np.asarray(after.rewards)[:, 0], 0)
            state, number = choose(waits, after, state), number + 1

    def begin(keys):
        init_keys, keys = split(keys)
        state, _ = finish_round(init(init_keys), keys)
        return state, see_own(state)

    def advance(keys, state, action):
        step_keys, keys = split(keys)
        moved, is_illegal = move(state, action, step_keys)
        after, reward = finish_round(moved, keys)
        reward = np.asarray(moved.rewards)[:, 0] + reward
        ends, info = (after.terminated, after.truncated), {"illegal_action": is_illegal}
        return after, see_own(after), reward, *ends, info

    adapt = functools.partial(envs.suites.from_pgx_seat, game, opponent, params)
    return Plain(adapt, begin, advance)


@functools.cache
def pgx_game(name: str) -> Plain:
    """All players of a game; `advance` is of one lane and returns a whole step."""
    game = pytest.importorskip("pgx").make(name)
    players = np.arange(game.num_players)

    def see(state):
        seen = see_in_pgx(state, state.observation)
        obs = jax.tree.map(lambda x: jnp.stack([x] * len(players)), seen)
        return {"players": obs}, players == state.current_player

    def begin(key):
        state = game.init(key)
        return state, *see(state)

    def advance(key, state, action):
        chosen = action["players"][state.current_player]
        after = game.step(state, chosen, key)
        nobody = np.zeros(len(players), bool)
        flags = nobody, nobody, after.terminated, False
        info = {"illegal_action": ~state.legal_action_mask[chosen]}
        return whole_step(after, *see(after), after.rewards, flags, info)

    return Plain(functools.partial(envs.suites.from_pgx, game), begin, advance)


def whole_step(state, obs, acting, reward, flags, info) -> MultiAgentStep:
    """Makes a step; the flags are those of each agent, and then of the episode."""
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
    """A team; `advance` is of one lane and returns a whole step."""
    game = pytest.importorskip("jumanji").make(name)
    (num_agents,) = game.reward_spec.shape

    def see(observation):
        def split(x):
            return x if x.shape[:1] == (num_agents,) else jnp.stack([x] * num_agents)

        return {"agents": jax.tree.map(split, observation)}

    def begin(key):
        state, timestep = game.reset(key)
        acting = np.ones(num_agents, bool)
        return state.replace(key=()), see(timestep.observation), acting

    def advance(key, state, action):
        state, timestep = game.step(state.replace(key=key), action["agents"])
        is_out, last = timestep.discount == 0, timestep.last()
        ends = last & is_out.all(), last & ~is_out.all()
        flags = is_out, np.zeros(num_agents, bool), *ends
        obs, reward = see(timestep.observation), timestep.reward
        state = state.replace(key=())
        return whole_step(state, obs, ~is_out, reward, flags, timestep.extras)

    adapt = functools.partial(envs.suites.from_jumanji, game)
    return Plain(adapt, begin, advance)


@functools.cache
def jaxmarl(name: str, **options: Any) -> Plain:
    """Agents of JaxMARL; `advance` is of one lane and returns a whole step."""
    return agents_of(pytest.importorskip("jaxmarl").make(name, **options))


def agents_of(suite_env: Any) -> Plain:
    """Those of an object in the style of JaxMARL."""
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
            agent: action[group][place]
            for group, names in groups.items()
            for place, agent in enumerate(names)
        }
        # Some environments read actions in the order of the agents.
        actions = {agent: actions[agent] for agent in agents}
        obs, state, reward, dones, info = suite_env.step_env(key, state, actions)
        is_late = getattr(state, "state", state).step >= suite_env.max_steps
        done = jnp.stack([dones[agent] for agent in agents])
        over, reward = dones["__all__"], jnp.stack([reward[agent] for agent in agents])
        flags = done & ~is_late, done & is_late, over & ~is_late, over & is_late
        return whole_step(state, stack(obs), ~done, reward, flags, info)

    return Plain(adapt, begin, advance)
