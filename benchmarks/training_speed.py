"""How fast are complete training runs, and how slow is a convolution on a CPU?

Runs recipes and the scripts of PureJaxRL with the same settings, from a key to all
outputs, in interleaved runs. Reports CPU and wall time per update, and CPU time to
trace, lower and compile; ratios are ratios of medians.

Also times one layer and its gradient on a batch of MinAtar images: `nn.Conv`, the same
convolution as a matrix product over patches, and a dense layer as wide as the MLP.

    pip install ".[brax]" distrax flashbax optax
    git clone https://github.com/luchris429/purejaxrl
    taskset -c 0 python benchmarks/training_speed.py --purejaxrl purejaxrl/purejaxrl

`--only` takes prefixes of row names. `learning_compared.py` explains `taskset`.
"""

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import purejaxrl
import recipes
from harness import Program, measure, run
from recipes import PUREJAXRL, DQNSettings, PPOSettings, make_env

from rollout import envs
from rollout.recipes import recurrent_ppo

STEPS = 20
SIZES = {  # number of CartPole lanes: number of updates
    4: 50,
    64: 10,
    256: 4,
    1024: 2,
}
Train = Callable[[jax.Array], Any]


class Training(NamedTuple):
    """A recipe and a script of PureJaxRL with the same settings.

    Attributes:
        name: name of the row, for example `"PPO, CartPole, 64 lanes"`.
        script: name of the script without `.py`.
        env_id: id of the environment.
        config: settings of both programs.
        ours: creates the training function of the recipe from the settings.
        seeds: numbers of seeds to train at once.
    """

    name: str
    script: str
    env_id: str
    config: PPOSettings | DQNSettings
    ours: Callable[[Any], Train]
    seeds: tuple[int, ...] = (1,)


class RecurrentNetwork(nn.Module):
    """The network of PureJaxRL's `ppo_rnn.py`."""

    num_actions: int

    def setup(self) -> None:
        """Creates the layers."""
        self.embedding, self.cell = nn.Dense(128), nn.GRUCell(128)
        self.actor, self.critic = (
            nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(size)])
            for size in (self.num_actions, 1)
        )

    @nn.nowrap
    def initialize_memory(self, num_envs: int) -> jax.Array:
        """Returns the memory at the start of an episode."""
        return jnp.zeros((num_envs, 128))

    def encode(self, memory: jax.Array, obs: jax.Array) -> Any:
        """Maps memory and observations to memory and features."""
        return self.cell(memory, nn.relu(self.embedding(obs)))

    def heads(self, features: jax.Array) -> Any:
        """Maps features to logits and values."""
        return self.actor(features), self.critic(features)[..., 0]

    def __call__(self, memory: jax.Array, obs: jax.Array) -> Any:
        """Maps memory and observations to memory, and to logits and values."""
        memory, features = self.encode(memory, obs)
        return memory, self.heads(features)


class Patches(nn.Module):
    """A 3 x 3 convolution with 16 filters as a product of nine shifted images."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[S, 10, 10, C]` to `[S, 8, 8, 16]`."""
        shifts = [(i, j) for i in range(3) for j in range(3)]
        patches = [obs[:, i : i + 8, j : j + 8] for i, j in shifts]
        return nn.Dense(16)(jnp.concatenate(patches, axis=-1))


LAYERS = {
    "`nn.Conv(16, (3, 3))`": nn.Conv(16, (3, 3), padding="VALID"),
    "the same as a product over patches": Patches(),
    # The first layer of PureJaxRL's networks.
    "`nn.Dense(64)`, flat image": nn.Sequential(
        [lambda obs: obs.reshape(obs.shape[0], -1), nn.Dense(64)]
    ),
}


def trainings() -> Iterator[Training]:
    """Yields all comparisons."""
    sweep, base = (1, 8), PUREJAXRL.replace(num_updates=2)
    breakout = base.replace(num_minibatches=8, learning_rate=5e-3, activation="relu")
    robot = base.replace(
        num_minibatches=8,
        learning_rate=3e-4,
        ent_coef=0.0,
        normalize_observations=True,
        hidden_layer_sizes=(256, 256),
    )
    for num_envs, num_updates in SIZES.items():
        name = f"PPO, CartPole, {num_envs:,} lanes"
        config = PUREJAXRL.replace(num_envs=num_envs, num_updates=num_updates)
        seeds = sweep if num_envs in (4, 64) else (1,)
        yield from ppo_trainings(name, "CartPole-v1", config, seeds)
    name = "PPO, Breakout, 64 lanes"
    yield from ppo_trainings(name, "Breakout-MinAtar", breakout, sweep)
    yield from ppo_trainings("PPO, hopper, 64 lanes", "brax:hopper", robot, (1,))
    name = "Recurrent PPO, CartPole, 64 lanes"
    yield Training(name, "ppo_rnn", "CartPole-v1", base, train_recurrent)
    name, config = "DQN, CartPole, 10 lanes", DQNSettings(4000)
    yield Training(name, "dqn", "CartPole-v1", config, train_dqn, sweep)


