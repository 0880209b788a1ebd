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

from rollout import checks
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.host.host_wrapper import HostWrapper
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.kernel import episode_keys
from rollout.kernel.carry import roots_of
from rollout.kernel.recording import pack
from rollout.kernel.step import act, restart, step_env
from rollout.types import Carry, ParamsT, Transition


class Profile(NamedTuple):
    """Seconds that `num_steps` steps of every lane take; printed, a table.

    Attributes:
        policy: applying the policy.
        env_step: stepping the environments.
        auto_reset: starting new episodes where the old ones ended.
        recording: writing the trajectory.
        whole: the whole collection, all parts together.
        unexplained: `whole` minus the four parts. Negative where XLA fuses parts that
            are timed apart here.
    """

    policy: float
    env_step: float
    auto_reset: float
    recording: float
    whole: float
    unexplained: float

    def __str__(self) -> str:
        """Formats a line for each part, in milliseconds."""
        parts = {name.replace("_", " "): x for name, x in self._asdict().items()}
        if self.unexplained < 0:
            parts["saved by fusing"] = parts.pop("unexplained")
        return "\n".join(f"  {x:<17} {1e3 * y:.3f} ms" for x, y in parts.items())


class _Given(NamedTuple):
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
    """Times policy, environment, auto-reset and recording, each as its own scan.

    Each part gets the observations, actions and endings of a real collection, which
    runs first. The environments are stepped without being reset, so one that steps
    faster or slower after its ending is timed wrongly. The parts are timed in turn, and
    each reports the median of its times.

    A `HostCollector` is timed in whole collections, at the calls of its environments:
    `policy` is the time between them, moving arrays included, and `recording` that
    after the last one. It resets the environments, so a carry from before is void.

    Args:
        collector: policy and environments.
        params: parameters of the policy.
        key: one typed key: the source of all randomness.
        num_steps: T, steps per lane, or rows with `num_ready`, at least 1. Takes the
            memory of two trajectories.
        num_repeats: how often each part is timed, at least 1; compiling is not timed.

    Returns:
        Seconds per part.

    Raises:
        ValueError: if `key` is not one typed key, if `num_steps` or `num_repeats` is
            not an int of at least 1, or as `Collector.step` does.
    """
    num_steps = checks.int_between("num_steps", num_steps)
    num_repeats = checks.int_between("num_repeats", num_repeats)
    checks.collects(collector)
    if collector.is_host:
        return _profile_host(collector, params, key, num_steps, num_repeats)
    carry = collector.init(key)
    _, trajectory = collector.collect_steps(carry, params, num_steps)
    given = _Given(collector, carry, params, trajectory)
    timed = _policy, _env_step, _auto_reset, _recording  # in the order of `Profile`
    programs: list[Callable[[_Given], Any]] = [jax.jit(part) for part in timed]
    programs.append(lambda _: collector.collect_steps(carry, params, num_steps))
    # In turn, so that a slow moment of the machine hits all parts alike.
    times = [[_time(x, given) for x in programs] for _ in range(num_repeats)]
    *parts, whole = map(statistics.median, zip(*times, strict=True))
    return Profile(*parts, whole=whole, unexplained=whole - sum(parts))


# The methods of host environments, by the part of a step that they belong to.
_TIMED = {"reset": "auto_reset", "rebuild": "auto_reset"}
_TIMED |= dict.fromkeys(("step", "send", "receive"), "env_step")


class _TimedEnv(HostWrapper):
    """Host environments that add up the time in and between their calls."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.last = 0.0  # when the last call ended
        self.seconds = collections.defaultdict[str, float](float)
        for name in _TIMED:
            setattr(self, name, functools.partial(self._call, name))

    def _call(self, name: str, *args: Any) -> Any:
        start = time.perf_counter()
        result = getattr(self.env, name)(*args)
        # All that is not in the environments: the policy, and moving arrays to it.
        self.seconds["policy"] += start - self.last
        self.last = time.perf_counter()
        self.seconds[_TIMED[name]] += self.last - start
        return result


def _profile_host(
    collector: Any, params: Any, key: chex.PRNGKey, num_steps: int, num_repeats: int
) -> Profile:
    """Times the calls of the environments, and what comes between and after them."""
    env = _TimedEnv(collector.env)
    timed = collector.replace(env=env)
    carry, times = timed.init(key), []
    for _ in range(num_repeats + 1):  # the first one compiles
        env.seconds.clear()
        env.last = start = time.perf_counter()
        carry, trajectory = timed.collect_steps(carry, params, num_steps)
        jax.block_until_ready(trajectory)
        end = time.perf_counter()
        parts = [env.seconds[name] for name in ("policy", "env_step", "auto_reset")]
        times.append([*parts, end - env.last, end - start])
    *found, whole = map(statistics.median, zip(*times[1:], strict=True))
    return Profile(*found, whole=whole, unexplained=whole - sum(found))


def _time(program: Callable[[_Given], Any], given: _Given) -> float:
    # A first call, untimed, so that all parts reuse memory that was just freed.
    jax.block_until_ready(program(given))
    start = time.perf_counter()
    jax.block_until_ready(program(given))
    return time.perf_counter() - start


def _policy(given: _Given) -> Any:
    collector, carry, params, trajectory = given
    roots = roots_of(collector, carry)

    def step(state: Any, obs: ArrayTree) -> Any:
        carry, _ = state
        seen = carry.replace(obs=obs)
        key = episode_keys.at_step(roots.policy, carry.step)
        decision = act(collector, seen, params, key)
        carry = carry.replace(step=carry.step + 1, policy_state=decision.state)
        # XLA cannot drop outputs in the carry, and does not stack them either.
        return (carry, (decision.action, decision.extras)), None

    last = _last(trajectory.action), _last(trajectory.extras)
    return lax.scan(step, (carry, last), trajectory.obs)[0]


def _env_step(given: _Given) -> Any:
    collector, carry, _, trajectory = given

    def step(state: Any, action: ArrayTree) -> Any:
        carry, _ = state
        # Steps have keys by their number in the episode, which must go on here, too.
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


def _auto_reset(given: _Given) -> Any:
    collector, carry, _, trajectory = given
    roots = roots_of(collector, carry)

    def step(carry: Carry, done: jax.Array) -> tuple[Carry, None]:
        start = episode_keys.next_episodes(collector.env, carry, roots)
        return restart(collector, carry, done, start), None

    return lax.scan(step, carry, trajectory.done)[0]


def _recording(given: _Given) -> Any:
    rows = pack(given.trajectory)

    def step(row: ArrayTree, _: None) -> tuple[ArrayTree, ArrayTree]:
        # Without the barrier jax would broadcast the row instead of writing rows.
        row = trees.barrier(row)
        return row, row

    return lax.scan(step, _last(rows), length=given.trajectory.reward.shape[0])[1]


def _last(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda x: x[-1], tree)
