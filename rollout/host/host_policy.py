"""Runs the policy as one compiled program at every step of a host collection."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.base import programs
from rollout.base.platform import to_host
from rollout.envs.host.env_checks import SpaceCheck
from rollout.envs.spaces import Composite, Space
from rollout.envs.types import ArrayTree
from rollout.kernel import keys
from rollout.kernel.state import check_values, init_policy_state, reset_policy_state
from rollout.policies import base
from rollout.types import Policy

_NUM_KEYS = 256  # keys computed at once


class _Programs(NamedTuple):
    """The compiled functions, shared by equal policies."""

    act: Any
    reset: Any
    initial: Any
    value: Any


class HostPolicy:
    """The compiled programs of a policy, for one root key.

    The caller stores the step and the state of the policy, and passes them to each
    call.

    Args:
        policy: policy to run.
        action_space: action space of a single lane.
        num_envs: B, number of lanes; a call may act for a subset of the lanes.
        key: typed root key.

    Attributes:
        has_critic: True if `values` can be called.
        initial_state: `[B, ...]` state before the first step, on the device.
    """

    def __init__(
        self, policy: Policy, action_space: Space, num_envs: int, key: chex.PRNGKey
    ) -> None:
        self.has_critic = policy.has_value
        # Pass the leaves of a policy as arguments, so that policies that differ only in
        # numbers share programs.
        self._numbers, structure = jax.tree.flatten(policy)
        impl = jax.random.key_impl(key)
        self._programs = _programs(structure, action_space, num_envs, impl)
        self._num_envs, self._action_space = num_envs, action_space
        self._value_shapes: Any = None  # `[B, ...]`, of the critic's values
        # The slack allows for rounding in actions computed from the bounds.
        self._check = SpaceCheck(action_space, "action", slack=4e-7)
        self.initial_state = self._programs.initial(self._numbers, key)
        self._has_state = bool(jax.tree.leaves(self.initial_state))
        self._is_array = not isinstance(action_space, Composite)
        # Raw key data is faster to pass to `jit` than typed keys. Compute many keys at
        # once: in a small program, hashing would take most of the time.
        self._key, self._root = key, np.asarray(jax.random.key_data(key))
        self._first, self._words = 0, self._root[:0]  # row k: step `first + k`

    def act(
        self,
        params: Any,
        step: int,
        state: ArrayTree,
        obs: ArrayTree,
        is_first: np.ndarray,
        episode_id: np.ndarray,
        env_id: np.ndarray | None = None,
    ) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        """Runs the policy for one step.

        Args:
            params: parameters of the policy.
            step: number of the step, from which the key derives.
            state: `[B, ...]` state of the policy.
            obs: `[B, ...]` NumPy observations; do not write to them afterwards.
            is_first: `[B]` bool, True for lanes at the start of an episode.
            episode_id: `[B]` int32, ids of the current episodes.
            env_id: `[num_ready]` int32, lanes to act for. `obs` and the actions then
                have `num_ready` rows instead of B. The value B is padding.

        Returns:
            The next state, the actions as NumPy arrays, and the extras, which stay on
            the device.

        Raises:
            ValueError: if an action is not in the action space.
        """
        # The key of step n equals the kernel's key, for any `_NUM_KEYS`.
        row = step - self._first
        if not 0 <= row < len(self._words):
            self._words = np.asarray(_policy_keys(self._key, step))
            self._first, row = step, 0
        # Omit unused arguments: every argument costs time in every step.
        # A stateless policy has nothing to restart.
        lanes = (self._root, is_first, episode_id) if self._has_state else ()
        state, action, extras = self._programs.act(
            self._numbers, params, self._words[row], state, obs, lanes, env_id
        )
        action = np.asarray(action) if self._is_array else to_host(action)
        if faults := self._check.find_invalid(action):
            row = min(faults)
            lane = row if env_id is None else env_id[row]
            raise ValueError(
                f"`policy.apply` must return actions of {self._action_space}, but "
                f"in lane {lane} {faults[row]}. Count from `space.start`, which may be "
                "nonzero. Clip or rescale in the environment, for example with "
                "`gymnasium.wrappers.ClipAction`, so that the log-probability matches "
                "the sampled action."
            )
        return state, action, extras

    def values(
        self,
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        flag: np.ndarray,
        env_id: np.ndarray | None = None,
    ) -> ArrayTree:
        """Evaluates the critic at observations whose `flag` is True; 0 elsewhere.

        `env_id` is as in `act`; `obs` and `flag` may have fewer rows than `env_id`.
        """
        # Repeat rows up to the size for which the program is compiled.
        num = len(flag)
        if env_id is not None:
            pad = lambda x: np.resize(x, (len(env_id), *x.shape[1:]))  # noqa: E731
            obs = jax.tree.map(pad, obs)
        args = self._numbers, params, obs, state, env_id
        # If no lane is truncated, which is usual, return zeros without the critic.
        if not np.count_nonzero(flag):
            if self._value_shapes is None:
                self._value_shapes = jax.eval_shape(self._programs.value, *args)
            return jax.tree.map(
                lambda x: np.zeros((num, *x.shape[1:]), x.dtype), self._value_shapes
            )
        values = to_host(self._programs.value(*args))

        def choose(x: np.ndarray) -> np.ndarray:
            column = flag.reshape(num, *(1,) * (x.ndim - 1))
            return np.where(column, x[:num], np.zeros((), x.dtype))

        return jax.tree.map(choose, values)

    def evaluate(self, params: Any, obs: ArrayTree, policy_state: ArrayTree) -> Any:
        """Evaluates the critic at the observations of all lanes."""
        return self._programs.value(self._numbers, params, obs, policy_state, None)

    def compile(self, params: Any, obs: ArrayTree, num_ready: int | None) -> None:
        """Compiles `act` by calling it for all lanes, or for `num_ready` lanes."""
        # Call instead of lowering: only a call fills the jit cache.
        lane, env_id = np.arange(self._num_envs, dtype=np.int32), None
        if num_ready is not None:
            env_id = lane[:num_ready]
            obs = jax.tree.map(lambda x: x[:num_ready], obs)
        is_first = np.ones(len(lane), bool)
        self.act(params, 0, self.initial_state, obs, is_first, lane, env_id)

    def reset_state(
        self, state: ArrayTree, is_first: np.ndarray, episode_id: np.ndarray
    ) -> ArrayTree:
        """Returns the policy state, reset in lanes at the start of an episode.

        `act` resets the state itself; call this method for the state in a carry.
        """
        if not self._has_state or not is_first.any():
            return state
        return self._programs.reset(
            self._numbers, self._root, is_first, episode_id, state
        )


@programs.shared
def _programs(
    structure: Any, action_space: Space, num_envs: int, impl: Any
) -> _Programs:
    """Compiles the functions of policies with this `jax.tree.structure`.

    The first argument of each function is the list of the policy's leaves.
    """

    def initial(numbers: list[Any], key: chex.PRNGKey) -> ArrayTree:
        policy = jax.tree.unflatten(structure, numbers)
        first = jnp.arange(num_envs, dtype=jnp.int32)
        return init_policy_state(policy, keys.keys_of(key, first))

    def reset(
        numbers: list[Any],
        words: jax.Array,
        restarts: jax.Array,
        episode_id: jax.Array,
        state: ArrayTree,
    ) -> ArrayTree:
        """Returns the state of all lanes, reset in lanes that restart."""
        policy = jax.tree.unflatten(structure, numbers)
        root = jax.random.wrap_key_data(words, impl=impl)
        key = keys.keys_of(root, episode_id)
        return reset_policy_state(policy, state, restarts, key)

    def act(
        numbers: list[Any],
        params: Any,
        words: jax.Array,
        state: ArrayTree,
        obs: ArrayTree,
        lanes: tuple[()] | tuple[jax.Array, jax.Array, jax.Array],
        env_id: jax.Array | None,
    ) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        if lanes:
            state = reset(numbers, *lanes, state)
        lane_state = state
        if env_id is not None:
            lane_state = jax.tree.map(lambda x: x[env_id], state)
        key = jax.random.wrap_key_data(words, impl=impl)
        num_rows = num_envs if env_id is None else len(env_id)
        policy = jax.tree.unflatten(structure, numbers)
        decision = base.act(
            policy, action_space, num_rows, params, obs, lane_state, key
        )
        new_state = decision.state
        if env_id is not None:  # "drop" discards the padding
            put = lambda x, rows: x.at[env_id].set(rows, mode="drop")  # noqa: E731
            new_state = jax.tree.map(put, state, new_state)
        return new_state, decision.action, decision.extras

    def value(
        numbers: list[Any],
        params: Any,
        obs: ArrayTree,
        state: ArrayTree,
        env_id: jax.Array | None,
    ) -> ArrayTree:
        if env_id is not None:
            state = jax.tree.map(lambda x: x[env_id], state)
        policy = jax.tree.unflatten(structure, numbers)
        values = policy.value(params, obs, state)
        check_values(values, obs)
        return values

    jitted = map(jax.jit, (act, reset, initial, value))
    return _Programs(*jitted)


@jax.jit
def _policy_keys(root: chex.PRNGKey, step: jax.Array) -> jax.Array:
    """Returns raw data of the keys of `_NUM_KEYS` steps, beginning at `step`."""
    steps = step + jnp.arange(_NUM_KEYS, dtype=jnp.int32)
    key = keys.at_step(keys.policy_root(root), steps)
    return jax.random.key_data(key)
