"""PPO of this library and of brax in a task of Playground, with Playground's settings.

Trains seeds of `CartpoleBalance` with `rollout.recipes.ppo`, and with brax's trainer
as Playground's `train-jax-ppo` does. Then evaluates both in 100 episodes with actions
sampled as in training. `FACTOR` divides the numbers of environments and of unrolls per
minibatch, so that one core suffices.

    pip install -e ".[playground,train]"
    taskset -c 0 python benchmarks/playground_ppo.py docs/playground_ppo.json

Runs in the file are only repeated with `--repeat`. Then `tables.py` writes the table of
the page about brax. Seconds are CPU seconds without compilation. brax compiles its
epoch twice, so the seconds of a run are the median epoch times the number of epochs,
and all other CPU time is compilation and initialization.

The programs have equal networks, and equal settings except for these details:

- brax computes advantages from unrolls of 30 steps in every gradient step. This
  library computes advantages once per update, from all 480 steps of an environment.
- The entropy in brax refers to the squashed action. Here it refers to the raw action.
- brax resets all environments after every update, and a finished environment to its
  cached first state. Here every episode runs to its end and samples a new first state.
- brax masks out truncated steps. This library bootstraps at these steps.
- This library clips normalized observations to 10. Adam's ε is 1e-5 here and 1e-8 in
  brax.
"""

import argparse
import functools
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from harness import complete

import rollout
from rollout import envs
from rollout.recipes.ppo import PPO, Config

TASK = "CartpoleBalance"
FACTOR = 64
NUM_UPDATES = 32
NUM_EPISODES = 100


class BraxNetwork(nn.Module):
    """The default networks of brax: standard deviations depend on the observation."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps observations, `[..., n]`, to means and log-stds, and to values."""

        def mlp(x: jax.Array, sizes: tuple[int, ...], num_outputs: int) -> jax.Array:
            dense = functools.partial(
                nn.Dense, kernel_init=nn.initializers.lecun_uniform()
            )
            for size in sizes:
                x = nn.swish(dense(size)(x))
            return dense(num_outputs)(x)

        mean, scale = jnp.split(mlp(obs, (32,) * 4, 2 * self.num_actions), 2, axis=-1)
        log_std = jnp.log(nn.softplus(scale) + 0.001)
        value = mlp(obs, (256,) * 5, 1)[..., 0]
        return jnp.concatenate([mean, log_std], axis=-1), value


def load_settings() -> dict[str, Any]:
    """Returns Playground's settings for brax's trainer, divided by `FACTOR`."""
    from mujoco_playground.config import dm_control_suite_params

    settings = dict(dm_control_suite_params.brax_ppo_config(TASK))
    settings["num_envs"] //= FACTOR
    settings["batch_size"] //= FACTOR
    num_steps = settings["batch_size"] * settings["num_minibatches"]
    settings["num_timesteps"] = NUM_UPDATES * num_steps * settings["unroll_length"]
    # As with Playground's numbers, every epoch is one update, followed by a reset.
    return settings | {"num_evals": NUM_UPDATES + 1, "num_resets_per_eval": 1}


def make_agent(settings: dict[str, Any]) -> PPO:
    """Creates an agent of this library with the settings of brax's trainer."""
    unrolls = settings["batch_size"] * settings["num_minibatches"]
    config = Config(
        num_updates=NUM_UPDATES,
        num_steps=unrolls // settings["num_envs"] * settings["unroll_length"],
        num_epochs=settings["num_updates_per_batch"],
        num_minibatches=settings["num_minibatches"],
        learning_rate=settings["learning_rate"],
        anneal_lr=False,
        gamma=settings["discounting"],
        clip_eps=0.3,
        ent_coef=settings["entropy_cost"],
        max_grad_norm=float("inf"),
        normalize_observations=settings["normalize_observations"],
    )
    env = envs.RescaleAction(envs.make(f"playground:{TASK}"), bound="tanh")
    scale = settings["reward_scaling"]
    env = envs.TransformReward(env, lambda reward: scale * reward)
    env = envs.vectorize(env, settings["num_envs"])
    network = BraxNetwork(env.action_space.shape[0])
    return PPO(env, config, network=network)


def run(seed: int, programs: dict[str, Any]) -> dict[str, Any]:
    """Trains and evaluates one seed of this library's PPO."""
    if not programs:
        agent, start = make_agent(load_settings()), time.process_time()
        train = jax.jit(lambda key: agent.train(agent.init(key)))
        programs["train"] = train.lower(jax.random.key(0)).compile()
        programs |= {"agent": agent, "compile": time.process_time() - start}
    agent, start = programs["agent"], time.process_time()
    state, _ = jax.block_until_ready(programs["train"](jax.random.key(seed)))
    seconds = time.process_time() - start

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.tanh(agent.policy.apply(params, obs, (), key).action)

    return {
        "return": evaluate(act, state.params, seed),
        "steps": agent.env_steps(NUM_UPDATES),
        "seconds": seconds,
        "compile": programs["compile"],
    }


def run_brax(seed: int) -> dict[str, Any]:
    """Trains and evaluates one seed of brax's PPO."""
    from brax.training.agents.ppo import train as brax_ppo
    from mujoco_playground import registry, wrapper

    # brax 0.14 calls a function that jax 0.10 has removed; this one is for one device.
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(
        lambda x: jnp.stack([x] * len(devices)), tree
    )
    settings = load_settings()
    times: list[float] = []
    start = time.process_time()
    make_policy, params, _ = brax_ppo.train(
        registry.load(TASK, config_overrides={"impl": "jax"}),
        **settings,
        seed=seed,
        run_evals=False,
        wrap_env_fn=wrapper.wrap_for_brax_training,
        policy_params_fn=lambda *_: times.append(time.process_time()),
    )
    total = time.process_time() - start
    epochs = [end - begin for begin, end in itertools.pairwise(times)]
    seconds = len(epochs) * statistics.median(epochs)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return make_policy(params)(obs, key)[0]

    return {
        "return": evaluate(act, params, seed),
        "steps": settings["num_timesteps"],
        "seconds": seconds,
        "compile": total - seconds,
    }


def evaluate(act: Any, params: Any, seed: int) -> float:
    """Returns the mean return of 100 episodes, with sampled actions in [-1, 1]."""
    env = envs.make_vec(f"playground:{TASK}", NUM_EPISODES)
    collector = rollout.Collector(env=env, policy=rollout.stateless_policy(act))
    key = jax.random.key(1000 + seed)
    stats = rollout.evaluate(collector, params, key, NUM_EPISODES)
    print(f"seed {seed}: {stats}", flush=True)
    return float(stats.returns.mean)


def main() -> None:
    """Runs all seeds for which the file has no values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeat", action="store_true", help="also runs in the file")
    parser.add_argument("--makers", nargs="+", default=["ours", "brax"])
    args = parser.parse_args()
    makers = {"ours": functools.partial(run, programs={}), "brax": run_brax}
    runs = [
        ((TASK, maker, str(seed)), functools.partial(makers[maker], seed))
        for maker in args.makers
        for seed in range(args.seeds)
    ]
    complete(args.file, runs, args.repeat)


if __name__ == "__main__":
    main()
