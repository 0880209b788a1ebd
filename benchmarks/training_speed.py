"""How fast is a whole PPO, and how slow a convolution on a CPU?

Compares the PPO of `learners.py` with PureJaxRL's own script, one training and eight
under `jax.vmap`: CPU seconds to compile and to run, in turns, and ratios of medians.
Then a batch of MinAtar's images through one layer and its gradient: `nn.Conv`, the same
as a matrix product over patches, and a dense layer of as many outputs as the MLP's.

    taskset -c 0 python benchmarks/training_speed.py --purejaxrl FOLDER

See `learning_compared.py` for what to install, and why `taskset`.
"""

import functools
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import learners
import learners_of_peers
from harness import Program, measure, run
from learners import PPO
from learning_compared import MINATAR, timed

CASES = {
    "CartPole, 4 environments": PPO("CartPole-v1", 50),
    "CartPole, 256 environments": PPO("CartPole-v1", 2, num_envs=256),
    "Breakout, 64 environments": PPO("Breakout-MinAtar", 3, **MINATAR),
}
STEPS = 20


class Patches(nn.Module):
    """A convolution of 3 x 3, 16 filters, as a product of the nine shifted images."""

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


def training_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Compiles and times every training, and as many of them as a sweep has."""
    for (name, config), num_seeds in itertools.product(CASES.items(), (1, 8)):
        # Under `vmap` a loop over the lanes that are done runs for all seeds.
        options = {"auto_reset": "select"} if num_seeds > 1 else {}
        made = {"`rollout`": learners.ppo(config, **options)}
        if args.purejaxrl[0]:
            folder = Path(args.purejaxrl[0])
            made["PureJaxRL"] = learners_of_peers.make_purejaxrl(config, folder)
        keys = jax.random.split(jax.random.key(0), num_seeds)
        compiled, programs = {}, {}
        for maker, learner in made.items():
            train = jax.vmap(learner.train) if num_seeds > 1 else learner.train
            inputs = keys if num_seeds > 1 else keys[0]
            program, compiled[maker] = timed(jax.jit(train).lower(inputs).compile)
            programs[maker] = functools.partial(program, inputs)
        taken = {x: y.cpu for x, y in measure(programs, args.repeats).items()}
        row = {"": name, "seeds": f"{num_seeds}"}
        for what, found in {"compile": compiled, "run": taken}.items():
            row |= {f"{what}, {x}": f"{seconds:.2f}" for x, seconds in found.items()}
            ours, *theirs = found.values()
            ratio = f"{ours / theirs[0]:.2f}" if theirs else ""
            row[f"{what}, `rollout` / PureJaxRL"] = ratio
        yield row


def layer_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times a layer and its gradient by the weights."""
    for batch_size in (64, 256):
        obs = jax.random.bernoulli(jax.random.key(0), 0.1, (batch_size, 10, 10, 4))
        obs, programs = obs.astype(jnp.float32), dict[str, Program]()
        for name, network in LAYERS.items():
            params = network.init(jax.random.key(1), obs)
            programs[name] = functools.partial(descend(network), params, obs)
        taken = measure(programs, args.repeats)
        us = {name: f"{1e6 * x.cpu / STEPS:,.0f}" for name, x in taken.items()}
        yield {"images": f"{batch_size}", **us}


def descend(network: nn.Module) -> Callable[[Any, jax.Array], Any]:
    """Makes a program of some steps down the gradient of a loss."""

    def loss(params: Any, obs: jax.Array) -> jax.Array:
        return jnp.square(network.apply(params, obs)).mean()

    @jax.jit
    def program(params: Any, obs: jax.Array) -> Any:
        def step(params: Any, _: None) -> tuple[Any, None]:
            grads = jax.grad(loss)(params, obs)
            return jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads), None

        return jax.lax.scan(step, params, length=STEPS)

    return program


if __name__ == "__main__":
    tables = {"a whole PPO": training_rows, "convolutions": layer_rows}
    run(__doc__, 5, tables, purejaxrl=("",))
