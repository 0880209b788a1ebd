"""Calls the policy as one compiled program at every step of the host loop."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout import programs
from rollout.envs.host.space_check import SpaceCheck
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.kernel import episode_keys
from rollout.kernel.policy_state import init_policy_state, restart_policy_state
from rollout.kernel.values import check_values
from rollout.platform import to_host
from rollout.policies import outputs
from rollout.policies.outputs import View
from rollout.types import Policy

_AHEAD = 256  # keys that are drawn at once


class _Programs(NamedTuple):
    """The compiled functions of a policy, shared by equal runners."""

    act: Any
    restart: Any
    initial: Any
    value: Any


class PolicyRunner:
    """A policy that acts on the host; its keys and its state stay on the device.

    Args:
        policy: the policy.
        action_space: of one lane.
        num_envs: B, the number of lanes; a call may act for some of them.

    Attributes:
        has_critic: whether `values` can be called.
        key: the root key.
        step: how often it has acted.
        state: `[B, ...]`, on the device.
        programs: the compiled functions, from `start` on.
    """

    def __init__(self, policy: Policy, action_space: AnySpace, num_envs: int) -> None:
        self.has_critic = policy.has_value
        # The numbers of a policy are arguments of its programs, which other values of
        # them share.
        self._numbers, self._structure = jax.tree.flatten(policy)
        self._value_dtype: Any = None
        self._view: Any = View(num_envs, as_space(action_space, "env.action_space"))
        # A policy may compute an action from the bounds, and round it.
        self._check = SpaceCheck(action_space, "action", slack=4e-7)

    def start(self, key: chex.PRNGKey) -> None:
        """Begins at step 0, with a typed root key."""
        impl = jax.random.key_impl(key)
        self.programs = _programs(self._structure, self._view, impl)
        self.key, self.step = key, 0
        self.state = self.programs.initial(self._numbers, key)
        # Words of the keys are faster to pass to jit than typed keys. They are drawn
        # ahead: in a small program two hashes would take most of the time.
        self._root = np.asarray(jax.random.key_data(key))
        self._first, self._words = 0, self._root[:0]  # of step `first + k` in row k

    def act(
        self,
        params: Any,
        obs: ArrayTree,
        unseen: np.ndarray,
        episode_id: np.ndarray,
        env_id: np.ndarray | None = None,
    ) -> tuple[ArrayTree, ArrayTree]:
        """Chooses the actions.

        Args:
            params: whatever the policy takes as its parameters.
            obs: `[B, ...]`, NumPy; it must not be written to afterwards.
            unseen: `[B]` bool, lanes that are at the start of an episode.
            episode_id: `[B]` int32, the episodes they are in.
            env_id: `[num_ready]` int32, the lanes to act for, which `obs` and the
                result then have instead of all B. The number B is padding.

        Returns:
            The actions, NumPy; and the extras, which stay on the device.

        Raises:
            ValueError: if an action is not in the action space.
        """
        # Key n is the kernel's key of step n, however many are drawn at once.
        row = self.step - self._first
        if not 0 <= row < len(self._words):
            self._words = np.asarray(_policy_keys(self.key, self.step))
            self._first, row = self.step, 0
        # What is passed in every step costs time, so only what is needed.
        lanes = ()
        if jax.tree.leaves(self.state):  # a stateless policy has nothing to restart
            lanes = self._root, unseen, episode_id
        state, action, extras = self.programs.act(
            self._numbers, params, self._words[row], self.state, obs, lanes, env_id
        )
        is_array = isinstance(action, jax.Array)  # the usual case, kept fast
        action = np.asarray(action) if is_array else to_host(action)
        if bad := self._check.find(action):
            row = min(bad)
            lane = row if env_id is None else env_id[row]
            raise ValueError(
                f"`policy.apply` must return actions of {self._view.action_space}, but "
                f"in lane {lane} {bad[row]}. Count from `space.start` where it is not "
                "0; clip or rescale in the environment, as "
                "`gymnasium.wrappers.ClipAction` does, so that the log-probability "
                "stays that of the action that was drawn."
            )
        self.step, self.state = self.step + 1, state
        return action, extras

    def values(
        self,
        params: Any,
        obs: ArrayTree,
        flag: np.ndarray,
        env_id: np.ndarray | None = None,
    ) -> np.ndarray:
        """Evaluates the critic at observations where `flag`; 0 elsewhere.

        `env_id` is as in `act`, and `obs` and `flag` may be of fewer lanes.
        """
        # Padded by repetition to the number that the program is compiled for.
        num = len(flag)
        if env_id is not None:
            pad = lambda x: np.resize(x, (len(env_id), *x.shape[1:]))  # noqa: E731
            obs = jax.tree.map(pad, obs)
        args = self._numbers, params, obs, self.state, env_id
        # Usually no lane is truncated, and the critic need not be called at all; the
        # dtype of its zeros is asked for once.
        if not np.count_nonzero(flag):
            if self._value_dtype is None:
                self._value_dtype = jax.eval_shape(self.programs.value, *args).dtype
            return np.zeros(num, self._value_dtype)
        values = np.asarray(self.programs.value(*args))[:num]
        return np.where(flag, values, np.zeros((), values.dtype))

    def evaluate(self, params: Any, obs: ArrayTree, policy_state: ArrayTree) -> Any:
        """Evaluates the critic at the observations of all lanes."""
        return self.programs.value(self._numbers, params, obs, policy_state, None)

    def compile(self, params: Any, obs: ArrayTree) -> None:
        """Compiles `act`: calls it, and goes back to where it was."""
        # Called and not lowered: only a call fills the cache that later calls look in.
        lane, before = np.arange(self._view.num_envs), (self.step, self.state)
        self.act(params, obs, np.ones(len(lane), bool), lane.astype(np.int32))
        self.step, self.state = before

    def restarted(self, unseen: np.ndarray, episode_id: np.ndarray) -> ArrayTree:
        """Returns the state, with that of an episode's start where `unseen`.

        `act` does so by itself; this is for states that a carry returns.
        """
        if not jax.tree.leaves(self.state) or not unseen.any():
            return self.state
        return self.programs.restart(
            self._numbers, self._root, unseen, episode_id, self.state
        )


@programs.shared
def _programs(structure: Any, view: Any, impl: Any) -> _Programs:
    """Compiles the functions of policies of a structure, `jax.tree.structure`.

    The first argument of each is the numbers of the policy, its leaves.
    """

    def initial(numbers: list[Any], key: chex.PRNGKey) -> ArrayTree:
        policy = jax.tree.unflatten(structure, numbers)
        first = jnp.arange(view.num_envs, dtype=jnp.int32)
        return init_policy_state(policy, episode_keys.keys_of(key, first))

    def restart(
        numbers: list[Any],
        words: jax.Array,
        restarts: jax.Array,
        episode_id: jax.Array,
        state: ArrayTree,
    ) -> ArrayTree:
        """Returns the state of all lanes, of new episodes where `restarts`."""
        policy = jax.tree.unflatten(structure, numbers)
        root = jax.random.wrap_key_data(words, impl=impl)
        key = episode_keys.keys_of(root, episode_id)
        return restart_policy_state(policy, state, restarts, key)

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
            state = restart(numbers, *lanes, state)
        mine = state
        if env_id is not None:
            mine = jax.tree.map(lambda x: x[env_id], state)
        key = jax.random.wrap_key_data(words, impl=impl)
        seen = view._replace(num_envs=len(jax.tree.leaves(obs)[0]))
        policy = jax.tree.unflatten(structure, numbers)
        decision = outputs.act(policy, seen, params, obs, mine, key)
        new = decision.state
        if env_id is not None:  # `drop`: padding is beyond the last lane
            put = lambda x, rows: x.at[env_id].set(rows, mode="drop")  # noqa: E731
            new = jax.tree.map(put, state, new)
        return new, decision.action, decision.extras

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

    jitted = map(jax.jit, (act, restart, initial, value))
    return _Programs(*jitted)


@jax.jit
def _policy_keys(root: chex.PRNGKey, step: jax.Array) -> jax.Array:
    """Returns the words of the keys of `_AHEAD` steps, from `step` on."""
    steps = step + jnp.arange(_AHEAD, dtype=jnp.int32)
    key = episode_keys.at_step(episode_keys.policy_root(root), steps)
    return jax.random.key_data(key)
