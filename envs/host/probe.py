"""Plays host environments and finds their mistakes, for `rollout.probe`."""

import contextlib
import importlib
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from rollout import checks, programs
from rollout.envs.host.local_envs import LocalEnvs, close
from rollout.envs.host.ownership import claim, new_user
from rollout.envs.host.space_check import SpaceCheck
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree


class Finding(NamedTuple):
    """One mistake of environments, or a note; it prints as `name: message`.

    Attributes:
        name: one of those that `probe` lists.
        message: the mistake, and the step of the episode where it showed.
    """

    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


def probe(env: HostVectorEnv, num_steps: int, seed: int) -> tuple[Finding, ...]:
    """Looks for common mistakes of host environments; see `rollout.probe`."""
    checks.kind_of_env(env, is_host=True)
    claim(env, new_user())  # no carry of a collector is valid after this
    probing = _Probe(env, np.random.default_rng(seed))
    with contextlib.suppress(_Stop):
        probing.run(num_steps)
    return tuple(Finding(*item) for item in probing.found.items())


def both_flags(number: int) -> str:
    """Says that no time limit is told from a termination."""
    return (
        f"each of the {number} truncations is a termination, too, so no time limit is "
        "bootstrapped: set `terminated` only where the task itself ended"
    )


def at_step(number: Any) -> str:
    """Names a step of an episode by its number from 1, for a message."""
    if not number:
        return ", at the start of an episode"
    return f", at step {number} of an episode"


class _Stop(Exception):  # noqa: N818
    """Raised when a finding leaves nothing to continue with."""


class _Plan(NamedTuple):
    """Inputs for the environments over `T` steps."""

    action: ArrayTree  # [T, B, ...]
    seeds: np.ndarray  # [T + 1, B] uint32, of each environment's episodes in turn
    cut: np.ndarray  # [T, B] bool, True where the episode is cut short after the step


@programs.shared
def _sampler(space: AnySpace) -> Any:
    return jax.jit(jax.vmap(jax.vmap(space.sample)))


