"""Times what recipes do beside environment steps and gradients.

Times an update, then with the same shapes: the steps of its environments alone, the
choices of its policy alone, and its gradient steps alone, optimizer included, always on
the same rows. The overhead is what an update takes beyond steps and gradients; the
policy, which any program has, is a part of it. CPU seconds, medians of runs in turn.

    pip install ".[brax,jaxmarl]" optax
    taskset -c 0 python benchmarks/overhead.py

An update of DQN is a batch with 32 gradient steps, one of SAC is 1,000 steps.
`--only` takes the beginnings of rows.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import recipes
from harness import Program, measure, run
from recipes import Config

import rollout
from rollout import agents, profiling
from rollout.recipes.gradients import differentiate
from rollout.recipes.training import begin

# Without it XLA computes once, before the loop, what rows give without parameters.
fenced = jax.lax.optimization_barrier
UPDATES = 4  # of a training of PPO
BATCHES = 1000  # of one step of SAC


class Parts(NamedTuple):
    """An update and its parts; `num_updates` is how many the first one makes."""

    update: Program
    steps: Program
    policy: Program
    gradients: Program
    num_updates: int = 1


def of_ppo(agent: Any, env: Any, num_seeds: int = 1) -> Parts:
    """The parts of `ppo.py`."""
    config = agent.config
    collector = recipes.make_collector(env, agent)

    def begin(key: jax.Array) -> Any:
        carry_key, init_key = jax.random.split(key)
        carry = collector.init(carry_key)
        learner = agent.init(init_key, carry.obs)
        t = collector.collect_steps(carry, learner[0], config.num_steps)[1]
        return carry, learner, t

    keys = jax.random.split(jax.random.key(0), num_seeds)
    inputs = keys if num_seeds > 1 else keys[0]
    batched = lambda fn: jax.jit(jax.vmap(fn) if num_seeds > 1 else fn)  # noqa: E731
    begun = batched(begin)(inputs)

    def part(of: Callable[[Any], Any]) -> Program:
        def alone(carry: Any, learner: Any, t: Any) -> Any:
            return of(profiling._Given(collector, carry, learner[0], t))

        return functools.partial(batched(alone), *begun)

    return Parts(
        functools.partial(
            batched(lambda key: recipes.ppo.train(agent, collector, key)), inputs
        ),
        part(profiling._env_step),
        part(profiling._policy),
        functools.partial(batched(lambda _, *x: gradients(agent, *x)), *begun),
        config.num_updates,
    )


def gradients(agent: Any, learner: Any, t: Any) -> Any:
    """The gradient steps of an update of PPO, on the first minibatch."""
    config, batch = agent.config, (t, t.reward)
    size = t.reward.size // config.num_minibatches
    if agent.axis is None:
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], batch)
    else:
        rows = jax.tree.map(lambda x: x[:, : size // len(x)], batch)

    def step(learner: Any, _: None) -> Any:
        (params, opt_state), again = fenced((learner, rows))
        grads = agent.gradient(params, *again)[0]
        change, opt_state = agent.optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, change), opt_state), None

    count = config.num_epochs * config.num_minibatches
    return jax.lax.scan(step, learner, length=count)[0]


def ppo(env_id: str, num_envs: int, num_seeds: int = 1, **settings: Any) -> Parts:
    """`ppo.py` with its own settings."""
    config = Config(num_updates=UPDATES, num_envs=num_envs)._replace(**settings)
    env = recipes.make_lanes(env_id, config)
    return of_ppo(recipes.ppo.PPO(env.action_space, config), env, num_seeds)


def recurrent() -> Parts:
    """The page of recurrent PPO."""
    names = recipes.setup("recurrent_ppo", "agent = ")
    config, env = names["config"]._replace(num_updates=UPDATES), names["env"]
    made = names["RecurrentPPO"](
        env.action_space, config, nn.GRUCell(64), names["empty"]
    )
    return of_ppo(made, env)


def ippo() -> Parts:
    """The page of IPPO."""
    names = recipes.setup("ippo", "carry_key, ")
    agent, collector, config = (names[x] for x in ("agent", "collector", "config"))
    carry = collector.init(jax.random.key(0))
    learner = agent.init(jax.random.key(1), carry.obs["agents"])
    params, window = {"all": learner[0]}, rollout.EpisodeWindow.create(200)
    t = collector.collect_steps(carry, params, config.num_steps)[1]
    rows = agents.team_transitions((), t)[1]["agents"]
    given = profiling._Given(collector, carry, params, t)
    return Parts(
        functools.partial(names["update"], carry, learner, window, jax.random.key(2)),
        functools.partial(jax.jit(profiling._env_step), given),
        functools.partial(jax.jit(profiling._policy), given),
        functools.partial(jax.jit(lambda *x: gradients(agent, *x)), learner, rows),
    )


def dqn() -> Parts:
    """`dqn.py` with the settings of its page."""
    names = recipes.setup("dqn", "learn = ")
    agent, collector, config = (names[x] for x in ("agent", "collector", "config"))

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any) -> Any:
        return agent.update(collector, state, jax.random.key(1))[0]

    state = jax.tree.map(jnp.copy, begin(agent, collector, jax.random.key(0)))
    state = train(state)

    def update() -> Any:
        nonlocal state
        state = train(state)
        return state.params

    learner, memory = jax.tree.map(jnp.copy, (state.learner, state.memory))
    options = {"beta": 0.4, "n_step": config.n_step, "gamma": config.gamma}
    rows = agent.buffer.sample(memory, jax.random.key(2), config.batch_size, **options)

    def descend(params: Any, opt_state: Any) -> Any:
        def step(learner: Any, _: None) -> Any:
            learner, (target, batch) = fenced((learner, (params, rows)))
            grads = jax.grad(agent.loss, has_aux=True)(learner[0], target, batch)[0]
            change, opt_state = agent.optimizer.update(grads, learner[1])
            return (optax.apply_updates(learner[0], change), opt_state), None

        return jax.lax.scan(step, (params, opt_state), length=config.num_gradients)[0]

    given = given_of(collector, learner[0], config.num_steps)
    return Parts(
        update,
        functools.partial(jax.jit(profiling._env_step), given),
        functools.partial(jax.jit(profiling._policy), given),
        functools.partial(jax.jit(descend), learner[0], learner[2]),
    )


def sac() -> Parts:
    """`sac.py` with the settings of its page."""
    names = recipes.setup("sac", "learn = ")
    agent, collector = names["agent"], names["collector"]
    agent.config = config = agent.config._replace(num_steps=BATCHES)
    state = begin(agent, collector, jax.random.key(0))
    params, targets, opt_state = state.learner
    keys = jax.random.split(jax.random.key(0), (BATCHES, 3))
    rows = agent.buffer.sample(state.memory, keys[0, 0], config.batch_size).experience

    def descend(params: Any, opt_state: Any) -> Any:
        def step(learner: Any, keys: jax.Array) -> Any:
            (params, opt_state), again = fenced((learner, (targets, rows)))
            inputs = params, params, *again, keys[1:]
            grads, _ = differentiate(agent.loss, *inputs)
            change, opt_state = agent.optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, change), opt_state), None

        return jax.lax.scan(step, (params, opt_state), keys)[0]

    given = given_of(collector, params, BATCHES)
    update = jax.jit(lambda state, key: agent.update(collector, state, key)[0])
    return Parts(
        functools.partial(update, state, jax.random.key(1)),
        functools.partial(jax.jit(profiling._env_step), given),
        functools.partial(jax.jit(profiling._policy), given),
        functools.partial(jax.jit(descend), params, opt_state),
    )


def given_of(collector: Any, params: Any, num_steps: int) -> profiling._Given:
    """Makes the inputs of the timed parts of a collection."""
    carry = collector.init(jax.random.key(0))
    t = collector.collect_steps(carry, params, num_steps)[1]
    return profiling._Given(collector, carry, params, t)


ROBOT = {"num_minibatches": 32, "learning_rate": 1e-3, "entropy_weight": 0.0}
RELU = {"activation": nn.relu, "learning_rate": 5e-3}
RECIPES: dict[str, Callable[[], Parts]] = {
    **{
        f"PPO, {name}, {num_envs:,} lanes": functools.partial(
            ppo, env_id, num_envs, **settings
        )
        for name, env_id, settings in (
            ("CartPole", "CartPole-v1", {}),
            ("Breakout", "Breakout-MinAtar", RELU),
            ("hopper", "brax:hopper", ROBOT),
        )
        for num_envs in (64, 256, 1024)
    },
    "PPO, CartPole, 64 lanes, eight seeds": functools.partial(
        ppo, "CartPole-v1", 64, 8
    ),
    "Recurrent PPO, CartPole, 64 lanes": recurrent,
    "DQN, Breakout, 16 lanes": dqn,
    "SAC, inverted pendulum, 1 lane": sac,
    "IPPO, MPE spread, 16 lanes": ippo,
}


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times every recipe, and its parts."""
    for name, make in RECIPES.items():
        if not any(name.startswith(x) for x in args.only):
            continue
        jax.clear_caches()
        parts = make()
        programs = {x: y for x, y in parts._asdict().items() if callable(y)}
        ms = {x: 1e3 * y.cpu for x, y in measure(programs, args.repeats).items()}
        whole = ms.pop("update") / parts.num_updates
        rest = whole - ms["steps"] - ms["gradients"]
        yield {
            "recipe": name,
            "update, CPU ms": f"{whole:,.4g}",
            **{f"{x} alone": f"{y:,.4g}" for x, y in ms.items()},
            "overhead": f"{rest / whole:.0%}",
            "without the policy": f"{(rest - ms['policy']) / whole:.0%}",
            "repeats": f"{args.repeats}",
        }


if __name__ == "__main__":
    run(__doc__, 9, {"overhead": rows}, only=("",))
