"""`LocalEnvs`: steps Gymnasium environments sequentially in this process."""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.envs.host import env_checks
from rollout.envs.host.arrays import (
    StepArrays,
    leaf_at,
    leaf_writer,
    make_layout,
    place_rows,
    split_action,
    writer,
)
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.types import ArrayTree

_STEPS = "TimeLimit.elapsed_steps"  # a saved array


class LocalEnvs(HostVectorEnv):
    """Steps several environments in this process; supports `rebuild`, `save`, `load`.

    An exception in one environment marks only this environment as faulty.

    Attributes:
        num_envs: number of environments, B.
        observation_space, action_space: spaces of a single environment.
        causes: exception of each faulty environment, by index.

    Args:
        make_fns: `B` functions, each of which creates one environment with the methods
            and spaces of `gymnasium.Env`.
        observe_info: keys of `info` to include in the observation, each with an
            example value: `{"action_mask": np.ones(2, bool)}`. An observation is then
            `{"obs": obs, "info": {key: value}}`. `reset` and every step must return
            these keys.
        record_info: keys of `info` to record in `HostStep.info`, each with an example
            value. The recorded value is zero if a step does not return the key.
        first: index of the first environment, for messages.

    Raises:
        EnvFault: if an environment cannot be created.
        ValueError: if `make_fns` is empty, an environment has the interface of gym
            before 0.26, spaces differ, or a space does not consist of arrays.
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
        self.source = self.make_fns
        if not self.make_fns:
            raise ValueError("`make_fns` must have at least one function, got none.")
        self.num_envs = len(self.make_fns)
        self._envs: list[Any] = []
        self._numbers = np.zeros(self.num_envs, np.int32)
        try:
            for index in range(self.num_envs):
                self._envs.append(self._make(index))
            self.spaces = _spaces(self._envs[0])
            self.layout = make_layout(self.spaces, observe_info, record_info)
        except BaseException:
            self.close()
            raise
        self.observation_space = self.layout.obs.space
        self.action_space = self.layout.action.space
        self.causes: dict[int, BaseException] = {}
        self._is_dict = bool(observe_info)
        self._split = split_action(self.spaces[1])
        self._steps = [env.step for env in self._envs]  # saves a lookup per step
        self.place(StepArrays(self.layout, self.num_envs))

    def draw(self, number: int) -> np.ndarray:
        """Renders the current state of one environment, `[H, W, 3]` uint8.

        Raises:
            ValueError: if the environment does not render frames.
        """
        env_checks.check_open(not self._envs)
        return env_checks.render_frame(self._envs[number])

    def place(self, arrays: StepArrays) -> None:
        """Sets the arrays to which the environments write their results."""
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

    def at_episodes(self, numbers: np.ndarray) -> None:
        """Announces the numbers of the next episodes; see `HostVectorEnv`."""
        self._numbers = numbers

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`.

        An environment with a method `at_episode` receives the number of its episode
        before the reset.

        Raises:
            EnvFault: if an environment fails, or has failed and was not rebuilt.
        """
        env_checks.check_open(not self._envs)
        indices = np.flatnonzero(mask).tolist()
        # Reset all environments before raising, so that all healthy ones are ready.
        for index in (x for x in indices if x not in self.causes):
            env = self._envs[index]
            try:
                if at_episode := env_checks.find_method(env, "at_episode"):
                    at_episode(int(self._numbers[index]))
                obs, info = env.reset(seed=int(seeds[index]))
                obs = {"obs": obs, "info": info} if self._is_dict else obs
                self._write_obs(index, obs)
            except Exception as cause:
                self.causes[index] = cause
        causes = {x: self.causes[x] for x in indices if x in self.causes}
        if causes:
            raise EnvFault(causes)
        return self._arrays.obs_tree

    def step(self, action: ArrayTree) -> HostStep:
        """Steps every environment with its action, `[B, ...]`, without resets."""
        env_checks.check_open(not self._envs)
        for index, x in zip(range(self.num_envs), self._split(action), strict=True):
            self.step_one(index, x)
        return self._arrays.answer(self.causes)

    def rebuild(self, mask: np.ndarray) -> None:
        """Replaces environments by new ones, which must be reset before the next step.

        Args:
            mask: `[B]` bool, the environments to rebuild, at least one.

        Raises:
            EnvFault: if an environment cannot be created; it remains faulty.
        """
        env_checks.check_open(not self._envs)
        causes = {}
        for index in np.flatnonzero(mask).tolist():
            close(self._envs[index])
            # `_make` raises a `ValueError` if the spaces of the new environment differ.
            try:
                env = self._make(index)
            except (EnvFault, ValueError) as error:
                causes[index] = self.causes[index] = error.__cause__ or error
            else:
                self._envs[index], self._steps[index] = env, env.step
                self.causes.pop(index, None)
        if causes:
            raise EnvFault(causes)

    def save(self) -> list[bytes] | None:
        """Saves the state of every environment; see `HostVectorEnv`."""
        env_checks.check_open(not self._envs)
        states = map(_save, [] if self.causes else self._envs)
        states = [x for x in states if x is not None]
        return states if len(states) == self.num_envs else None

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment; see `HostVectorEnv`.

        Raises:
            ValueError: if an environment has no `load_state`.
        """
        env_checks.check_open(not self._envs)
        if self.causes:
            self.rebuild(np.isin(np.arange(self.num_envs), list(self.causes)))
        for env, state in zip(self._envs, saved, strict=True):
            _load(env, state)
        place_rows(self._arrays.obs_tree, slice(None), obs)

    def close(self) -> None:
        """Closes every environment; a second call does nothing."""
        while self._envs:
            close(self._envs.pop())

    def step_one(self, index: int, action: Any) -> None:
        """Steps one environment, unless it is faulty."""
        if index in self.causes:
            return
        try:
            result = self._steps[index](action)
            obs, reward, terminated, truncated, info = result
            self._write_obs(index, {"obs": obs, "info": info} if self._is_dict else obs)
            # A fast path, because this runs once per environment and step: most
            # environments return Python numbers, which need no checks.
            if type(reward) is float and type(terminated) is type(truncated) is bool:
                rewards, terminations, truncations = self._results
                rewards[index], terminations[index] = reward, terminated
                truncations[index] = truncated
            else:
                for write, value in zip(self._write_results, result[1:4], strict=True):
                    write(index, value)
            for path, array, write in self._records:
                if path[0] in info:
                    write(index, leaf_at(info, path))
                else:
                    array[index] = 0
        except Exception as cause:
            self.causes[index] = cause

    def _make(self, index: int) -> Any:
        number = self._first + index
        try:
            env = self.make_fns[index]()
        except Exception as cause:
            raise EnvFault({number: cause}) from cause
        env_checks.check_interface(env)
        first = self._envs[0] if self._envs else env
        env_checks.check_same_spaces(_spaces(first), _spaces(env), number)
        return env


def _spaces(env: Any) -> tuple[Any, Any]:
    return env.observation_space, env.action_space


def close(env: Any) -> None:
    """Closes one environment and ignores exceptions."""
    with contextlib.suppress(Exception):  # the environment may be faulty
        env.close()


def _unwrap(env: Any) -> tuple[Any, list[Any]]:
    """Removes the wrappers that `gymnasium.make` and `max_episode_steps=` add.

    Other wrappers may have a state, so they are not removed: their class must define
    `save_state` and `load_state`.

    Returns:
        The environment inside, and the wrappers with a time limit around it.
    """
    limits = []
    while type(env).__module__ == "gymnasium.wrappers.common":
        name = type(env).__name__
        if name not in ("OrderEnforcing", "PassiveEnvChecker", "TimeLimit"):
            break
        if name == "TimeLimit":
            limits.append(env)
        env = env.env
    return env, limits


def _save(env: Any) -> bytes | None:
    """Serializes the arrays of `save_state`; returns None without this method."""
    env, limits = _unwrap(env)
    # Check the class: Gymnasium's wrappers forward attributes of the environment.
    if not hasattr(type(env), "save_state"):
        return None
    file = io.BytesIO()
    arrays = dict(env.save_state())
    if limits:  # the counter is None before the first reset
        arrays[_STEPS] = [x._elapsed_steps or 0 for x in limits]
    for name, value in arrays.items():
        # Use NumPy's format without pickle, so that loading runs no code.
        for array in (np.asarray(name), np.asarray(value)):
            np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _load(env: Any, state: bytes) -> None:
    """Restores the state of an environment from the bytes of `_save`.

    Raises:
        ValueError: if the environment has no `load_state`, or other time limits than
            the saved environment.
    """
    inner, limits = _unwrap(env)
    if not hasattr(type(inner), "load_state"):
        raise ValueError(
            "`env` must have `load_state`, like the saved environment, got "
            f"{type(inner).__name__}."
        )
    file, arrays = io.BytesIO(state), {}
    while file.tell() < len(state):
        name = np.lib.format.read_array(file, allow_pickle=False)
        arrays[str(name)] = np.lib.format.read_array(file, allow_pickle=False)
    steps = arrays.pop(_STEPS, ())
    if len(steps) != len(limits):
        raise ValueError(
            f"`env` must have {len(steps)} time limits, like the saved environment, "
            f"got {len(limits)}. Pass the same `max_episode_steps`."
        )
    # Reset first: Gymnasium's wrappers raise if `step` precedes `reset`, and many
    # environments allocate the arrays that `load_state` fills in `reset`.
    env.reset(seed=0)
    inner.load_state(arrays)
    for limit, count in zip(limits, steps, strict=True):
        limit._elapsed_steps = int(count)
