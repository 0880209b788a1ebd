"""Makes a batch of a stream from environments that are not JAX, by a loop in Python."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.host.loop import NO_LIMIT
from rollout.stream.batch import BatchResult, finish, numbers, numbers_of_episodes
from rollout.stream.types import BatchSpec, Options
from rollout.types import Carry

_finish = jax.jit(finish, static_argnums=0)


def check(options: Options, collector: HostCollector) -> None:
    """Checks that host environments support the options.

    Raises:
        ValueError: if they do not.
    """
    if hasattr(collector, "num_ready"):
        raise ValueError(
            "`collector` must step all environments together, got an "
            f"{type(collector).__name__}: call its `collect_steps` in the loop."
        )
    num_envs = collector.env.num_envs
    for name in ("steps_per_batch", "total_steps"):
        if (getattr(options, name) or 0) % num_envs:
            raise ValueError(
                f"`{name}` must be a multiple of num_envs={num_envs}, for environments "
                f"in Python all step together, got {getattr(options, name)}."
            )
    if options.on_fault == "drop":
        raise ValueError(
            '`on_fault="drop"` is for environments in JAX; for others use '
            '`HostCollector(on_fault="restart")`.'
        )
    if options.recycle:
        raise ValueError(
            "`recycle=True` is for environments in JAX: others write to memory of the "
            "host."
        )


def make_batch(
    options: Options,
    collector: HostCollector,
    carry: Carry,
    params: Any,
    spec: np.ndarray,
    memory: ArrayTree,
) -> BatchResult:
    """Makes one batch, as `rollout.stream.batch.make_batch` does."""
    del memory  # unused
    batch, episodes = BatchSpec(*map(int, spec)), None
    before = collector.fault_stats.faulty_episodes
    if options.episodes_per_batch is None:
        carry, trajectory = _collect_rows(options, collector, carry, params, batch)
        number = numbers(trajectory.mask.shape, batch)
        num_steps = jnp.int32(batch.num_steps)
    else:
        carry, trajectory, episodes = collector.collect_padded_episodes(
            collector.resumed(carry),  # an interrupted batch restarts
            params,
            options.episodes_per_batch,
            max_length=options.max_episode_steps,
        )
        number = numbers_of_episodes(trajectory.mask.shape)
        num_steps = episodes.num_steps
    num_faulty = np.int32(collector.fault_stats.faulty_episodes - before)
    # The carry stays out: `jit` would turn its NumPy arrays into jax arrays.
    result = _finish(options, (), trajectory, episodes, number, num_steps, num_faulty)
    return result._replace(carry=carry)


def _collect_rows(
    options: Options,
    collector: HostCollector,
    carry: Carry,
    params: Any,
    spec: BatchSpec,
) -> tuple[Carry, Any]:
    num_envs = collector.env.num_envs
    lane = np.arange(num_envs)

    # All lanes step in every row, from lane 0 on, so lanes count in their own order.
    def is_random(row: int) -> np.ndarray | None:
        left = spec.num_random - row * num_envs
        return lane < left if left > 0 else None

    limit = NO_LIMIT
    if options.max_episode_steps is not None:
        limit = int(checks.max_steps(options.max_episode_steps))
    return collector.collect_batch(
        carry,
        params,
        spec.num_steps // num_envs,
        capacity=options.steps_per_batch // num_envs,
        limit=limit,
        random_fn=is_random,
        mask_fn=options.mask_fn,
        at_end=options.at_batch_end,
    )
