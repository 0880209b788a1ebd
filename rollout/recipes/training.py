"""Trains an agent of this package: the loop, its environments and the command.

The command trains some updates at a time, in JAX as one program. Then it prints a line
and writes the table `agent.csv` and the folder `agent.checkpoint`, from which
`--resume` goes on, in JAX to the bit.
"""

import argparse
import functools
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.stats

import rollout
from rollout import checks, envs
from rollout.envs.wrappers import flatten_obs

NUM_EPISODES = 100  # of an evaluation
CHECKPOINT, TABLE = Path("agent.checkpoint"), Path("agent.csv")


class State(NamedTuple):
    """Everything that a training goes on from; a pytree for `rollout.checkpoint`."""

    learner: Any  # parameters first, state of the optimizer last
    carry: Any
    window: Any  # of the last 100 episodes
    number: Any  # of updates so far
    memory: Any = ()  # of a replay buffer

    @property
    def params(self):
        return self.learner[0]


def train(agent, collector, key, state=None, num_updates=None):
    """Trains, in JAX inside `jit` or outside, on the host outside.

    Args:
        agent: has `config`, `init` and `update`, as those of this package do.
        collector: a `Collector` or a `HostCollector` of its policy.
        key: of the whole training.
        state: of an earlier call with the same key, to go on from, which on the host is
            used up; None to begin.
        num_updates: by default those that are left of `config.num_updates`; to go on
            inside `jit`, where nobody knows how many are, a number.

    Returns:
        The last `State`, and a log, `[num_updates]` by name.

    Raises:
        ValueError: if fewer are left, which inside `jit` nobody knows: there, choose
            parts that divide `config.num_updates`.
    """
    left = agent.config.num_updates
    if state is None:
        state = begin(agent, collector, jax.random.clone(key))
    elif checks.is_known(state.number):
        left -= int(state.number)
    elif num_updates is None:
        raise ValueError("`num_updates` must be given with a `state` in `jit`.")
    size = left if num_updates is None else num_updates
    if not 0 < size <= left:
        what = f"`num_updates` must be from 1 to {left}, what is left of `config`'s"
        raise ValueError(f"{what} {agent.config.num_updates}, got {num_updates}.")
    *_, key = jax.random.split(key, 3)
    keys = jax.random.split(key, agent.config.num_updates)
    keys = jax.lax.dynamic_slice_in_dim(keys, state.number, size)
    return scan(collector, functools.partial(agent.update, collector), state, keys)


def begin(agent, collector, key):
    """Returns the state with which `train` begins."""
    carry_key, init_key, _ = jax.random.split(key, 3)
    carry, memory = collector.init(carry_key), ()
    learner = agent.init(init_key, carry.obs)
    window = rollout.EpisodeWindow.create(100)
    if hasattr(agent, "buffer"):
        carry, t = collector.collect_steps(carry, learner[0], agent.config.warmup)
        memory = agent.buffer.init(jax.tree.map(lambda x: x[0], t))
        memory, window = agent.buffer.add(memory, t), window.add(t)
    return State(learner, carry, window, jnp.int32(0), memory)


def scan(collector, step, state, keys):
    """Scans in JAX, and loops in Python over environments of the host."""
    if not collector.is_host:
        return jax.lax.scan(step, state, keys)
    logs = []
    for key in keys:
        state, log = step(state, key)
        logs.append(log)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *logs)


def dense(config, num_outputs, see):
    """Returns dense layers for what `see` makes of the inputs, one array."""
    layers = [see]
    for _ in range(2):
        layers += [nn.Dense(config.hidden), config.activation]
    return nn.Sequential([*layers, nn.Dense(num_outputs)])


def flat(observation_space):
    """Returns what flattens observations of a space; of None, those that are flat."""
    if observation_space is None:
        return flat_already
    return functools.partial(flatten_obs, observation_space)


