"""What training loops over JAX and host environments share."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.collector import Collector
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.types import Policy

State = TypeVar("State")


def make_collector(env: Any, policy: Policy) -> Collector | HostCollector:
    """Makes the collector for an environment of either kind.

    Args:
        env: a `VectorEnv`, such as that of `rollout.envs.make_vec`, or a
            `HostVectorEnv`, such as that of `rollout.envs.from_gymnasium`.
        policy: the policy that acts in it.

    Raises:
        ValueError: if `env` is a single environment, or no environment.
    """
    is_host = not hasattr(env, "reset_done") and hasattr(env, "close")
    return (HostCollector if is_host else Collector)(env=env, policy=policy)


def scan_updates(
    update_fn: Callable[[State], tuple[State, ArrayTree]],
    state: State,
    num_updates: int,
    *,
    is_host: bool = False,
) -> tuple[State, Any]:
    """Runs updates: as one `jax.lax.scan`, or as a loop in Python.

    Args:
        update_fn: `state` to the next state and metrics.
        state: the first state.
        num_updates: number of updates, at least 1.
        is_host: whether the environments are not written in JAX, as `is_host` of a
            collector says.

    Returns:
        The last state, and the metrics of every update, `[num_updates, ...]`.

    Raises:
        ValueError: if `num_updates` is not an int of at least 1.
    """
    num_updates = checks.int_between("num_updates", num_updates)
    if not is_host:
        return jax.lax.scan(
            lambda state, _: update_fn(state), state, length=num_updates
        )
    metrics = []
    for _ in range(num_updates):
        state, update_metrics = update_fn(state)
        metrics.append(update_metrics)
    return state, jax.tree.map(
        lambda *x: jnp.asarray(np.stack(x)), *jax.device_get(metrics)
    )
