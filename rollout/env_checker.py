"""`check_env`: plays environments of any kind and reports their mistakes, by name."""

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

from rollout import checks, programs
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.host.local_envs import LocalEnvs, close
from rollout.envs.host.space_check import SpaceCheck
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv, check_host_env
from rollout.envs.multi_agent import ACTING, has_agents
from rollout.envs.spaces import Space, as_space
from rollout.envs.types import ArrayTree, Env, VectorEnv
from rollout.envs.vectorize import vectorize
from rollout.host.host_collector import HostCollector
from rollout.nonfinite import nonfinite
from rollout.policies import masks
from rollout.policies.basic import random_policy, stateless_policy
from rollout.types import EnvIssue, Policy, Transition

_NUM_LANES = 8
_CHUNK = 100  # steps whose rows are held at a time
_NOT_THE_USERS = (*(os.path.dirname(x) + os.sep for x in (__file__, jax.__file__)), "<")


def check_env(
    env: Any,
    params: Any = None,
    key: chex.PRNGKey | None = None,
    *,
    num_steps: int | None = None,
    seed: int = 0,
) -> tuple[EnvIssue, ...]:
    r"""Looks for common mistakes of new environments, or of a policy in them.

        print(*rollout.check_env(env), sep="\n")
        print(*rollout.check_env(collector, params, key), sep="\n")

    An exception of the environment is an issue too, and is not raised. An `Env` or a
    `MultiAgentEnv` is traced and, if nothing was found by that, plays random actions;
    with an `action_mask` in the observation, allowed ones. The names of issues:

    - `raises`: `reset` or `step` raised, for instance because Python's `if` reads an
      array; the message begins with the line.
    - `contract`: the structure, shape or dtype of a result is not as promised: the
      state changes it from `reset` to `step`, a reward has the shape (1,), a flag is a
      float, not all agents act where `simultaneous` is True.
    - `observation_space`, `action_space`: it does not contain what it draws itself.
    - `obs`: an observation, of several agents also of one that does not act, has
      another structure, shape or dtype than its space, or is outside, or not finite.
    - `reward`: one is not finite.
    - `weak_type`: a leaf of `obs` or of the state is weakly typed.
    - `key`: a key is used twice; random numbers come from a key that the environment
      makes itself, or from NumPy or Python, so that every episode has the same. A start
      that draws nothing may be the same for all keys.
    - `ending`: no episode ended; or every truncation is a termination, too, so that no
      time limit is bootstrapped.

    Of a collector: its own policy plays, and besides `raises`, `contract`, `obs`,
    `reward` and `ending` there are

    - `action`: one is not in the action space.
    - `extras`, `final_value`: one is not finite.

    Of a `HostVectorEnv`: where it is of Gymnasium, one is first checked by
    `gymnasium.utils.env_checker`. Then a `HostCollector` plays it several times over.

    - `gymnasium`: what its checker says, without its warnings.
    - `raises`, `contract`, `ending` are as above. `contract` is also that a reset of
      some changes observations of the others.
    - `fault`: an environment failed: it raised, for instance because a flag is no bool;
      an observation is outside its space; a reward is not finite.
    - `seed`: the same seed starts another episode; or other seeds start the same one,
      which is right only where nothing is random.
    - `shared`: environments share memory or state, so the first depends on the others.
    - `ending` is also that an environment plays on after its end, for instance because
      it resets itself: `obs` at an ending is then no true successor. Gymnasium leaves
      open what a step after the end does, so it is not asked of its environments.

    Steps are numbered from 1 in each episode.

    Args:
        env: one environment in JAX, before `vectorize`; or `B` host environments, left
            in any state: use them for nothing else. One of them alone cannot show
            `shared`. Or a collector of either kind.
        params: of a collector's policy.
        key: of its episodes, one typed key.
        num_steps: steps of each pass, at least 1; by default 1,000 in JAX, and 200 of
            host environments.
        seed: of the actions and of the episodes, at least 0.

    Returns:
        The first issue of each name, in the order found; empty if there are none.

    Raises:
        ValueError: if `env` is no such environment, or an option is not as above.
    """
    collects = isinstance(env, Collector | HostCollector)
    many: Any = env
    is_host = hasattr(many, "num_envs") and not isinstance(many, VectorEnv)
    if not is_host and not collects:
        checks.single(env)
    if num_steps is None:
        num_steps = 200 if is_host else 1000
    checks.int_between("num_steps", num_steps)
    checks.int_between("seed", seed, least=0, most=None)
    found: dict[str, str] = {}
    if is_host:
        check_host_env(env)
        with _reporting(found):
            _check_host_env(found, env, num_steps, jax.random.key(seed))
        return tuple(EnvIssue(*item) for item in found.items())
    if collects:
        checks.typed_key(key)
        with _reporting(found):
            _play(found, env, params, key, num_steps)
        return tuple(EnvIssue(*item) for item in found.items())
    with _reporting(found), jax.debug_key_reuse(False):
        key = jax.random.key(seed)
        lanes: Any = vectorize(env, _NUM_LANES)
        collector = Collector(env=lanes, policy=_random_policy(lanes))
        # A step checks what the environment returns.
        jax.eval_shape(lambda key: collector.step(collector.init(key), None), key)
        for name in ("observation_space", "action_space"):
            draw = _samples_itself(getattr(lanes, name))
            if not np.all(draw(jax.random.split(key, _NUM_LANES))):
                found[name] = "`contains` must be True of what `sample` draws"
        _check_traces(found, lanes.env if has_agents(env) else env)
        if has_agents(env) and lanes.env.layout.simultaneous:
            _check_simultaneous(found, lanes.env, key)
        # After other issues a failure of the play says nothing new.
        with contextlib.suppress(Exception) if found else contextlib.nullcontext():
            _play(found, collector, None, key, num_steps)
    return tuple(EnvIssue(*item) for item in found.items())


