"""`check_env`: checks environments of any kind and reports issues by name."""

import contextlib
import importlib
import os
import re
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import numpy as np

from rollout.agents.policy_map import random_policy_map
from rollout.base import checks, programs, trees
from rollout.collector import Collector
from rollout.envs.host.env_checks import SpaceCheck
from rollout.envs.host.local_envs import LocalEnvs, close
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv, check_host_env
from rollout.envs.multi_agent import ACTING, has_agents
from rollout.envs.spaces import Space, as_space
from rollout.envs.types import ArrayTree, Env, VectorEnv, wrapped_env
from rollout.envs.vectorize import vectorize
from rollout.host.host_collector import HostCollector
from rollout.policies import masks
from rollout.policies.base import random_policy, stateless_policy
from rollout.stats import nonfinite
from rollout.types import EnvIssue, Policy, Transition

_NUM_LANES = 8
_CHUNK = 100  # steps per call of `collect_steps`, which bounds the memory for rows
_LIBRARY_PATHS = (*(os.path.dirname(x) + os.sep for x in (__file__, jax.__file__)), "<")


def check_env(
    env: Any,
    params: Any = None,
    key: chex.PRNGKey | None = None,
    *,
    num_steps: int | None = None,
    seed: int = 0,
) -> tuple[EnvIssue, ...]:
    r"""Checks an environment, or a policy in an environment, for common mistakes.

        print(*rollout.check_env(env), sep="\n")
        print(*rollout.check_env(collector, params, key), sep="\n")

    An exception in the environment is reported as an issue and is not raised. An `Env`
    or a `MultiAgentEnv` is traced and then stepped with random actions, which are valid
    actions if the observation has an `action_mask`. The names of the issues are:

    - `raises`: `reset` or `step` raised an exception, for example because a Python `if`
      reads an array. The message begins with the line of the environment's code.
    - `contract`: a result has an unexpected structure, shape or dtype. For example, the
      state of `step` differs from the state of `reset`, a reward has the shape (1,), a
      flag is a float, or not all agents act although `simultaneous` is True.
    - `observation_space`, `action_space`: the space does not contain its samples.
    - `obs`: an observation has another structure, shape or dtype than its space, is
      outside its space, or is not finite. In a multi-agent environment, observations of
      agents that do not act are also checked.
    - `reward`: a reward is not finite.
    - `weak_type`: a leaf of `obs` or of the state is weakly typed.
    - `key`: a key is used twice, or random numbers do not depend on the key that the
      environment receives: they come from a key that the environment creates, or from
      NumPy or Python, and are equal in all episodes. A deterministic `reset` is valid.
    - `ending`: no episode ended; or time limits are not bootstrapped, because every
      truncation is also a termination, or because every episode terminates after the
      same number of steps, which is correct only if the task has this length.

    The policy of a collector chooses the actions. A collector can have the issues
    `raises`, `contract`, `obs`, `reward` and `ending` as above, and:

    - `action`: an action is not in the action space.
    - `extras`, `final_value`: a value is not finite.

    A `HostCollector` runs a `HostVectorEnv` several times. If the environments are from
    Gymnasium, `gymnasium.utils.env_checker` first checks one environment.

    - `gymnasium`: Gymnasium's checker raised an error. Its warnings are ignored.
    - `raises`: as above.
    - `contract`: as above, or a reset of some environments changes the observations of
      other environments.
    - `fault`: an environment failed: it raised, for example because a flag is not a
      bool, an observation is outside its space, or a reward is not finite.
    - `seed`: equal seeds start different episodes, or different seeds start equal
      episodes, which is correct only if the environment is deterministic.
    - `shared`: environments share memory or state, so that the first environment
      depends on other environments.
    - `ending`: as above, or an environment continues after the end of an episode, for
      example because it resets itself. `obs` at the end of an episode is then not the
      true successor. Environments of Gymnasium are exempt, because Gymnasium does not
      define the result of a step after the end.

    Steps are numbered from 1 in each episode.

    Args:
        env: a single JAX environment, before `vectorize`; or a collector of either
            kind; or `B` host environments. The check leaves host environments in an
            arbitrary state, so do not use them for anything else. The issue `shared`
            requires at least two environments.
        params: parameters of the collector's policy.
        key: one typed key for the collector's episodes.
        num_steps: number of steps in each pass, at least 1. None for 200 if `env` is a
            `HostVectorEnv`, and for 1,000 otherwise.
        seed: seed of the actions and of the episodes, at least 0. Collectors use `key`.

    Returns:
        The first issue of each name, in the order of detection; empty if there are no
        issues.

    Raises:
        ModuleNotFoundError: if a package is missing, which Gymnasium's checker needs
            for environments that return arrays of JAX.
        ValueError: if `env` is of another type, or an option is invalid.
    """
    is_collector = isinstance(env, Collector | HostCollector)
    vector_env: Any = env
    is_host = hasattr(vector_env, "num_envs") and not isinstance(vector_env, VectorEnv)
    if not is_host and not is_collector:
        checks.check_single_env(env)
    if num_steps is None:
        num_steps = 200 if is_host else 1000
    checks.check_int("num_steps", num_steps)
    checks.check_int("seed", seed, least=0, most=None)
    issues: dict[str, str] = {}
    if is_host:
        check_host_env(env)
        with _record_exceptions(issues):
            _check_host_env(issues, env, num_steps, jax.random.key(seed))
        return tuple(EnvIssue(*item) for item in issues.items())
    if is_collector:
        checks.check_key(key)
        with _record_exceptions(issues):
            _play(issues, env, params, key, num_steps)
        return tuple(EnvIssue(*item) for item in issues.items())
    with _record_exceptions(issues), jax.debug_key_reuse(False):
        key = jax.random.key(seed)
        lanes: Any = vectorize(env, _NUM_LANES)
        collector = Collector(env=lanes, policy=_random_policy(lanes))
        # `step` checks the environment's outputs while JAX traces it.
        params = _params_of(env)
        jax.eval_shape(lambda key: collector.step(collector.init(key), params), key)
        spaces = {
            "observation_space": lanes.observation_space,
            "action_space": lanes.action_space,
        }
        for name, space in spaces.items():
            contains_fn = _contains_samples(space)
            if not np.all(contains_fn(jax.random.split(key, _NUM_LANES))):
                issues[name] = "`contains` must be True for every sample of `sample`"
        _check_traces(issues, lanes.env if has_agents(env) else env)
        if has_agents(env) and lanes.env.layout.simultaneous:
            _check_simultaneous(issues, lanes.env, key)
        # An exception after other issues is most likely a consequence of them.
        with contextlib.suppress(Exception) if issues else contextlib.nullcontext():
            _play(issues, collector, params, key, num_steps)
    return tuple(EnvIssue(*item) for item in issues.items())