def ppo_trainings(
    name: str, env_id: str, config: PPOSettings, seeds: tuple[int, ...]
) -> Iterator[Training]:
    """Yields a comparison of PPO."""
    script = "ppo_continuous_action" if env_id.startswith("brax:") else "ppo"
    ours = functools.partial(train_ppo, env_id)
    yield Training(name, script, env_id, config, ours, seeds)


def train_ppo(env_id: str, config: PPOSettings) -> Train:
    """Creates a training function of PPO; normalizes the rewards of robots."""
    return recipes.make_ppo(recipes.make_lanes(env_id, config), config).train


def train_recurrent(config: PPOSettings) -> Train:
    """Creates a training function of recurrent PPO with the network of PureJaxRL."""
    env = envs.vectorize(make_env("CartPole-v1"), config.num_envs)
    network = RecurrentNetwork(env.action_space.n)
    agent = recurrent_ppo.RecurrentPPO(
        env,
        recurrent_ppo.Config(
            num_updates=config.num_updates,
            num_minibatches=config.num_minibatches,
            learning_rate=config.learning_rate,
            clip_range_vf=config.clip_range_vf,
        ),
        network,
    )
    return lambda key: agent.train(agent.init(key))


def train_dqn(config: DQNSettings) -> Train:
    """Creates a training function of DQN with the settings of PureJaxRL."""
    return recipes.make_dqn(make_env("CartPole-v1"), config).train


def training_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Compiles and times every comparison with each of its numbers of seeds."""
    for training in trainings() if args.purejaxrl[0] else ():
        for num_seeds in training.seeds:
            name = f"{training.name}, {num_seeds}"
            if any(name.startswith(x) for x in args.only):
                yield row_of(training, num_seeds, args)


def row_of(training: Training, num_seeds: int, args: Namespace) -> dict[str, str]:
    """Compiles and times a comparison, with `jax.vmap` over multiple seeds."""
    jax.clear_caches()
    config, keys = training.config, jax.random.split(jax.random.key(0), num_seeds)
    learner = purejaxrl.make_learner(
        training.env_id,
        config,
        Path(args.purejaxrl[0]),
        training.script,
        normalize=True,
    )
    compile_seconds, programs = [], {}
    for maker, train in (("ours", training.ours(config)), ("theirs", learner.train)):
        train = jax.vmap(train) if num_seeds > 1 else train
        inputs = keys if num_seeds > 1 else keys[0]
        start = time.process_time()
        program = jax.jit(train).lower(inputs).compile()
        compile_seconds.append(time.process_time() - start)
        programs[maker] = functools.partial(program, inputs)
    ours, theirs = measure(programs, args.repeats).values()

    def ms(seconds: float) -> str:
        value = 1e3 * seconds / config.num_updates
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    return {
        "training": training.name,
        "against": f"PureJaxRL's `{training.script}.py`",
        "seeds": f"{num_seeds}",
        "here, CPU ms": ms(ours.cpu),
        "there, CPU ms": ms(theirs.cpu),
        "CPU time, there / here": f"{theirs.cpu / ours.cpu:.2f}",
        "wall time, there / here": f"{theirs.wall / ours.wall:.2f}",
        "compiling here, CPU s": f"{compile_seconds[0]:.1f}",
        "compiling there, CPU s": f"{compile_seconds[1]:.1f}",
        "compiling, there / here": f"{compile_seconds[1] / compile_seconds[0]:.2f}",
        "repeats": f"{args.repeats}",
    }


def layer_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each layer and the gradient of its weights."""
    for batch_size in (64, 256):
        obs = jax.random.bernoulli(jax.random.key(0), 0.1, (batch_size, 10, 10, 4))
        obs, programs = obs.astype(jnp.float32), dict[str, Program]()
        for name, network in LAYERS.items():
            params = network.init(jax.random.key(1), obs)
            programs[name] = functools.partial(descend(network), params, obs)
        timing = measure(programs, args.repeats)
        us = {name: f"{1e6 * x.cpu / STEPS:,.0f}" for name, x in timing.items()}
        yield {"images": f"{batch_size}", **us}


def descend(network: nn.Module) -> Callable[[Any, jax.Array], Any]:
    """Creates a program that takes `STEPS` gradient descent steps."""

    def loss(params: Any, obs: jax.Array) -> jax.Array:
        outputs: Any = network.apply(params, obs)  # not a tuple
        return jnp.square(outputs).mean()

    @jax.jit
    def program(params: Any, obs: jax.Array) -> Any:
        def step(params: Any, _: None) -> tuple[Any, None]:
            grads = jax.grad(loss)(params, obs)
            return jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads), None

        return jax.lax.scan(step, params, length=STEPS)

    return program


if __name__ == "__main__":
    tables = {"trainings": training_rows, "convolutions": layer_rows}
    run(__doc__, 7, tables, purejaxrl=("",), only=("",))