@contextlib.contextmanager
def _reporting(found: dict[str, str]) -> Iterator[None]:
    """Makes an exception an issue, which begins with the user's own line."""
    try:
        yield
    except EnvFault as fault:
        found["fault"] = str(fault)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [x for x in frames if not x.filename.startswith(_NOT_THE_USERS)]
        if own:
            where = f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`"
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            found["raises"] = f"{where} raised {what}"
        else:  # one of our checks
            found["contract"] = str(error)


def _random_policy(env: VectorEnv | HostVectorEnv) -> Policy:
    """Draws actions from the space itself, unless there is a mask."""
    space, num_envs = as_space(env.action_space, "action_space"), env.num_envs
    action_mask_fn = masks.find(env.observation_space, space)
    if action_mask_fn is not None:
        return random_policy(space, action_mask_fn=action_mask_fn)

    def draw(params: Any, obs: Any, key: chex.PRNGKey) -> Any:
        del params, obs  # unused
        return jax.vmap(space.sample)(jax.random.split(key, num_envs))

    return stateless_policy(draw)


@programs.shared
def _contains(space: Space) -> Any:
    return jax.jit(jax.vmap(space.contains))


@programs.shared
def _samples_itself(space: Space) -> Any:
    return jax.jit(jax.vmap(lambda key: space.contains(space.sample(key))))


def _check_traces(found: dict[str, str], env: Env) -> None:
    """Traces one environment: its types, and where its random numbers come from."""
    key = jax.eval_shape(jax.random.key, 0)
    action = jax.eval_shape(as_space(env.action_space).sample, key)
    state, obs = jax.eval_shape(env.reset, key)
    step = jax.eval_shape(env.step, key, state, action)
    for name, tree in (("obs", (obs, step.obs)), ("state", (state, step.state))):
        weak = [p for p, x in jax.tree.leaves_with_path(tree) if x.weak_type]
        if weak:
            where = jax.tree_util.keystr(weak[0][1:])
            what = "must not be weakly typed: write `jnp.float32(0)`, not `0.0`"
            found.setdefault("weak_type", f"`{name}{where}` {what}")
    try:
        drawn = jax.eval_shape(as_space(env.observation_space).sample, key)
        checks.same("an observation must be as its space has it", drawn, obs)
    except ValueError as error:
        found["obs"] = str(error)
    for name, *args in (("reset", key), ("step", key, state, action)):
        if message := _find_own_randomness(getattr(env, name), *args):
            found.setdefault("key", f"`{name}` {message}")


def _check_simultaneous(found: dict[str, str], joint: Any, key: chex.PRNGKey) -> None:
    """Lets agents that all act, as they say, take turns for a step."""
    turns = joint.replace(layout=joint.layout._replace(simultaneous=False))

    @jax.jit
    def play(key: chex.PRNGKey) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        state, obs = turns.reset(keys[0])
        result = turns.step(keys[1], state, turns.action_space.sample(keys[2]))
        # An agent that goes on and does not act next waits for an answer.
        done = result.terminated | result.truncated
        return [obs[ACTING], ~result.info.agents.waiting | done]

    for number, acting in enumerate(play(key), 1):
        if not acting.all():
            what = (
                "`simultaneous` must be True only if every agent that has not ended "
                f"acts at every step, got `acting` {acting.tolist()} before step "
                f"{number}: leave it out"
            )
            found.setdefault("contract", what)


def _find_own_randomness(fn: Any, *args: Any) -> str:
    """Says what is wrong with the keys of a function; empty if nothing is."""
    try:
        with jax.debug_key_reuse(True):
            jax.eval_shape(lambda *x: fn(*x), *args)
    except jax.errors.KeyReuseError:
        return "uses a key twice: split it into one for each use"
    # Traced twice: what NumPy or Python draw while tracing is a constant, and differs.
    one, other = (jax.make_jaxpr(lambda *x: fn(*x))(*args) for _ in range(2))
    if "random_seed[" in str(one) or any(map(trees.has_keys, one.consts)):
        return "draws from a key of its own: derive all keys from its argument"
    # Without addresses, which the text of functions has.
    programs = {re.sub("0x[0-9a-f]+", "", str(x)) for x in (one, other)}
    is_same = all(map(np.array_equal, one.consts, other.consts))
    if len(programs) > 1 or not is_same:
        return "is another function when traced again: NumPy and Python draw only then"
    return ""


def _play(
    found: dict[str, str], collector: Any, params: Any, key: Any, num_steps: int
) -> None:
    """Collects steps, and looks at what they recorded."""
    # In chunks, so that long probes of large observations fit in memory.
    env, size = collector.env, min(num_steps, _CHUNK)
    carry, counts = collector.init(key), np.zeros(3, int)
    spaces = as_space(env.observation_space), as_space(env.action_space)
    for _ in range(0, num_steps, size):
        carry, rows = collector.collect_steps(carry, params, size)
        rows = jax.device_get(rows)
        both = rows.terminated & rows.truncated
        counts += [
            x.sum() for x in (rows.terminated | rows.truncated, rows.truncated, both)
        ]
        _look(found, rows, *spaces, acts=not has_agents(env))
    num_ended, num_truncated, num_both = counts
    if not num_ended:
        what = f"no episode ended in {num_steps} steps: take more `num_steps`"
        found["ending"] = what
    # A few may coincide; if all do, the environment sets both flags at its limit.
    elif num_both == num_truncated >= 3:
        found["ending"] = (
            f"each of the {num_both} truncations is a termination, too, so no time "
            "limit is bootstrapped: set `terminated` only where the task itself ended"
        )


def _look(
    found: dict[str, str],
    rows: Transition,
    observation_space: Space,
    action_space: Space,
    *,
    acts: bool,
) -> None:
    """Finds entries of rows `[T, B, ...]` that are not as they should be."""

    def report(name: str, bad: Any, say: Callable[[int], str], end: bool) -> None:
        for at in np.flatnonzero(bad & (rows.mask | (not end)).ravel())[:1]:
            step = rows.episode_length.ravel()[at] if end else 0
            found.setdefault(name, f"{say(at)}{_at_step(step)}")

    def check(name: str, space: Space, tree: Any, rows_of: Any, end: bool) -> None:
        if isinstance(tree, tuple) and not tree:  # not recorded
            return
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
        causes = SpaceCheck(space, name).find(flat) or {
            int(at): f"`{name}` must be an element of its space, got "
            f"{jax.tree.map(lambda x, at=at: x[at], flat)}"
            for at in np.flatnonzero(~np.asarray(_contains(space)(flat)))
        }
        bad = np.isin(np.arange(rows.mask.size), list(causes)) & rows_of.ravel()
        report(name, bad, lambda at: str(causes[at]), end)

    check("obs", observation_space, rows.obs, rows.first, end=False)
    check("obs", observation_space, rows.next_obs, rows.mask, end=True)
    if acts:
        check("action", action_space, rows.action, rows.mask, end=True)
    named = {**nonfinite(rows), "reward": ~np.isfinite(rows.reward)}
    for name, bad in named.items():
        if name.split(".")[0] in ("reward", "extras", "final_value"):
            what = f"`{name}` must be finite"
            value = (
                f", got {rows.reward[bad][0]}" if name == "reward" and bad.any() else ""
            )
            text = what + value
            report(name.split(".")[0], np.ravel(bad), lambda at, text=text: text, True)


def _at_step(number: Any) -> str:
    """Names a step of an episode by its number from 1, for a message."""
    if not number:
        return ", at the start of an episode"
    return f", at step {number} of an episode"


def _check_host_env(
    found: dict[str, str], env: HostVectorEnv, num_steps: int, key: chex.PRNGKey
) -> None:
    """Plays host environments over and over; each pass changes one thing."""
    _check_by_gymnasium(found, env)
    watched, random = _Watched(env), _random_policy(env)
    nobody = np.zeros(env.num_envs, bool)
    others = np.arange(env.num_envs) > 0

    # The actions of a pass depend on the key alone, but in some lanes on another one.
    def draw(is_other: Any, obs: ArrayTree, key: chex.PRNGKey) -> ArrayTree:
        keys = key, jax.random.fold_in(key, 1)
        same, other = (random.apply(None, obs, (), key).action for key in keys)
        return trees.select(is_other, other, same)

    collector = HostCollector(env=watched, policy=stateless_policy(draw))
    _play(found, collector, nobody, key, num_steps)

    def play(reseeded: np.ndarray, is_other: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns checksums `[T, B]` of a pass, and the steps' numbers."""
        watched.reseeded, watched.cut = reseeded, is_other
        carry, blocks, size = collector.init(key), [], min(num_steps, _CHUNK)
        for _ in range(0, num_steps, size):
            carry, rows = collector.collect_steps(carry, is_other, size)
            blocks.append((_checksums(rows), rows.episode_length))
        return tuple(map(np.concatenate, zip(*blocks, strict=True)))

    # Two equal passes must agree, or the others show nothing.
    (first, length), (again, _) = play(nobody, nobody), play(nobody, nobody)
    if (differs := again != first).any():
        t, at = np.argwhere(differs)[0]
        what = f"the same one starts another episode of environment {at}"
        found["seed"] = what + _at_step(length[t, at])
        return
    if (play(~nobody, nobody)[0] == first).all():
        found["seed"] = "others start the same episodes: right if nothing is random"
    if (differs := play(others, others)[0][:, 0] != first[:, 0]).any():
        what = "environment 0 depends on the seeds and actions of the others"
        found["shared"] = what + _at_step(length[differs.argmax(), 0])
    inner: Any = getattr(env, "env", env)
    if not type(inner).__module__.startswith("rollout.envs.host."):
        watched.found = found
        with contextlib.suppress(_Beyond):
            play(nobody, nobody)


def _check_by_gymnasium(found: dict[str, str], env: HostVectorEnv) -> None:
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(env, LocalEnvs):
        return
    one = env.make_fns[0]()
    if isinstance(one, gymnasium.Env):
        checker = importlib.import_module("gymnasium.utils.env_checker")
        try:
            with warnings.catch_warnings(action="ignore"):  # of its own style
                checker.check_env(one, skip_render_check=True)
        except Exception as error:
            found["gymnasium"] = f"{type(error).__name__}: {error}"
    close(one)


class _Beyond(Exception):  # noqa: N818
    """Raised after a step beyond an ending, after which nothing can be played."""


class _Watched(HostVectorEnv):
    """Host environments that are held to the contract at every call.

    Attributes:
        reseeded: `[B]` bool, lanes that get other seeds than the collector gives.
        cut: `[B]` bool, lanes whose episodes are cut after every seventh step.
        found: where to report environments that play on after their end, which the
            first ending then shows; None not to look.
    """

    def __init__(self, env: HostVectorEnv) -> None:
        self.env, self.num_envs = env, env.num_envs
        self.observation_space = as_space(env.observation_space, "observation_space")
        self.action_space = env.action_space
        self.reseeded = self.cut = np.zeros(env.num_envs, bool)
        self.found: dict[str, str] | None = None
        self._number = 0  # of the step
        self._obs: ArrayTree = None  # a copy of the last one
        keys = jax.random.split(jax.random.key(0), env.num_envs)
        obs = jax.eval_shape(jax.vmap(self.observation_space.sample), keys)
        flag: Any = jax.ShapeDtypeStruct((env.num_envs,), bool)
        # The collector itself finds an `info` that changes its structure.
        self._like = HostStep(
            obs, flag.update(dtype=np.float32), flag, flag, flag, info=None
        )

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        obs = self.env.reset(np.where(self.reseeded, ~seeds, seeds), mask.copy())
        checks.same("`reset` must return observations [B, ...]", self._like.obs, obs)
        old, self._obs = self._obs, jax.tree.map(np.array, obs)
        if not mask.all():
            pairs = zip(*map(jax.tree.leaves, (old, obs)), strict=True)
            if not all(np.array_equal(x[~mask], y[~mask]) for x, y in pairs):
                what = "`reset` must leave the observations of others as they are"
                raise ValueError(f"{what}.")
        return obs

    def step(self, action: ArrayTree) -> HostStep:
        step = self.env.step(action)
        checks.kind("`step` must return a `rollout.envs.host.HostStep`", step, HostStep)
        got = step._replace(info=None, mask=None, causes={}, raw_reward=None)
        checks.same("`step` must return a `HostStep` of [B, ...]", self._like, got)
        self._obs = jax.tree.map(np.array, step.obs)
        ended = step.terminated | step.truncated
        if self.found is not None and ended.any():
            with contextlib.suppress(Exception):  # which is as good as to end there
                after = self.env.step(action)
                goes_on = ended & ~(after.terminated | after.truncated | after.faulty)
                if after.mask is not None:  # False where it reset itself, and says so
                    goes_on &= after.mask
                if goes_on.any():
                    what = f"environment {goes_on.argmax()} plays on after its end: if "
                    what += "it resets itself, `obs` at an ending is no true successor"
                    self.found.setdefault("ending", what)
            raise _Beyond
        self._number += 1
        cut = self.cut & (self._number % 7 == 0)
        return step._replace(truncated=step.truncated | cut)


def _checksums(rows: Transition) -> np.ndarray:
    """Returns `[T, B]`, one checksum for the answers in each row of each lane."""
    answers = rows.obs, rows.next_obs, rows.reward, rows.terminated, rows.truncated
    leaves = jax.tree.leaves(jax.device_get(answers))
    sums = np.zeros(rows.reward.shape, np.uint32)
    for at in np.ndindex(sums.shape):
        for leaf in leaves:
            sums[at] = zlib.crc32(leaf[at].tobytes(), int(sums[at]))
    return sums
