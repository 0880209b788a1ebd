"""How fast are the convolutions of networks on a CPU, compared with XLA's?

Compares networks whose layers use `rollout.networks.conv_general_dilated` with the same
networks on `jax.lax.conv_general_dilated`: outputs, and gradients with respect to the
parameters, on random images of three sizes. "In a scan" is the mean of four iterations
of a `lax.scan` whose carry depends on the results. "Outside" is one call of a jitted
function. Times are the fastest of many interleaved runs, because the median depends on
the load of the machine: CPU time on one core, else wall time. Compile times include
tracing.

Run it on one core with `taskset -c 0`, and on all cores without it. Each row names the
number of cores, and `--json` keeps the rows of other numbers of cores.

    taskset -c 0 python benchmarks/convolution_speed.py --json docs/speed.json
    python benchmarks/convolution_speed.py --json docs/speed.json
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from harness import Program, arguments, measure, report

from rollout.networks import conv_general_dilated

TABLE = "networks of convolutions"
ITERATIONS = 4
SECONDS = 3.0
CONVOLUTIONS = {
    "rollout": conv_general_dilated,
    "XLA": jax.lax.conv_general_dilated,
}
# Shape of the images; features, window and strides of each layer; size of the last one.
NETWORKS = {
    "Nature CNN, 32 x 84 x 84 x 4": (
        (32, 84, 84, 4),
        ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        512,
    ),
    "MinAtar, 256 x 10 x 10 x 4": ((256, 10, 10, 4), ((16, 3, 1),), 64),
    "MiniGrid, 256 x 7 x 7 x 3": (
        (256, 7, 7, 3),
        ((16, 2, 1), (32, 2, 1), (64, 2, 1)),
        64,
    ),
}


class Network(nn.Module):
    """Convolutions with ReLU, and a dense layer."""

    layers: tuple[tuple[int, int, int], ...]
    size: int
    convolve: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps `[N, height, width, C]` to `[N, size]`."""
        x = images
        for features, window, stride in self.layers:
            x = nn.relu(
                nn.Conv(
                    features,
                    (window, window),
                    strides=stride,
                    padding="VALID",
                    conv_general_dilated=self.convolve,
                )(x)
            )
        return nn.Dense(self.size)(x.reshape(x.shape[0], -1))


def make_program(
    name: str, convolve: Callable[..., jax.Array], computation: str, location: str
) -> tuple[Program, float]:
    """Returns a compiled program, and the seconds to trace and compile it."""
    shape, layers, size = NETWORKS[name]
    network: Any = Network(layers, size, convolve)  # `apply` may return a tuple
    images = jax.random.uniform(jax.random.key(0), shape)
    params = network.init(jax.random.key(1), images)

    def loss(params: Any, images: jax.Array) -> jax.Array:
        return jnp.mean(network.apply(params, images) ** 2)

    def update(params: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        grads = jax.grad(loss)(params, images)
        return jax.tree.map(lambda x, y: x - 0.01 * y, params, grads), images

    def read(params: Any, images: jax.Array) -> tuple[Any, jax.Array]:
        return params, images + 1e-6 * network.apply(params, images).mean()

    step = update if computation == "gradient" else read

    def loop(params: Any, images: jax.Array) -> Any:
        def body(carry: Any, _: None) -> tuple[Any, None]:
            return step(*carry), None

        params, images = jax.lax.scan(body, (params, images), length=ITERATIONS)[0]
        return params if computation == "gradient" else images

    outside = jax.grad(loss) if computation == "gradient" else network.apply
    start = time.perf_counter()
    program = jax.jit(loop if location == "in a scan" else outside)
    program = program.lower(params, images).compile()
    return functools.partial(program, params, images), time.perf_counter() - start


def fastest(programs: dict[str, Program], repeats: int) -> dict[str, float]:
    """Times programs for at least `SECONDS`; returns seconds per call."""
    timings, stop = [], time.perf_counter() + SECONDS
    while len(timings) < repeats or time.perf_counter() < stop:
        timings.append(measure(programs, 1))
    clock = "cpu" if len(os.sched_getaffinity(0)) == 1 else "wall"
    return {x: min(getattr(t[x], clock) for t in timings) for x in programs}


def largest_difference(x: Any, y: Any) -> float:
    """Returns the largest difference, relative to the largest number of an array."""
    differences = jax.tree.map(lambda x, y: abs(x - y).max() / abs(y).max(), x, y)
    return float(max(jax.tree.leaves(differences)))


def measure_rows(repeats: int) -> Iterator[dict[str, str]]:
    """Yields one row per network, computation and location."""
    cores = str(len(os.sched_getaffinity(0)))
    for name in NETWORKS:
        for computation in ("outputs", "gradient"):
            for location in ("in a scan", "outside"):
                programs, seconds = {}, {}
                for library, convolve in CONVOLUTIONS.items():
                    compiled = make_program(name, convolve, computation, location)
                    programs[library], seconds[library] = compiled
                seconds_per_call = fastest(programs, repeats)
                calls = ITERATIONS if location == "in a scan" else 1
                ms = {x: y / calls * 1e3 for x, y in seconds_per_call.items()}
                difference = largest_difference(*(fn() for fn in programs.values()))
                yield {
                    "network": name,
                    "computed": computation,
                    "place": location,
                    "cores": cores,
                    "XLA, ms": f"{ms['XLA']:.3g}",
                    "`rollout`, ms": f"{ms['rollout']:.3g}",
                    "`rollout` / XLA": f"{ms['rollout'] / ms['XLA']:.2f}",
                    "largest difference": f"{difference:.0e}",
                    "XLA, s to compile": f"{seconds['XLA']:.2f}",
                    "`rollout`, s to compile": f"{seconds['rollout']:.2f}",
                }


def other_rows(args: argparse.Namespace) -> list[dict[str, str]]:
    """Returns the stored rows of other numbers of cores."""
    if not (args.json and args.json.exists()):
        return []
    table = json.loads(args.json.read_text()).get(TABLE, {"columns": [], "rows": []})
    rows = [dict(zip(table["columns"], x, strict=True)) for x in table["rows"]]
    cores = str(len(os.sched_getaffinity(0)))
    return [row for row in rows if row["cores"] != cores]


def main() -> None:
    """Prints the table."""
    args = arguments(__doc__, 3)
    rows = [*other_rows(args), *measure_rows(args.repeats)]
    report(args, TABLE, sorted(rows, key=lambda row: row["cores"]))


if __name__ == "__main__":
    main()
