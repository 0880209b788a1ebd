"""`LocalEnvs`: steps environments of Gymnasium's kind in this process, in turn."""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.envs.host import request_checks
from rollout.envs.host.arrays import (
    StepArrays,
    leaf_at,
    leaf_writer,
    make_layout,
    place_rows,
    writer,
)
from rollout.envs.host.gymnasium_actions import split_action
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.types import ArrayTree


class LocalEnvs(HostVectorEnv):
    """Several environments in this process, a `HostVectorEnv` that can also `rebuild`.

    An exception of one environment makes that one faulty and leaves the others alone.

    Attributes:
        num_envs: B.
        observation_space, action_space: of one environment.
        causes: the cause of each faulty environment, by its number.

    Args:
        make_fns: `B` functions that make one environment each, with the methods and
            spaces of `gymnasium.Env`.
        observe_info: keys of `info` that become part of the observation, each with an
            example: `{"action_mask": np.ones(2, bool)}`. An observation is then
            `{"obs": obs, "info": {key: value}}`; `reset` and every step must return
            those keys.
        record_info: keys of `info` that `HostStep.info` has, each with an example.
            Where a step returns no such key, its value is zero.
        first: number of the first environment, in messages.

    Raises:
        EnvFault: if an environment could not be made.
        ValueError: if `make_fns` is empty, an environment has the old interface of gym,
            their spaces differ, or a space has no arrays.
    """

    can_rebuild = can_load = True

    def __init__(
        self,
        make_fns: Sequence[Callable[[], Any]],
        *,
        observe_info: Mapping[str, Any] | None = None,
        record_info: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> None:
        self.make_fns, self._first = list(make_fns), first
        if not self.make_fns:
            raise ValueError("`make_fns` must have at least one function, got none.")
        self.num_envs = len(self.make_fns)
        self._envs: list[Any] = []
        try:
            for at in range(self.num_envs):
                self._envs.append(self._make(at))
            self.spaces = _spaces(self._envs[0])
            self.layout = make_layout(self.spaces, observe_info, record_info)
        except BaseException:
            self.close()
            raise
        self.observation_space = self.layout.obs.space
        self.action_space = self.layout.action.space
        self.causes: dict[int, BaseException] = {}
        self._observes = bool(observe_info)
        self._split = split_action(self.spaces[1])
        self._steps = [env.step for env in self._envs]  # looked up once, not per step
        self.place(StepArrays(self.layout, self.num_envs))

    def draw(self, number: int) -> np.ndarray:
        """Draws one environment as it is now, `[H, W, 3]` uint8.

        Raises:
            ValueError: if the environment draws no frames.
        """
        request_checks.closed(not self._envs)
        return request_checks.drawn(self._envs[number])

    def place(self, arrays: StepArrays) -> None:
        """Makes the environments write to these arrays from now on."""
        self._arrays, self.info = arrays, arrays.info_tree
        self._write_obs = writer(self.layout.obs, arrays.obs)
        self._results = arrays.reward, arrays.terminated, arrays.truncated
        names = "reward", "terminated", "truncated"
        self._write_results = list(map(leaf_writer, self._results, names))
        info = self.layout.info
        triples = zip(info.paths, info.names, arrays.info, strict=True)
        self._records = [
            (path, array, leaf_writer(array, name)) for path, name, array in triples
        ]

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`.

        Raises:
            EnvFault: if some failed, or had failed and were not rebuilt.
        """
        request_checks.closed(not self._envs)
        which = np.flatnonzero(mask).tolist()
        # All are reset before the first fault is raised: the others must be ready.
        for at in (x for x in which if x not in self.causes):
            try:
                obs, info = self._envs[at].reset(seed=int(seeds[at]))
                shown = {"obs": obs, "info": info} if self._observes else obs
                self._write_obs(at, shown)
            except Exception as cause:
                self.causes[at] = cause
        causes = {at: self.causes[at] for at in which if at in self.causes}
        if causes:
            raise EnvFault(causes)
        return self._arrays.obs_tree

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[B, ...]`, and resets none."""
        request_checks.closed(not self._envs)
        for at, one in zip(range(self.num_envs), self._split(action), strict=True):
            self.advance(at, one)
        return self._arrays.answer(self.causes)

    def rebuild(self, mask: np.ndarray) -> None:
        """Rebuilds some environments; each must be reset before its next step.

        Args:
            mask: `[B]` bool, which to rebuild; at least one.

        Raises:
            EnvFault: if some could not be made; they stay faulty.
        """
        request_checks.closed(not self._envs)
        causes = {}
        for at in np.flatnonzero(mask).tolist():
            close(self._envs[at])
            # A new environment can have other spaces, which is a `ValueError`.
            try:
                env = self._make(at)
            except (EnvFault, ValueError) as error:
                causes[at] = self.causes[at] = error.__cause__ or error
            else:
                self._envs[at], self._steps[at] = env, env.step
                self.causes.pop(at, None)
        if causes:
            raise EnvFault(causes)

    def save(self) -> list[bytes] | None:
        """Saves every environment; see `HostVectorEnv`."""
        request_checks.closed(not self._envs)
        saved = map(_saved, [] if self.causes else self._envs)
        states = [x for x in saved if x is not None]
        return states if len(states) == self.num_envs else None

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Puts every environment where it was at `save`; see `HostVectorEnv`.

        Raises:
            ValueError: if an environment has no `load_state`.
        """
        request_checks.closed(not self._envs)
        if self.causes:
            self.rebuild(np.isin(np.arange(self.num_envs), list(self.causes)))
        for env, state in zip(self._envs, saved, strict=True):
            _load(env, state)
        place_rows(self._arrays.obs_tree, slice(None), obs)

    def close(self) -> None:
        """Closes every environment; a second call does nothing."""
        while self._envs:
            close(self._envs.pop())

    def advance(self, at: int, action: Any) -> None:
        """Takes one step in one environment, unless it is faulty."""
        if at in self.causes:
            return
        try:
            result = self._steps[at](action)
            obs, reward, terminated, truncated, info = result
            self._write_obs(at, {"obs": obs, "info": info} if self._observes else obs)
            # Most environments return Python's own numbers, which need no checks. This
            # runs once per environment and step.
            if type(reward) is float and type(terminated) is type(truncated) is bool:
                rewards, terminations, truncations = self._results
                rewards[at], terminations[at] = reward, terminated
                truncations[at] = truncated
            else:
                for write, value in zip(self._write_results, result[1:4], strict=True):
                    write(at, value)
            for path, array, write in self._records:
                if path[0] in info:
                    write(at, leaf_at(info, path))
                else:
                    array[at] = 0
        except Exception as cause:
            self.causes[at] = cause

    def _make(self, at: int) -> Any:
        number = self._first + at
        try:
            env = self.make_fns[at]()
        except Exception as cause:
            raise EnvFault({number: cause}) from cause
        request_checks.new_interface(env)
        first = self._envs[0] if self._envs else env  # the very first has no other
        request_checks.same_spaces(_spaces(first), _spaces(env), number)
        return env


def _spaces(env: Any) -> tuple[Any, Any]:
    return env.observation_space, env.action_space


def close(env: Any) -> None:
    """Closes one environment, whatever it says to that."""
    with contextlib.suppress(Exception):  # it may be broken
        env.close()


def _saved(env: Any) -> bytes | None:
    """Saves the arrays that an environment names; None if it has no `save_state`."""
    if not hasattr(type(env), "save_state"):  # a wrapper forwards attributes
        return None
    file = io.BytesIO()
    for name, value in env.save_state().items():
        # NumPy's own format without pickle: to load it runs no code.
        for array in (np.asarray(name), np.asarray(value)):
            np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _load(env: Any, state: bytes) -> None:
    """Puts an environment where it was at `save`, with its own settings.

    Raises:
        ValueError: if it has no `load_state`.
    """
    if not hasattr(type(env), "load_state"):
        raise ValueError(
            "`env` must have `load_state`, like the saved environment, got "
            f"{type(env).__name__}."
        )
    file, arrays = io.BytesIO(state), {}
    while file.tell() < len(state):
        name = np.lib.format.read_array(file, allow_pickle=False)
        arrays[str(name)] = np.lib.format.read_array(file, allow_pickle=False)
    # Gymnasium's wrappers refuse a step before a reset, and many environments make the
    # arrays in it that `load_state` fills.
    env.reset(seed=0)
    env.load_state(arrays)