def flat_already(obs):
    if isinstance(obs, dict) and obs.keys() == {"obs", "action_mask"}:
        obs = obs["obs"]  # as `FlattenObs` and a memory show it
    if not hasattr(obs, "dtype"):
        raise ValueError(
            "`observation_space` must be given where observations are no vectors, got "
            f"{jax.tree.structure(obs)}."
        )
    return jnp.float32(obs)


def make_env(env_id, num_envs, gamma=None):
    """Makes environments, normalised or not.

    Args:
        env_id: of any suite, such as `"brax:hopper"`, or `gymnasium:` and an id.
        num_envs: environments side by side.
        gamma: the discount, to normalise observations and rewards; None to leave them.
    """
    suite, _, name = env_id.partition(":")
    if ".py:" in env_id:
        what = "`train` takes an environment of one's own"
        raise ValueError(f"`env_id` must be an id, got a file: {env_id}; {what}.")
    if suite == "gymnasium":
        import gymnasium

        make = functools.partial(gymnasium.make, name, render_mode="rgb_array")
        info = make().reset(seed=0)[1]
        masks = {x: info[x] for x in ("action_mask",) if x in info} or None
        env: Any = envs.from_gymnasium(make, num_envs, observe_info=masks)
        return env if gamma is None else envs.NormalizeHost(env, gamma=gamma)
    env = envs.make(env_id)
    if hasattr(env, "agents"):
        raise ValueError(f"`env_id` must be of one agent, got {env_id} with several.")
    env = envs.vectorize(env, num_envs)
    if gamma is None:
        return env
    return envs.NormalizeReward(envs.NormalizeObs(env), gamma=gamma)


def interval(values):
    """Returns means over seeds, and the ends of their 95 % interval by Student's t."""
    mean, num = np.mean(values, axis=0), len(values)
    half = scipy.stats.t.ppf(0.975, num - 1) * np.std(values, axis=0, ddof=1)
    return mean, mean - half / math.sqrt(num), mean + half / math.sqrt(num)


