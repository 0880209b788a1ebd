"""`profile`: times the policy, the environment, the auto-reset and the recording."""

import collections
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
from jax import lax

from rollout.base import checks, trees
from rollout.collector import Collector
from rollout.envs.host.wrappers import HostWrapper
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.kernel import keys
from rollout.kernel.state import pack, roots_of
from rollout.kernel.step import act, restart, step_env
from rollout.types import Carry, ParamsT, Transition


class Profile(NamedTuple):
    """Seconds that `num_steps` steps of every lane take. Print it to get a table.

    Attributes:
        policy: applying the policy.
        env_step: stepping the environments.
        auto_reset: starting new episodes in finished lanes.
        recording: writing the trajectory.
        total: the collection with all parts.
        unexplained: `total` minus the four parts. Negative if XLA fuses parts in the
            whole collection.
    """

    policy: float
    env_step: float
    auto_reset: float
    recording: float
    total: float
    unexplained: float

    def __str__(self) -> str:
        """Formats a line for each part, in milliseconds."""
        parts = {name.replace("_", " "): x for name, x in self._asdict().items()}
        if self.unexplained < 0:
            parts["saved by fusing"] = parts.pop("unexplained")
        return "\n".join(f"  {x:<17} {1e3 * y:.3f} ms" for x, y in parts.items())


class _Inputs(NamedTuple):
    """Inputs of every timed part."""

    collector: Any
    carry: Carry  # at the beginning
    params: Any
    trajectory: Transition  # [T, B, ...]


def profile(
    collector: Collector[ParamsT] | HostCollector[ParamsT],
    params: ParamsT,
    key: chex.PRNGKey,
    num_steps: int,
    *,
    num_repeats: int = 5,
) -> Profile:
    """Times policy, environment, auto-reset and recording, each as a separate scan.

    Each part receives the observations, actions and episode ends of a real collection,
    which runs first. The environments are stepped without resets, so the time is wrong
    if the speed of an environment changes after the end of an episode. The parts are
    timed in turn, and each time is a median.

    A `HostCollector` is timed in whole collections, at the calls of the environments:
    `policy` is the time between calls, including transfers, and `recording` is the
    time after the last call. Profiling resets the environments, so earlier carries
    become invalid.

    Args:
        collector: policy and environments.
        params: parameters of the policy.
        key: one typed key: the source of all randomness.
        num_steps: T, steps per lane, or rows with `num_ready`, at least 1. Profiling
            needs memory for two trajectories.
        num_repeats: repetitions per part, at least 1; compilation is not timed.

    Returns:
        Seconds per part.

    Raises:
        ValueError: if `key` is not one typed key, if `num_steps` or `num_repeats` is
            not an int of at least 1, or as `Collector.step` does.
    """
    num_steps = checks.check_int("num_steps", num_steps)
    num_repeats = checks.check_int("num_repeats", num_repeats)
    checks.check_collector(collector)
    if collector.is_host:
        return _profile_host(collector, params, key, num_steps, num_repeats)
    carry = collector.init(key)
    _, trajectory = collector.collect_steps(carry, params, num_steps)
    inputs = _Inputs(collector, carry, params, trajectory)
    timed = _policy, _env_step, _auto_reset, _recording  # in the order of `Profile`
    programs: list[Callable[[_Inputs], Any]] = [jax.jit(part) for part in timed]
    programs.append(lambda _: collector.collect_steps(carry, params, num_steps))
    # Time the parts in turn, so that a slow moment of the machine hits all parts.
    times = [[_time(x, inputs) for x in programs] for _ in range(num_repeats)]
    *parts, total = map(statistics.median, zip(*times, strict=True))
    return Profile(*parts, total=total, unexplained=total - sum(parts))


# Methods of host environments, and the part of a step that each belongs to.
_TIMED = {"reset": "auto_reset", "rebuild": "auto_reset"}
_TIMED |= dict.fromkeys(("step", "send", "receive"), "env_step")


