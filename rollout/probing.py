"""`probe`: plays environments of any kind and reports their mistakes, by name."""

import contextlib
import os
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import numpy as np

from rollout import checks, programs
from rollout.collector import Collector
from rollout.envs import prng
from rollout.envs.host import probe as host_probe
from rollout.envs.host.probe import Finding
from rollout.envs.host.space_check import SpaceCheck
from rollout.envs.spaces import Space, as_space
from rollout.envs.types import Env, VectorEnv
from rollout.envs.vectorize import vectorize
from rollout.envs.wrappers.wrapper import has_agents
from rollout.nonfinite import nonfinite
from rollout.policies import masks
from rollout.policies.basic import random_policy, stateless_policy
from rollout.types import Policy, Transition

_NUM_LANES = 8
_CHUNK = 100  # steps whose rows are held at a time
_NOT_THE_USERS = (*(os.path.dirname(x) + os.sep for x in (__file__, jax.__file__)), "<")


def probe(
    env: Any,
    key: chex.PRNGKey | None = None,
    params: Any = None,
    *,
    num_steps: int | None = None,
    seed: int = 0,
) -> tuple[Finding, ...]:
    r"""Looks for common mistakes of new environments, or of a policy in them.

        print(*rollout.probe(env), sep="\n")
        print(*rollout.probe(collector, key, params), sep="\n")

    An exception of the environment is a finding too, and is not raised. An `Env` or a
    `MultiAgentEnv` is traced and, if nothing was found by that, plays random actions;
    with an `action_mask` in the observation, allowed ones. The names of findings:

    - `raises`: `reset` or `step` raised, for instance because Python's `if` reads an
      array; the message begins with the line.
    - `contract`: the structure, shape or dtype of a result is not as promised: the
      state changes it from `reset` to `step`, a reward has the shape (1,), a flag is a
      float.
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
    `gymnasium.utils.env_checker`. Then it is played several times over.

    - `gymnasium`: what its checker says, without its warnings.
    - `observation_space`, `action_space`: its elements are not arrays of one kind.
    - `raises`: a call raised. `fault`: an environment failed, for instance because a
      flag is no bool, or an observation has another shape than its space.
    - `step`, `obs`, `reward`, `terminated`, `truncated`, `faulty`, `mask`, `info`: its
      structure, shape or dtype is not that of `HostStep`, or differs from the first
      step; an observation is outside its space; a reward is not finite.
    - `action`: `step` writes to it.
    - `reset`: resetting some environments changes observations of the others.
    - `shared`: environments share memory or state, so the first depends on the others.
    - `seed`: the same seed starts another episode; or other seeds start the same one,
      which is right only where nothing is random.
    - `ending`: no episode ended; or an environment plays on after its end, for instance
      because it resets itself: `obs` at an ending is then no true successor; or every
      truncation is a termination, too.
    - `note`: nothing need be done. An environment of Gymnasium plays on after its end,
      where collectors reset it.

    Steps are numbered from 1 in each episode.

    Args:
        env: one environment in JAX, before `vectorize`; or `B` host environments, left
            in any state: use them for nothing else. One of them alone cannot show
            `reset` and `shared`. Or a collector of either kind.
        key: of a collector's episodes, one typed key.
        params: of its policy.
        num_steps: steps of each pass, at least 1; by default 1,000 in JAX, and 200 of
            host environments.
        seed: of the actions and of the episodes, at least 0.

    Returns:
        The first finding of each name, in the order found; empty if there are none.

    Raises:
        ValueError: if `env` is no such environment, or an option is not as above.
    """
    collects = hasattr(env, "collect_steps")
    is_host = hasattr(env, "num_envs") and not hasattr(env, "reset_done")
    if not is_host and not collects:
        checks.single(env)
    if num_steps is None:
        num_steps = 200 if is_host else 1000
    checks.int_between("num_steps", num_steps)
    checks.int_between("seed", seed, least=0, most=None)
    if is_host:
        return host_probe.probe(env, num_steps, seed)
    found: dict[str, str] = {}
    if collects:
        checks.typed_key(key)
        with _reporting(found):
            _play(found, env, params, key, num_steps)
        return tuple(Finding(*item) for item in found.items())
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
        if not found:
            _play(found, collector, None, key, num_steps)
    return tuple(Finding(*item) for item in found.items())


@contextlib.contextmanager
def _reporting(found: dict[str, str]) -> Iterator[None]:
    """Makes an exception a finding, which begins with the user's own line."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [x for x in frames if not x.filename.startswith(_NOT_THE_USERS)]
        if own:
            where = f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}`"
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            found["raises"] = f"{where} raised {what}"
        else:  # one of our checks
            found["contract"] = str(error)


def _random_policy(env: VectorEnv) -> Policy:
    """Draws actions from the space itself, unless there is a mask."""
    space = env.action_space
    allowed_fn = masks.find(env.observation_space, space)
    if allowed_fn is not None:
        return random_policy(space, allowed_fn=allowed_fn)

    def draw(params: Any, obs: Any, key: chex.PRNGKey) -> Any:
        del params, obs  # unused
        return jax.vmap(space.sample)(jax.random.split(key, _NUM_LANES))

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


def _find_own_randomness(fn: Any, *args: Any) -> str:
    """Says what is wrong with the keys of a function; empty if nothing is."""
    try:
        with jax.debug_key_reuse(True):
            jax.eval_shape(lambda *x: fn(*x), *args)
    except jax.errors.KeyReuseError:
        return "uses a key twice: split it into one for each use"
    # Traced twice: what NumPy or Python draw while tracing is a constant, and differs.
    one, other = (jax.make_jaxpr(lambda *x: fn(*x))(*args) for _ in range(2))
    if "random_seed[" in str(one) or any(map(prng.has_keys, one.consts)):
        return "draws from a key of its own: derive all keys from its argument"
    # Without addresses, which the text of functions has.
    programs = {re.sub("0x[0-9a-f]+", "", str(x)) for x in (one, other)}
    is_same = all(map(np.array_equal, one.consts, other.consts))
    if len(programs) > 1 or not is_same:
        return "is another function when traced again: NumPy and Python draw only then"
    return ""


def _play(
    found: dict[str, str],
    collector: Any,
    params: Any,
    key: Any,
    num_steps: int,
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
        found["ending"] = host_probe.both_flags(num_both)


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
            found.setdefault(name, f"{say(at)}{host_probe.at_step(step)}")

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