def read_options(config, description):
    """Reads the command line, where every number of the configuration is an option."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("env_id", help="such as CartPole-v1 or gymnasium:CartPole-v1")
    numbers = {x: y for x, y in config._asdict().items() if type(y) in (int, float)}
    for name, y in numbers.items():
        flag, text = "--" + name.replace("_", "-"), f"default: {y}"
        flags = ["--updates", flag] if name == "num_updates" else [flag]
        parser.add_argument(*flags, dest=name, type=type(y), default=y, help=text)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--normalize", action="store_true", help="obs and rewards")
    parser.add_argument("--resume", action="store_true", help=f"from {CHECKPOINT}")
    options = parser.parse_args()
    return options, config._replace(**{x: getattr(options, x) for x in numbers})


def train_each(agent, collectors, keys, states, size):
    """Trains each seed for some updates, in JAX all together."""
    if len(keys) == 1 or collectors[0].is_host:
        each = zip(collectors, keys, states, strict=True)
        return [train(agent, *x, size) for x in each]
    states = jax.tree.map(lambda *x: jnp.stack(x), *states)
    one = lambda key, state: train(agent, collectors[0], key, state, size)  # noqa: E731
    results = jax.vmap(one)(jnp.stack(keys), states)
    return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(len(keys))]


def saved(collectors, states):
    """Returns what is saved: environments of the host, too, if they have `save_state`.

    Otherwise their unfinished episodes begin anew.
    """
    pairs = zip(collectors, states, strict=True)
    return states, [x.save(y.carry) for x, y in pairs if x.is_host]


def restored(collectors, states, seeds):
    """Returns the states of the last checkpoint, and cuts the table there."""
    lines = TABLE.read_text().splitlines(keepends=True) if CHECKPOINT.exists() else []
    known = sorted({int(line.partition(",")[0]) for line in lines[1:]})
    if lines and known != list(seeds):
        what = f"`--seed` and `--seeds` must be those of {TABLE}"
        raise ValueError(f"{what}, {known}, got {list(seeds)}.")
    states, hosts = rollout.checkpoint.restore(CHECKPOINT, saved(collectors, states))
    for i, host in enumerate(hosts):
        carry = collectors[i].restore(states[i].carry, host)
        states[i] = states[i]._replace(carry=carry)
    lines = lines[: 1 + len(states) * int(states[0].number)]
    os.truncate(TABLE, len("".join(lines)))
    return states


def run(make_agent, config, columns):
    """Trains as the command line says; draws the curve and an episode.

    Args:
        make_agent: `(action_space, config, observation_space)` to an agent for `train`,
            whose `final_policy` is evaluated.
        config: what is trained without options.
        columns: names of the log that the table has.

    Returns:
        The last state of each seed.
    """
    description = (make_agent.__doc__ or "").partition("\n")[0]
    options, config = read_options(config, description)
    gamma = config.gamma if options.normalize else None
    seeds = range(options.seed, options.seed + options.seeds)
    lanes = [make_env(options.env_id, config.num_envs, gamma) for _ in seeds]
    agent = make_agent(lanes[0].action_space, config, lanes[0].observation_space)
    is_jax = hasattr(lanes[0], "reset_done")
    kind: Any = rollout.Collector if is_jax else rollout.HostCollector
    collectors = [kind(env=env, policy=agent.policy) for env in lanes]
    keys = [jax.random.key(seed) for seed in seeds]
    start = jax.jit(begin, static_argnums=0) if is_jax else begin  # one program, or 150
    states = [start(agent, *x) for x in zip(collectors, keys, strict=True)]
    names = ["steps", "return", *columns]
    if options.resume:
        states = restored(collectors, states, seeds)
    else:
        TABLE.write_text(",".join(["seed", *names]) + "\n")
    some = jax.jit(train_each, static_argnums=(0, 4)) if is_jax else train_each
    while (left := config.num_updates - int(states[0].number)) > 0:
        size = min(left, -(-config.num_updates // 20))
        results = some(agent, collectors, keys, states, size)
        states, logs = map(list, zip(*results, strict=True))
        logs = np.array([[log[name] for name in names] for log in logs])
        rows = np.insert(logs, 0, np.c_[seeds], axis=1)
        rows = rows.transpose(2, 0, 1).reshape(-1, 1 + len(names))
        with TABLE.open("a") as file:  # update by update, and in each seed by seed
            np.savetxt(file, rows, fmt="%.10g", delimiter=",")
        rollout.checkpoint.save(CHECKPOINT, saved(collectors, states))
        steps, mean, *_ = logs[..., -1].mean(axis=0)
        print(f"{steps:>12,.0f} steps, return {mean:.6g}", flush=True)
    inputs, returns = [], []
    for collector, key, state in zip(collectors, keys, states, strict=True):
        judge = collector.freeze(state.carry).replace(policy=agent.final_policy)
        inputs.append((judge, key, state.params))
        stats = rollout.evaluate(judge, key, state.params, num_episodes=NUM_EPISODES)
        print(stats)
        returns.append(float(stats.returns.mean))
    if len(returns) > 1:
        mean, low, high = interval(returns)
        each = f"{len(returns)} seeds with {NUM_EPISODES} episodes each"
        print(f"return {mean:.6g} (95 %: {low:.6g} to {high:.6g}), {each}")
    draw_curve(len(returns))
    try:
        judge, key, params = inputs[0]
        rollout.record_gif(judge, key, params, "agent.gif", max_episode_steps=200)
    except Exception as error:  # an environment may have no drawing
        print(f"no GIF: {error}")
    return states


def draw_curve(num_seeds):
    """Draws the mean over seeds, and its interval."""
    table = np.loadtxt(TABLE, delimiter=",", skiprows=1, ndmin=2)
    _, steps, returns, *_ = table.reshape(-1, num_seeds, table.shape[1]).T
    if num_seeds > 1:
        _, low, high = interval(returns)
        plt.fill_between(steps[0], low, high, alpha=0.2)
    plt.plot(steps[0], returns.mean(axis=0))
    plt.gca().set(xlabel="environment steps", ylabel="mean return, last 100 episodes")
    plt.savefig("agent.png")