@contextlib.contextmanager
def _record_exceptions(issues: dict[str, str]) -> Iterator[None]:
    """Records an exception as an issue that begins with the user's line of code."""
    try:
        yield
    except EnvFault as fault:
        issues["fault"] = str(fault)
    except ImportError:  # a missing package is no mistake of the environment
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [x for x in frames if not x.filename.startswith(_LIBRARY_PATHS)]
        if frames:
            location = f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`"
            message = f"{type(error).__name__}: {error}".split("\n")[0]
            issues["raises"] = f"{location} raised {message}"
        else:  # raised by a check of this library
            issues["contract"] = str(error)


def _random_policy(env: Any) -> Policy:
    """Samples actions from the space, or valid actions if there is an action mask.

    With several agents, the parameters are `_params_of(env)`.
    """
    if has_agents(env):
        return random_policy_map(env)
    space, num_envs = as_space(env.action_space, "action_space"), env.num_envs
    action_mask_fn = masks.find_mask(env.observation_space, space)
    if action_mask_fn is not None:
        return random_policy(space, action_mask_fn=action_mask_fn)

    def sample_action(params: Any, obs: Any, key: chex.PRNGKey) -> Any:
        del params, obs  # unused
        # Return a pair: an action that is a tuple would be read as (action, extras).
        return jax.vmap(space.sample)(jax.random.split(key, num_envs)), {}

    return stateless_policy(sample_action)


def _params_of(env: Any) -> Any:
    """Returns the parameters of `_random_policy`."""
    return dict.fromkeys(env.groups) if has_agents(env) else None


@programs.shared
def _contains(space: Space) -> Any:
    return jax.jit(jax.vmap(space.contains))


@programs.shared
def _contains_samples(space: Space) -> Any:
    return jax.jit(jax.vmap(lambda key: space.contains(space.sample(key))))


def _check_traces(issues: dict[str, str], env: Env) -> None:
    """Traces one environment to check dtypes, structure and the use of keys."""
    key = jax.eval_shape(jax.random.key, 0)
    action = jax.eval_shape(as_space(env.action_space).sample, key)
    state, obs = jax.eval_shape(env.reset, key)
    step = jax.eval_shape(env.step, key, state, action)
    for name, tree in (("obs", (obs, step.obs)), ("state", (state, step.state))):
        weak = [(p, x) for p, x in jax.tree.leaves_with_path(tree) if x.weak_type]
        if weak:
            path, dtype = jax.tree_util.keystr(weak[0][0][1:]), weak[0][1].dtype
            issues.setdefault(
                "weak_type",
                f"`{name}{path}` must not be weakly typed: write `jnp.{dtype}(0)`, "
                "not `0`",
            )
    try:
        sample = jax.eval_shape(as_space(env.observation_space).sample, key)
        checks.check_same_types("an observation must match its space", sample, obs)
    except ValueError as error:
        issues["obs"] = str(error)
    calls = ("reset", env.reset, (key,)), ("step", env.step, (key, state, action))
    for name, method, args in calls:
        if message := _key_message(method, *args):
            issues.setdefault("key", f"`{name}` {message}")


def _check_simultaneous(issues: dict[str, str], joint: Any, key: chex.PRNGKey) -> None:
    """Checks `simultaneous` by playing one step of the turn-based environment."""
    env = joint.replace(layout=joint.layout._replace(simultaneous=False))

    @jax.jit
    def play(key: chex.PRNGKey) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        state, obs = env.reset(keys[0])
        result = env.step(keys[1], state, env.action_space.sample(keys[2]))
        # `waiting` marks agents that do not act next although their episode continues.
        done = result.terminated | result.truncated
        return [obs[ACTING], ~result.info.agents.waiting | done]

    for number, acting in enumerate(play(key), 1):
        if not acting.all():
            message = (
                "`simultaneous` must be True only if every agent that has not ended "
                f"acts at every step, got `acting` {acting.tolist()} before step "
                f"{number}: leave it out"
            )
            issues.setdefault("contract", message)


def _key_message(fn: Any, *args: Any) -> str:
    """Returns a message about misused keys, or an empty string if there are none."""
    try:
        with jax.debug_key_reuse(True):
            jax.eval_shape(lambda *x: fn(*x), *args)
    except jax.errors.KeyReuseError:
        return "uses a key twice: split it into one for each use"
    # NumPy and Python sample at trace time, so their constants differ between traces.
    jaxpr, second_jaxpr = (jax.make_jaxpr(lambda *x: fn(*x))(*args) for _ in range(2))
    if "random_seed[" in str(jaxpr) or any(map(trees.has_keys, jaxpr.consts)):
        return "samples from a key that it creates: derive all keys from its argument"
    # Remove the addresses of functions, which differ between traces.
    texts = {re.sub("0x[0-9a-f]+", "", str(x)) for x in (jaxpr, second_jaxpr)}
    is_same = all(map(np.array_equal, jaxpr.consts, second_jaxpr.consts))
    if len(texts) > 1 or not is_same:
        return "differs between two traces: NumPy and Python sample only at trace time"
    return ""


def _play(
    issues: dict[str, str], collector: Any, params: Any, key: Any, num_steps: int
) -> None:
    """Collects steps and checks the recorded transitions."""
    # Collect in chunks, so that many large observations fit in memory.
    env, size = collector.env, min(num_steps, _CHUNK)
    carry, counts, lengths = collector.init(key), np.zeros(3, int), set()
    spaces = as_space(env.observation_space), as_space(env.action_space)
    for _ in range(0, num_steps, size):
        carry, rows = collector.collect_steps(carry, params, size)
        rows = jax.device_get(rows)
        overlap = rows.terminated & rows.truncated
        counts += [
            x.sum() for x in (rows.terminated | rows.truncated, rows.truncated, overlap)
        ]
        lengths.update(rows.episode_length[rows.terminated].tolist())
        _check_rows(issues, rows, *spaces, check_action=not has_agents(env))
    num_ended, num_truncated, num_both = counts
    is_fixed = len(lengths) == 1 and lengths != {1}
    if not num_ended:
        message = (
            f"no episode ended in {num_steps} steps: take more `num_steps`, or limit "
            "episodes by `TimeLimit`"
        )
        issues["ending"] = message
    # One or two coincidences are possible. If all flags coincide, the environment
    # sets both flags at its time limit.
    elif num_both == num_truncated >= 3:
        issues["ending"] = (
            f"each of the {num_both} truncations is also a termination, so no time "
            "limit is bootstrapped: set `terminated` only if the task itself ended"
        )
    # Episodes of one step are bandits. After other issues, equal lengths may be a
    # consequence of them.
    elif num_ended >= 3 and is_fixed and not (num_truncated or issues):
        issues["ending"] = (
            f"each of the {num_ended} episodes terminates at step {min(lengths)}, "
            "which is correct only if the task has this length: at a time limit, set "
            "`truncated` instead of `terminated`"
        )


def _check_rows(
    issues: dict[str, str],
    rows: Transition,
    observation_space: Space,
    action_space: Space,
    *,
    check_action: bool,
) -> None:
    """Reports invalid entries of rows `[T, B, ...]`."""

    def report(name: str, flag: Any, text_fn: Callable[[int], str], end: bool) -> None:
        for index in np.flatnonzero(flag & (rows.mask | (not end)).ravel())[:1]:
            step = rows.episode_length.ravel()[index] if end else 0
            issues.setdefault(name, f"{text_fn(index)}{_describe_step(step)}")

    def check(name: str, space: Space, tree: Any, mask: Any, end: bool) -> None:
        if isinstance(tree, tuple) and not tree:  # not recorded
            return
        # Do not use -1 for the batch size: leaves may have no entries.
        flat = jax.tree.map(
            lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree
        )
        causes = SpaceCheck(space, name).find_invalid(flat) or {
            int(index): f"`{name}` must be an element of its space, got "
            f"{jax.tree.map(lambda x, index=index: x[index], flat)}"
            for index in np.flatnonzero(~np.asarray(_contains(space)(flat)))
        }
        flag = np.isin(np.arange(rows.mask.size), list(causes)) & mask.ravel()
        report(name, flag, lambda index: str(causes[index]), end)

    check("obs", observation_space, rows.obs, rows.first, end=False)
    check("obs", observation_space, rows.next_obs, rows.mask, end=True)
    if check_action:
        check("action", action_space, rows.action, rows.mask, end=True)
    flags = {**nonfinite(rows), "reward": ~np.isfinite(rows.reward)}
    for name, flag in flags.items():
        if name.split(".")[0] in ("reward", "extras", "final_value"):
            text = f"`{name}` must be finite"
            if name == "reward" and flag.any():
                text += f", got {rows.reward[flag][0]}"
            report(name.split(".")[0], np.ravel(flag), lambda _, text=text: text, True)


def _describe_step(number: Any) -> str:
    """Describes a step of an episode for a message; 0 is the start."""
    if not number:
        return ", at the start of an episode"
    return f", at step {number} of an episode"


def _check_host_env(
    issues: dict[str, str], env: HostVectorEnv, num_steps: int, key: chex.PRNGKey
) -> None:
    """Plays host environments several times; each pass changes one factor."""
    _check_by_gymnasium(issues, env)
    checked_env, random = _CheckedHostEnv(env), _random_policy(env)
    no_lanes = np.zeros(env.num_envs, bool)
    other_lanes = np.arange(env.num_envs) > 0

    # The actions of a pass depend only on a key. The lanes in `mask` use another key.
    def act(mask: Any, obs: ArrayTree, key: chex.PRNGKey) -> tuple[ArrayTree, dict]:
        keys = key, jax.random.fold_in(key, 1)
        # The state of a random policy does not change.
        args = _params_of(env), obs, random.init(env.num_envs)
        action, other_action = (random.apply(*args, x).action for x in keys)
        return trees.select(mask, other_action, action), {}  # as in `sample_action`

    collector = HostCollector(env=checked_env, policy=stateless_policy(act))
    _play(issues, collector, no_lanes, key, num_steps)

    def play(reseed_mask: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the checksums `[T, B]` of a pass, and the step numbers `[T, B]`."""
        checked_env.reseed_mask, checked_env.truncate_mask = reseed_mask, mask
        carry, blocks, size = collector.init(key), [], min(num_steps, _CHUNK)
        for _ in range(0, num_steps, size):
            carry, rows = collector.collect_steps(carry, mask, size)
            blocks.append((_checksums(rows), rows.episode_length))
        return tuple(map(np.concatenate, zip(*blocks, strict=True)))

    # Comparisons are meaningful only if two passes with equal seeds agree.
    (sums, length), (repeat_sums, _) = (play(no_lanes, no_lanes) for _ in range(2))
    if (mismatch := repeat_sums != sums).any():
        t, lane = np.argwhere(mismatch)[0]
        message = f"equal seeds start different episodes of environment {lane}"
        issues["seed"] = message + _describe_step(length[t, lane])
        return
    if (play(~no_lanes, no_lanes)[0] == sums).all():
        issues["seed"] = (
            "different seeds start equal episodes, which is correct only if the "
            "environment is deterministic"
        )
    if (mismatch := play(other_lanes, other_lanes)[0][:, 0] != sums[:, 0]).any():
        message = "environment 0 depends on seeds and actions of other environments"
        issues["shared"] = message + _describe_step(length[mismatch.argmax(), 0])
    inner = wrapped_env(env)
    inner = env if inner is None else inner
    if not type(inner).__module__.startswith("rollout.envs.host."):
        checked_env.issues = issues
        with contextlib.suppress(_StepAfterEnd):
            play(no_lanes, no_lanes)


def _check_by_gymnasium(issues: dict[str, str], env: HostVectorEnv) -> None:
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(env, LocalEnvs):
        return
    single_env = env.make_fns[0]()
    if isinstance(single_env, gymnasium.Env):
        checker = importlib.import_module("gymnasium.utils.env_checker")
        try:
            with warnings.catch_warnings(action="ignore"):  # warnings concern style
                checker.check_env(single_env, skip_render_check=True)
        except ImportError as error:
            raise ModuleNotFoundError(
                "Gymnasium's checker needs a package for this environment: "
                f"{error}. Install the package, for example with pip.",
                name=error.name,
            ) from error
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the environment may be faulty
                space, (obs, _) = single_env.observation_space, single_env.reset(seed=0)
                message += "".join(_entries_outside(space, obs, "observation"))
            issues["gymnasium"] = message
    close(single_env)


def _entries_outside(space: Any, value: Any, name: str) -> Iterator[str]:
    """Describes the entries of an observation outside of Gymnasium's space."""
    if hasattr(space, "spaces") and isinstance(value, dict | tuple):  # Dict or Tuple
        is_dict = isinstance(value, dict)
        for key, inner in space.spaces.items() if is_dict else enumerate(space.spaces):
            yield from _entries_outside(inner, value[key], f"{name}[{key!r}]")
    elif not space.contains(value):
        yield f" `{name}` is {checks.describe(value)}, outside of {space}."


class _StepAfterEnd(Exception):  # noqa: N818
    """Ends the pass after a step beyond the end of an episode."""


class _CheckedHostEnv(HostVectorEnv):
    """Wraps host environments and checks their contract at every call.

    Attributes:
        reseed_mask: `[B]` bool, lanes whose seeds differ from the collector's seeds.
        truncate_mask: `[B]` bool, lanes to truncate at every seventh step.
        issues: issues by name, to which an environment that continues after the end is
            added. The first end of an episode ends the pass. None skips this check.
    """

    def __init__(self, env: HostVectorEnv) -> None:
        self.env, self.num_envs = env, env.num_envs
        self.observation_space = as_space(env.observation_space, "observation_space")
        self.action_space = env.action_space
        self.reseed_mask = self.truncate_mask = np.zeros(env.num_envs, bool)
        self.issues: dict[str, str] | None = None
        self._num_steps = 0
        self._obs: ArrayTree = None  # a copy of the latest observations
        keys = jax.random.split(jax.random.key(0), env.num_envs)
        obs = jax.eval_shape(jax.vmap(self.observation_space.sample), keys)
        flag: Any = jax.ShapeDtypeStruct((env.num_envs,), bool)
        # The collector checks the structure of `info`.
        self._spec = HostStep(
            obs, flag.update(dtype=np.float32), flag, flag, flag, info=None
        )

    def at_episodes(self, numbers: np.ndarray) -> None:
        self.env.at_episodes(numbers)

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        obs = self.env.reset(np.where(self.reseed_mask, ~seeds, seeds), mask.copy())
        checks.check_same_types(
            "`reset` must return observations [B, ...]", self._spec.obs, obs
        )
        old, self._obs = self._obs, jax.tree.map(np.array, obs)
        if not mask.all():
            pairs = zip(*map(jax.tree.leaves, (old, obs)), strict=True)
            if not all(np.array_equal(x[~mask], y[~mask]) for x, y in pairs):
                text = "`reset` must not change the observations of other environments"
                raise ValueError(f"{text}.")
        return obs

    def step(self, action: ArrayTree) -> HostStep:
        step = self.env.step(action)
        checks.check_type(
            "`step` must return a `rollout.envs.host.HostStep`", step, HostStep
        )
        outputs = step._replace(info=None, mask=None, causes={}, raw_reward=None)
        checks.check_same_types(
            "`step` must return a `HostStep` of [B, ...]", self._spec, outputs
        )
        self._obs = jax.tree.map(np.array, step.obs)
        ended = step.terminated | step.truncated
        if self.issues is not None and ended.any():
            with contextlib.suppress(Exception):  # an exception is also valid
                result = self.env.step(action)
                stopped = result.terminated | result.truncated | result.faulty
                is_running = ended & ~stopped
                if result.mask is not None:  # False if the step was a reset
                    is_running &= result.mask
                if is_running.any():
                    lane = is_running.argmax()
                    text = f"environment {lane} continues after the end: if it resets "
                    text += "itself, `obs` at the end is not the true successor"
                    self.issues.setdefault("ending", text)
            raise _StepAfterEnd
        self._num_steps += 1
        cutoff = self.truncate_mask & (self._num_steps % 7 == 0)
        return step._replace(truncated=step.truncated | cutoff)


def _checksums(rows: Transition) -> np.ndarray:
    """Returns checksums `[T, B]` of the environments' outputs in each row."""
    outputs = rows.obs, rows.next_obs, rows.reward, rows.terminated, rows.truncated
    leaves = jax.tree.leaves(jax.device_get(outputs))
    sums = np.zeros(rows.reward.shape, np.uint32)
    for index in np.ndindex(sums.shape):
        for leaf in leaves:
            sums[index] = zlib.crc32(leaf[index].tobytes(), int(sums[index]))
    return sums
