"""How fast is a whole PPO, and how slow a convolution on a CPU?

Compares the PPO of `learners.py` with PureJaxRL's own script, one training and eight
under `jax.vmap`: seconds to compile and to run, interleaved, and the ratio of medians.
Then a batch of MinAtar's images through one layer and its gradient: `nn.Conv`, the same
as a matrix product over patches, and a dense layer of as many outputs as the MLP's.

    taskset -c 0 python tests/benchmarks/training_speed.py --purejaxrl FOLDER

See `learning_compared.py` for what to install, and why `taskset`.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import learners
import learners_of_peers
from harness import Program, machine, measure
from learners import PPO
from learning_compared import MINATAR, timed

CASES = {
    "CartPole, 4 envs": PPO("CartPole-v1", 50),
    "CartPole, 256 envs": PPO("CartPole-v1", 2, num_envs=256),
    "Breakout, 64 envs": PPO("Breakout-MinAtar", 3, **MINATAR),
}


class Conv(nn.Module):
    """A convolution of 3 x 3, 16 filters."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[S, 10, 10, C]` to `[S, 8, 8, 16]`."""
        return nn.Conv(16, (3, 3), padding="VALID")(obs)


class Patches(nn.Module):
    """The same as a product of the nine shifted images."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[S, 10, 10, C]` to `[S, 8, 8, 16]`."""
        shifts = [(i, j) for i in range(3) for j in range(3)]
        patches = [obs[:, i : i + 8, j : j + 8] for i, j in shifts]
        return nn.Dense(16)(jnp.concatenate(patches, axis=-1))


class Flat(nn.Module):
    """The first layer of PureJaxRL's networks."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[S, 10, 10, C]` to `[S, 64]`."""
        return nn.Dense(64)(obs.reshape(obs.shape[0], -1))


def whole(config: PPO, num_seeds: int, folder: Path, repeats: int) -> str:
    """Returns the cells of a row: seconds to compile and to run, and ratios."""
    # Under `vmap` a loop over the lanes that are done runs for all seeds.
    options = {"auto_reset": "select"} if num_seeds > 1 else {}
    made = {
        "ours": learners.ppo(config, **options),
        "theirs": learners_of_peers.make_purejaxrl(config, folder),
    }
    keys = jax.random.split(jax.random.key(0), num_seeds)
    compiled, programs = {}, {}
    for name, learner in made.items():
        train = jax.vmap(learner.train) if num_seeds > 1 else learner.train
        inputs = keys if num_seeds > 1 else keys[0]
        program, compiled[name] = timed(jax.jit(train).lower(inputs).compile)
        programs[name] = functools.partial(program, inputs)
    run = {name: x.cpu for name, x in measure(programs, repeats).items()}
    return " | ".join(
        f"{x['ours']:.2f} | {x['theirs']:.2f} | {x['ours'] / x['theirs']:.2f}"
        for x in (compiled, run)
    )


def layers(batch_size: int, repeats: int) -> dict[str, float]:
    """Returns microseconds of a layer and of its gradient by the weights."""
    obs = jax.random.bernoulli(jax.random.key(0), 0.1, (batch_size, 10, 10, 4))
    obs, programs = obs.astype(jnp.float32), dict[str, Program]()
    for network in (Conv(), Patches(), Flat()):
        params = network.init(jax.random.key(1), obs)

        def step(
            params: Any, _: None, network: nn.Module = network
        ) -> tuple[Any, None]:
            def loss(params: Any) -> jax.Array:
                return jnp.square(network.apply(params, obs)).mean()

            grads = jax.grad(loss)(params)
            return jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads), None

        many = jax.jit(lambda params, step=step: jax.lax.scan(step, params, length=20))
        programs[type(network).__name__] = functools.partial(many, params)
    return {x: y.cpu / 20 * 1e6 for x, y in measure(programs, repeats).items()}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--purejaxrl", type=Path, help="the folder with `ppo.py`")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(machine(), flush=True)
    for batch_size in (64, 256):
        found = layers(batch_size, args.repeats)
        cells = ", ".join(f"{name} {took:.0f} µs" for name, took in found.items())
        print(f"{batch_size} images: {cells}", flush=True)
    if not args.purejaxrl:
        return
    print("| | seeds | compile | theirs | ratio | run | theirs | ratio |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, config in CASES.items():
        for num_seeds in (1, 8):
            cells = whole(config, num_seeds, args.purejaxrl, args.repeats)
            print(f"| {name} | {num_seeds} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