class _TimedEnv(HostWrapper):
    """Measures the total time in and between calls of host environments."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.last = 0.0  # when the last call ended
        self.seconds = collections.defaultdict[str, float](float)
        for name in _TIMED:
            setattr(self, name, functools.partial(self._call, name))

    def _call(self, name: str, *args: Any) -> Any:
        start = time.perf_counter()
        result = getattr(self.env, name)(*args)
        # Time outside of the environments: the policy and its transfers.
        self.seconds["policy"] += start - self.last
        self.last = time.perf_counter()
        self.seconds[_TIMED[name]] += self.last - start
        return result


def _profile_host(
    collector: Any, params: Any, key: chex.PRNGKey, num_steps: int, num_repeats: int
) -> Profile:
    """Times the calls of the environments, and the time between and after calls."""
    env = _TimedEnv(collector.env)
    timed = collector.replace(env=env)
    carry, times = timed.init(key), []
    for _ in range(num_repeats + 1):  # the first round compiles
        env.seconds.clear()
        env.last = start = time.perf_counter()
        carry, trajectory = timed.collect_steps(carry, params, num_steps)
        jax.block_until_ready(trajectory)
        end = time.perf_counter()
        parts = [env.seconds[name] for name in ("policy", "env_step", "auto_reset")]
        times.append([*parts, end - env.last, end - start])
    *medians, total = map(statistics.median, zip(*times[1:], strict=True))
    return Profile(*medians, total=total, unexplained=total - sum(medians))


def _time(program: Callable[[_Inputs], Any], inputs: _Inputs) -> float:
    # Call once before timing, so that all parts reuse recently freed memory.
    jax.block_until_ready(program(inputs))
    start = time.perf_counter()
    jax.block_until_ready(program(inputs))
    return time.perf_counter() - start


def _policy(inputs: _Inputs) -> Any:
    collector, carry, params, trajectory = inputs
    roots = roots_of(collector, carry)

    def step(state: Any, obs: ArrayTree) -> Any:
        carry, _ = state
        input_carry = carry.replace(obs=obs)
        key = keys.at_step(roots.policy, carry.step)
        decision = act(collector, input_carry, params, key)
        carry = carry.replace(step=carry.step + 1, policy_state=decision.state)
        # Outputs in the carry are not removed by XLA, and are not stacked.
        return (carry, (decision.action, decision.extras)), None

    last = _last(trajectory.action), _last(trajectory.extras)
    return lax.scan(step, (carry, last), trajectory.obs)[0]


def _env_step(inputs: _Inputs) -> Any:
    collector, carry, _, trajectory = inputs

    def step(state: Any, action: ArrayTree) -> Any:
        carry, _ = state
        # Count the steps of the episode: step keys depend on the count.
        length = carry.episode.episode_length + 1
        result = step_env(collector, carry, action)
        carry = carry.replace(
            step=carry.step + 1,
            env_state=result.state,
            episode=carry.episode.replace(episode_length=length),
        )
        return (carry, result.replace(state=(), info=())), None

    action = _last(trajectory.action)
    result = jax.eval_shape(step, (carry, None), action)[0][1]
    start = carry, trees.blank(result)
    return lax.scan(step, start, trajectory.action)[0]


def _auto_reset(inputs: _Inputs) -> Any:
    collector, carry, _, trajectory = inputs
    roots = roots_of(collector, carry)

    def step(carry: Carry, done: jax.Array) -> tuple[Carry, None]:
        start = keys.next_episodes(collector.env, carry, roots)
        return restart(collector, carry, done, start), None

    return lax.scan(step, carry, trajectory.done)[0]


def _recording(inputs: _Inputs) -> Any:
    rows = pack(inputs.trajectory)

    def step(row: ArrayTree, _: None) -> tuple[ArrayTree, ArrayTree]:
        # Without the barrier XLA would broadcast one row instead of writing T rows.
        row = trees.barrier(row)
        return row, row

    return lax.scan(step, _last(rows), length=inputs.trajectory.reward.shape[0])[1]


def _last(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda x: x[-1], tree)