class _Probe:
    """Plays, checks every answer, and keeps the first finding of each name."""

    def __init__(self, env: HostVectorEnv, rng: np.random.Generator) -> None:
        self.found: dict[str, str] = {}
        self._env, self._rng = env, rng
        self._length: Any = None  # [B], steps of each episode; None before the first
        self._every = np.ones(env.num_envs, bool)
        self._num_truncated = self._num_both = 0  # of both flags
        flag = jax.ShapeDtypeStruct((env.num_envs,), bool)
        self._kinds: dict[str, ArrayTree] = {
            "reward": jax.ShapeDtypeStruct((env.num_envs,), np.float32),
            **dict.fromkeys(("terminated", "truncated", "faulty", "mask"), flag),
        }

    def run(self, num_steps: int) -> None:
        """Plays a plan twice, then with other seeds, then beside others."""
        self._check_by_gymnasium()
        action_space = self._learn_spaces()
        shape = num_steps, self._env.num_envs
        keys = jax.random.split(jax.random.key(self._rng.integers(2**32)), shape)
        action = _sampler(action_space)(keys)
        action = jax.tree.map(np.asarray, action)
        plan = _Plan(action, self._seeds(num_steps), np.zeros(shape, bool))
        # Two passes must agree before the later ones, which change one thing each, can
        # show anything.
        sums, done, length = self._play(plan)
        again, *_ = self._play(plan)
        if (again != sums).any():
            t, at = np.argwhere(again != sums)[0]
            what = f"the same one starts another episode of environment {at}"
            self._report("seed", what, length[t, at])
        else:
            others, *_ = self._play(plan._replace(seeds=self._seeds(num_steps)))
            if (others == sums).all():
                what = "others start the same episodes: right if nothing is random"
                self._report("seed", what)
            alone, *_ = self._play(self._beside_others(plan))
            if (differs := alone[:, 0] != sums[:, 0]).any():
                what = "environment 0 depends on the seeds and actions of the others"
                self._report("shared", what, length[differs.argmax(), 0])
        if done.any():
            self._check_ending(plan, int(done.any(axis=1).argmax()))
        else:
            what = f"no episode ended in {num_steps} steps: take more `num_steps`"
            self._report("ending", what)
        if self._num_both == self._num_truncated >= 3:
            self._report("ending", both_flags(self._num_both))

    def _check_by_gymnasium(self) -> None:
        gymnasium = sys.modules.get("gymnasium")
        if gymnasium is None or not isinstance(self._env, LocalEnvs):
            return
        env = self._env.make_fns[0]()
        if isinstance(env, gymnasium.Env):
            checker = importlib.import_module("gymnasium.utils.env_checker")
            try:
                with warnings.catch_warnings(action="ignore"):  # of its own style
                    checker.check_env(env, skip_render_check=True)
            except Exception as error:
                self._report("gymnasium", _say(error))
        close(env)

    def _learn_spaces(self) -> AnySpace:
        """Learns what observations look like; returns the space of actions."""
        keys = jax.random.split(jax.random.key(0), self._env.num_envs)
        space: Any = None
        for name in ("observation_space", "action_space"):
            try:
                space = as_space(getattr(self._env, name), name)
                with warnings.catch_warnings(action="error"):  # jax's, of 64 bits
                    kind = jax.eval_shape(jax.vmap(space.sample), keys)
            except Exception as error:
                self._stop(name, f"its elements must be arrays, got {_say(error)}")
            if name == "observation_space":
                self._kinds["obs"], self._obs_check = kind, SpaceCheck(space)
        return space

    def _beside_others(self, plan: _Plan) -> _Plan:
        """Changes seeds and actions of all but environment 0, and cuts them short."""
        seeds, cut = self._seeds(len(plan.cut)), plan.cut.copy()
        seeds[:, 0] = plan.seeds[:, 0]
        cut[6::7, 1:] = True

        def shift(action: np.ndarray) -> np.ndarray:
            # Other actions, but of the space: those of the step before.
            other = np.roll(action, 1, axis=0)
            other[:, 0] = action[:, 0]
            return other

        return _Plan(jax.tree.map(shift, plan.action), seeds, cut)

    def _check_ending(self, plan: _Plan, last: int) -> None:
        """Plays to the step with the first ending, and one step more."""
        self._play(plan._replace(cut=plan.cut[:last]))  # up to the step before it
        _, ended, _ = self._step(plan, last)
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
            # They may warn of a step after the end, and raise.
            step = self._env.step(_row(plan.action, last))
            goes_on = ended & ~(step.terminated | step.truncated | step.faulty)
            if step.mask is not None:  # False where it reset itself, and says so
                goes_on &= step.mask
            if goes_on.any():
                at = int(goes_on.argmax())
                name, what = "ending", f"environment {at} plays on after its end"
                hint = "if it resets itself, `obs` at an ending is no true successor"
                # Gymnasium leaves open what a step after the end does.
                inner = getattr(self._env, "env", self._env)
                if type(inner).__module__.startswith("rollout.envs.host."):
                    name, hint = "note", "nothing need be done, since it is reset there"
                self._report(name, f"{what}: {hint}", self._length[at])

    def _play(self, plan: _Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Plays one plan, and checks every answer.

        Not by a collector: the actions, seeds and cuts of a plan are repeated, and no
        bookkeeping may stand between the environments and the checks.

        Returns:
            `[T + 1, B]` uint32, checksums of the first reset and of each step; `[T, B]`
            bool, True where an episode ended; and `[T + 1, B]`, the steps' numbers in
            their episodes, 0 at the first reset.
        """
        lanes = np.arange(self._env.num_envs)
        number, endings = np.zeros_like(lanes), np.zeros_like(plan.cut)
        obs = self._reset(plan.seeds[0], self._every, None)
        sums, lengths = [_checksums(obs)], [self._length]
        for t, cut in enumerate(plan.cut):
            obs, endings[t], fields = self._step(plan, t)
            lengths.append(self._length)
            restarts = endings[t] | cut
            if restarts.any():
                number += restarts
                obs = self._reset(plan.seeds[number, lanes], restarts, obs)
            sums.append(_checksums((fields, obs)))
        return np.stack(sums), endings, np.stack(lengths)

    def _step(self, plan: _Plan, t: int) -> tuple[ArrayTree, np.ndarray, ArrayTree]:
        """Takes a step; returns `obs`, where episodes ended, and copies of all."""
        self._length = self._length + 1
        action = _row(plan.action, t)
        step = self._call(self._env.step, action)
        if not isinstance(step, HostStep):
            what = f"got {type(step).__name__}"
            self._stop("step", f"it must return a `rollout.envs.host.HostStep`, {what}")
        if "info" not in self._kinds:
            num_envs, info = self._env.num_envs, jax.tree.map(np.asarray, step.info)
            self._kinds["info"] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape[1:]), x.dtype), info
            )
        for name in sorted(self._kinds):
            if name != "mask" or step.mask is not None:
                self._check_kind(name, getattr(step, name))
        if step.mask is not None:  # some may only have reset themselves
            self._length = self._length - ~step.mask
        for at, cause in step.causes.items():
            self._stop("fault", f"environment {at} failed: {_say(cause)}", at)
        for at in np.flatnonzero(~np.isfinite(step.reward))[:1].tolist():
            what = f"of environment {at}: `reward` must be finite, got"
            self._report("reward", f"{what} {step.reward[at]}", self._length[at])
        if (_checksums(action) != _checksums(_row(plan.action, t))).any():
            self._report("action", "`step` must not write to it", self._length[0])
        self._check_obs(step.obs)
        fields = step.obs, step.reward, step.terminated, step.truncated
        fields = jax.tree.map(np.array, fields)
        self._num_truncated += int(np.count_nonzero(fields[3]))
        self._num_both += int(np.count_nonzero(fields[2] & fields[3]))
        return fields[0], fields[2] | fields[3], fields

    def _reset(
        self, seeds: np.ndarray, mask: np.ndarray, before: ArrayTree
    ) -> ArrayTree:
        """Resets where `mask`; all others must still have the observations `before`."""
        self._length = np.where(mask, 0, 0 if before is None else self._length)
        obs = self._call(self._env.reset, seeds, mask.copy())
        self._check_kind("obs", obs)
        self._check_obs(obs)
        if not mask.all():
            changed = (_checksums(obs) != _checksums(before)) & ~mask
            if changed.any():
                at = int(changed.argmax())
                what = "a reset of others changes the observation of environment"
                self._report("reset", f"{what} {at}", self._length[at])
        return jax.tree.map(np.array, obs)

    def _check_obs(self, obs: ArrayTree) -> None:
        if bad := self._obs_check.find(obs):
            at = min(bad)
            self._report("obs", f"of environment {at}: {bad[at]}", self._length[at])

    def _check_kind(self, name: str, got: ArrayTree) -> None:
        """Stops unless a tree has the structure, shapes and dtypes it must have."""
        wanted, structure = jax.tree.flatten(self._kinds[name])
        leaves, other = jax.tree.flatten(got)
        if structure != other:
            self._stop(name, f"it must have the structure {structure}, got {other}")
        for want, leaf in zip(wanted, leaves, strict=True):
            if (np.shape(leaf), getattr(leaf, "dtype", 0)) != (want.shape, want.dtype):
                what = f"{checks.describe(want)}, got {checks.describe(leaf)}"
                self._stop(name, f"it must be {what}")

    def _seeds(self, num_steps: int) -> np.ndarray:
        shape = num_steps + 1, self._env.num_envs
        return self._rng.integers(2**32, size=shape, dtype=np.uint32)

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls the environments; reports an exception and stops."""
        try:
            return fn(*args)
        except EnvFault as fault:
            self._stop("fault", str(fault), min(fault.causes))
        except Exception as error:
            self._stop("raises", _say(error))

    def _report(self, name: str, message: str, step: int | None = None) -> None:
        when = "" if step is None else at_step(step)
        self.found.setdefault(name, f"{message}{when}")

    def _stop(self, name: str, message: str, at: int = 0) -> NoReturn:
        """Reports a mistake of environment `at`, or of all, whose first one counts."""
        self._report(name, message, None if self._length is None else self._length[at])
        raise _Stop


def _row(tree: ArrayTree, t: int) -> ArrayTree:
    return jax.tree.map(lambda x: x[t].copy(), tree)


def _checksums(tree: ArrayTree) -> np.ndarray:
    """Returns `[B]` uint32, one checksum for each environment of a tree."""
    leaves = [np.ascontiguousarray(x) for x in jax.tree.leaves(tree)]
    sums = [0] * len(leaves[0])
    for leaf in leaves:
        sums = [zlib.crc32(one, old) for one, old in zip(leaf, sums, strict=True)]
    return np.array(sums, np.uint32)


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
