"""Times the overhead of recipes relative to environment steps and gradients.

Times a complete update and, with the same shapes, three parts in isolation: environment
steps, calls of the policy, and gradient steps with the optimizer on a fixed minibatch.
The overhead is the time of an update minus environment steps and gradient steps; it
includes the policy, which every program calls. Reports medians of interleaved runs, in
CPU seconds.

    pip install ".[brax,jaxmarl]" optax
    taskset -c 0 python benchmarks/overhead.py

An update of DQN is a batch with 32 gradient steps; an update of SAC is 1,000 steps.
`--only` takes prefixes of row names.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import recipes
from harness import Program, measure, run

import rollout
from rollout import agents, envs, profiling
from rollout.minibatches import mean_gradient
from rollout.normalization import split_obs_stats
from rollout.recipes import dqn, ppo, recurrent_ppo, sac

# The barrier keeps XLA from hoisting computations on the fixed rows out of the loop.
barrier = jax.lax.optimization_barrier
UPDATES = 4  # updates per training run of PPO
BATCHES = 1000  # steps and batches per update of SAC


class Programs(NamedTuple):
    """An update and its parts; a call of `update` runs `num_updates` updates."""

    update: Program
    steps: Program
    policy: Program
    gradients: Program
    num_updates: int = 1


def parts_of(agent: Any, num_seeds: int = 1) -> Programs:
    """Creates the parts of PPO or recurrent PPO."""
    config = agent.config

    def collect(key: jax.Array) -> Any:
        state = agent.init(key)
        inputs = state.carry, state.params, config.num_steps
        return state, agent.collector.collect_steps(*inputs)[1]

    keys = jax.random.split(jax.random.key(0), num_seeds)
    inputs = keys if num_seeds > 1 else keys[0]
    batched = lambda fn: jax.jit(jax.vmap(fn) if num_seeds > 1 else fn)  # noqa: E731
    state, trajectory = batched(collect)(inputs)

    def part(fn: Callable[[Any], Any]) -> Program:
        def run_part(state: Any, trajectory: Any) -> Any:
            inputs = agent.collector, state.carry, state.params, trajectory
            return fn(profiling._Inputs(*inputs))

        return functools.partial(batched(run_part), state, trajectory)

    def descend(state: Any, trajectory: Any) -> Any:
        return gradients(agent, state, minibatch_of(agent, state.carry, trajectory))

    return Programs(
        functools.partial(batched(lambda key: agent.train(agent.init(key))), inputs),
        part(profiling._env_step),
        part(profiling._policy),
        functools.partial(batched(descend), state, trajectory),
        config.num_updates,
    )


def minibatch_of(agent: Any, carry: rollout.Carry, t: rollout.Transition) -> Any:
    """Creates a minibatch of PPO from the first rows of a trajectory."""
    num_minibatches = agent.config.num_minibatches
    rows = {
        "obs": t.obs,
        "advantage": t.reward,
        "target": t.reward,
        "weight": t.mask.astype(jnp.float32),
        "acting": t.mask.astype(jnp.float32),
        **{name: t.extras[name] for name in ("raw_action", "log_prob", "value")},
    }
    if isinstance(agent, recurrent_ppo.RecurrentPPO):
        rows["first"] = t.first
        rows["initial_memory"] = jax.tree.map(lambda x: x[None], carry.policy_state)
        size = t.reward.shape[1] // num_minibatches
        rows = jax.tree.map(lambda x: x[:, :size], rows)
        return recurrent_ppo.Row(**rows)
    size = t.reward.size // num_minibatches
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], rows)
    return ppo.Row(**rows)


def gradients(agent: Any, state: Any, batch: Any) -> Any:
    """Takes the gradient steps of an update of PPO, all on the same minibatch."""

    def step(learner: Any, _: None) -> Any:
        return agent.minibatch_step(*barrier((learner, batch)))[0], None

    count = agent.config.num_epochs * agent.config.num_minibatches
    params, _ = split_obs_stats(state.params)
    learner = params, state.opt_state, jnp.bool_(False)
    return jax.lax.scan(step, learner, length=count)[0]


def of_ppo(env_id: str, num_envs: int, num_seeds: int = 1, **settings: Any) -> Programs:
    """Creates the parts of `ppo.py` with its default settings."""
    config = recipes.PPOSettings(num_updates=UPDATES, num_envs=num_envs)
    config = config.replace(**settings)
    return parts_of(ppo.PPO(recipes.make_lanes(env_id, config), config), num_seeds)


def of_recurrent_ppo() -> Programs:
    """Creates the parts of `recurrent_ppo.py` with the settings of its page."""
    config = recurrent_ppo.Config(num_updates=UPDATES, num_steps=64, num_minibatches=4)
    env = envs.TransformObs(envs.make("CartPole-v1"), lambda obs: obs[::2])
    env = envs.NormalizeReward(envs.vectorize(env, 64), gamma=config.gamma)
    return parts_of(recurrent_ppo.RecurrentPPO(env, config))


def of_ippo() -> Programs:
    """Creates the parts of the IPPO recipe page."""
    names = recipes.setup("ippo", "carry_key, ")
    agent, collector, config = (names[x] for x in ("agent", "collector", "config"))
    carry = collector.init(jax.random.key(0))
    obs = names["transform_obs"](carry.obs["agents"])
    state = agent.init_learner(jax.random.key(1), obs)
    state = state.replace(carry=carry, key=jax.random.key(2))
    params, window = {"all": state.params}, rollout.EpisodeWindow.init(200)
    t = collector.collect_steps(carry, params, config.num_steps)[1]
    rows = agents.team_transitions((), t)[1]["agents"]
    inputs = profiling._Inputs(collector, carry, params, t)
    descend = jax.jit(
        lambda state, rows: gradients(agent, state, minibatch_of(agent, carry, rows))
    )
    return Programs(
        functools.partial(names["update"], state, window),
        functools.partial(jax.jit(profiling._env_step), inputs),
        functools.partial(jax.jit(profiling._policy), inputs),
        functools.partial(descend, state, rows),
    )


def of_dqn() -> Programs:
    """Creates the parts of `dqn.py` with the settings of its page."""
    env = envs.TransformObs(
        envs.make("Breakout-MinAtar"), lambda obs: jnp.ravel(obs > 0)
    )
    agent = dqn.DQN(envs.vectorize(env, 16), dqn.Config(num_updates=2000))
    config = agent.config
    train = jax.jit(lambda state: agent.update(state)[0], donate_argnums=0)
    state = train(agent.init(jax.random.key(0)))

    def update() -> Any:
        nonlocal state
        state = train(state)
        return state.params

    sample = agent.buffer.sample(
        state.buffer_state,
        jax.random.key(2),
        config.batch_size,
        beta=config.beta,
    )

    def descend(params: Any, opt_state: Any, sample: Any) -> Any:
        def step(learner: Any, _: None) -> Any:
            learner, (target_params, rows) = barrier((learner, (params, sample)))
            batch = dqn.Row(
                obs=rows.experience.obs,
                action=rows.experience.action,
                target=agent.td_target(learner[0], target_params, rows),
                weight=rows.weights,
            )
            grads = jax.grad(agent.mean_loss, has_aux=True)(learner[0], batch)[0]
            return apply(agent.make_optimizer(), learner, grads), None

        learner = params, opt_state
        return jax.lax.scan(step, learner, length=config.gradient_steps)[0]

    learner = jax.tree.map(jnp.copy, (state.params, state.opt_state))
    inputs = inputs_of(agent, learner[0], config.num_steps)
    return Programs(
        update,
        functools.partial(jax.jit(profiling._env_step), inputs),
        functools.partial(jax.jit(profiling._policy), inputs),
        functools.partial(jax.jit(descend), *learner, sample),
    )


def apply(optimizer: optax.GradientTransformation, learner: Any, grads: Any) -> Any:
    """Applies gradients to `(params, opt_state)`."""
    params, opt_state = learner
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def of_sac() -> Programs:
    """Creates the parts of `sac.py` with the settings of its page."""
    env = envs.make("brax:inverted_pendulum", backend="positional")
    agent = sac.SAC(envs.vectorize(env, 1), sac.Config(num_steps=BATCHES))
    state = agent.init(jax.random.key(0))
    sample = agent.buffer.sample(
        state.buffer_state, jax.random.key(1), agent.config.batch_size
    )

    def descend(state: Any, rows: Any, weight: jax.Array) -> Any:
        def step(learner: Any, key: jax.Array) -> Any:
            learner, experience = barrier((learner, rows))
            target_key, noise_key = jax.random.split(key)
            action = agent.distribution.normalize(experience.action)
            batch = sac.Row(
                obs=experience.obs,
                action=action,
                target=agent.target(
                    learner[0], state.target_params, experience, target_key
                ),
                noise=jax.random.normal(noise_key, action.shape),
            )
            grads = mean_gradient(agent.loss, learner[0], batch, weight)[0]
            return apply(agent.make_optimizer(), learner, grads), None

        keys = jax.random.split(state.key, BATCHES)
        return jax.lax.scan(step, (state.params, state.opt_state), keys)[0]

    inputs = inputs_of(agent, state.params, BATCHES)
    return Programs(
        functools.partial(jax.jit(lambda state: agent.update(state)[0]), state),
        functools.partial(jax.jit(profiling._env_step), inputs),
        functools.partial(jax.jit(profiling._policy), inputs),
        functools.partial(jax.jit(descend), state, sample.experience, sample.weights),
    )


def inputs_of(agent: Any, params: Any, num_steps: int) -> profiling._Inputs:
    """Creates the inputs of the timed parts of a collection."""
    carry = agent.collector.init(jax.random.key(0))
    trajectory = agent.collector.collect_steps(carry, params, num_steps)[1]
    return profiling._Inputs(agent.collector, carry, params, trajectory)


ROBOT = {
    "num_minibatches": 32,
    "learning_rate": 1e-3,
    "ent_coef": 0.0,
    "normalize_observations": True,
}
RELU = {"activation": "relu", "learning_rate": 5e-3}
RECIPES: dict[str, Callable[[], Programs]] = {
    **{
        f"PPO, {name}, {num_envs:,} lanes": functools.partial(
            of_ppo, env_id, num_envs, **settings
        )
        for name, env_id, settings in (
            ("CartPole", "CartPole-v1", {}),
            ("Breakout", "Breakout-MinAtar", RELU),
            ("hopper", "brax:hopper", ROBOT),
        )
        for num_envs in (64, 256, 1024)
    },
    "PPO, CartPole, 64 lanes, eight seeds": functools.partial(
        of_ppo, "CartPole-v1", 64, 8
    ),
    "Recurrent PPO, CartPole, 64 lanes": of_recurrent_ppo,
    "DQN, Breakout, 16 lanes": of_dqn,
    "SAC, inverted pendulum, 1 lane": of_sac,
    "IPPO, MPE spread, 16 lanes": of_ippo,
}


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times every recipe and its parts."""
    for name, make in RECIPES.items():
        if not any(name.startswith(x) for x in args.only):
            continue
        jax.clear_caches()
        parts = make()
        programs = {x: y for x, y in parts._asdict().items() if callable(y)}
        ms = {x: 1e3 * y.cpu for x, y in measure(programs, args.repeats).items()}
        total = ms.pop("update") / parts.num_updates
        rest = total - ms["steps"] - ms["gradients"]
        yield {
            "recipe": name,
            "update, CPU ms": f"{total:,.4g}",
            **{f"{x} alone": f"{y:,.4g}" for x, y in ms.items()},
            "overhead": f"{rest / total:.0%}",
            "without the policy": f"{(rest - ms['policy']) / total:.0%}",
            "repeats": f"{args.repeats}",
        }


if __name__ == "__main__":
    run(__doc__, 9, {"overhead": rows}, only=("",))
