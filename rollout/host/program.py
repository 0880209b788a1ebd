"""The policy as one compiled program, which a loop in Python calls at every step."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from envs.types import AnySpace, ArrayTree
from rollout import kernel
from rollout.kernel import episode_keys
from rollout.kernel.episode_keys import LaneIds
from rollout.kernel.transition import initial_policy_state, restart_policy
from rollout.policies.exploration import random_where
from rollout.types import Carry, Episode, Policy

_AHEAD = 256  # keys that are drawn at once


class View(NamedTuple):
    """The part of an environment that the kernel reads to let a policy act."""

    num_envs: int
    action_space: AnySpace


class Program:
    """A policy that acts on the host: its state and its keys stay on the device.

    Args:
        policy: the policy.
        action_space: of one lane.
        num_envs: E, lanes; a call may be about some of them.

    Attributes:
        step: how often it has acted.
        state: `[E, ...]`, of the policy.
        has_state: whether there is anything in it.
    """

    def __init__(self, policy: Policy, action_space: AnySpace, num_envs: int) -> None:
        self._policy = policy
        self._view: Any = View(num_envs, action_space)
        self._impl: Any = None

    def start(self, key: chex.PRNGKey) -> None:
        """Puts the policy to its first step; `key` is one typed root key."""
        if self._impl != (impl := jax.random.key_impl(key)):
            self._impl = impl
            self._act = jax.jit(self._apply)
            self._restart = jax.jit(self._restarted)
            self._initial = jax.jit(self._initial_state)
        self.step, self._key = 0, key
        self.state = self._initial(key)
        self.has_state = bool(jax.tree.leaves(self.state))
        # Words, for a typed key takes jax's slow way in; and those of many steps are
        # drawn at once, for in a small program two hashes are most of the time.
        self._words = np.asarray(jax.random.key_data(key))
        self._first, self._keys = 0, self._words[None][:0]

    def act(
        self,
        params: Any,
        obs: ArrayTree,
        over: np.ndarray,
        episode_id: np.ndarray,
        *,
        env_id: np.ndarray | None = None,
        is_random: np.ndarray | None = None,
    ) -> tuple[ArrayTree, ArrayTree]:
        """Asks the policy what to do, and moves its state on.

        Args:
            params: whatever the policy takes as its parameters.
            obs: `[R, ...]`, NumPy; nobody may write to it afterwards.
            over: `[R]` bool, lanes that are at the start of an episode.
            episode_id: `[R]` int32, the episodes they are in.
            env_id: `[R]` int32, which lanes these are; None for all E in order.
            is_random: `[R]` bool, lanes that act at random instead; None for nowhere.

        Returns:
            Action and extras, `[R, ...]`, NumPy.
        """
        lanes = (self._words, over, episode_id) if self.has_state else ()
        warmup = () if is_random is None else (self._warmup_words(), is_random)
        args = self._policy_words(), self.state, obs, lanes, env_id, warmup
        self.state, out = self._act(params, *args)
        self.step += 1
        leaves, structure = jax.tree.flatten(out)
        # Where the parameters put the program, whatever jax's default is.
        if any(device.platform != "cpu" for device in leaves[0].devices()):
            return jax.device_get(out)  # all copies begin before one is waited for
        return structure.unflatten([np.asarray(x) for x in leaves])

    def compile(self, params: Any, obs: ArrayTree) -> None:
        """Compiles `act`, which moves nothing on."""
        at = self.step, self.state
        num_lanes = self._view.num_envs
        self.act(
            params, obs, np.ones(num_lanes, bool), np.arange(num_lanes, dtype=np.int32)
        )
        self.step, self.state = at

    def restart(self, over: np.ndarray, episode_id: np.ndarray) -> None:
        """Puts the state of the lanes where `over` back to that of an episode's start.

        `act` does so by itself; this is for a state that is looked at.
        """
        if self.has_state and over.any():
            self.state = self._restart(self._words, self.state, over, episode_id)

    def _initial_state(self, key: chex.PRNGKey) -> ArrayTree:
        lanes = episode_keys.all_lanes(self._view.num_envs)
        first = episode_keys.keys_of(key, lanes, lanes.number)
        return initial_policy_state(self._policy, self._view, first)

    def _policy_words(self) -> np.ndarray:
        """The words of the policy's key at this step."""
        row = self.step - self._first
        if row < 0 or row >= len(self._keys):
            row, self._first = 0, self.step
            self._keys = np.asarray(_policy_keys(self._key, self.step))
        return self._keys[row]

    def _warmup_words(self) -> np.ndarray:
        root = episode_keys.warmup_root(self._key)
        key = episode_keys.at_step(root, jnp.int32(self.step))
        return np.asarray(jax.random.key_data(key))

    def _apply(
        self,
        params: Any,
        words: jax.Array,
        state: ArrayTree,
        obs: ArrayTree,
        lanes: tuple[jax.Array, ...],
        env_id: jax.Array | None,
        warmup: tuple[jax.Array, ...],
    ) -> tuple[ArrayTree, tuple[ArrayTree, ...]]:
        policy, num_lanes, old = self._policy, len(jax.tree.leaves(obs)[0]), state
        view = self._view._replace(num_envs=num_lanes)
        if lanes:
            root, over, episode_id = lanes
            state = self._restarted(root, state, over, episode_id, env_id)
        if warmup:
            warmup_words, is_random = warmup
            policy = random_where(
                policy, view.action_space, is_random, self._wrap(warmup_words)
            )
        carry = _carry(obs, state)
        decision = kernel.act(view, policy, carry, params, self._wrap(words))
        state = decision.state
        if env_id is not None:
            put = lambda x, rows: x.at[env_id].set(rows, mode="drop")  # noqa: E731
            state = jax.tree.map(put, old, state)
        return state, (decision.action, decision.extras)

    def _wrap(self, words: jax.Array) -> chex.PRNGKey:
        return jax.random.wrap_key_data(words, impl=self._impl)

    def _restarted(
        self,
        words: jax.Array,
        state: ArrayTree,
        over: jax.Array,
        episode_id: jax.Array,
        env_id: jax.Array | None = None,
    ) -> ArrayTree:
        """The state of the lanes that act, of new episodes where `over`."""
        root = self._wrap(words)
        lanes = episode_keys.all_lanes(self._view.num_envs)
        policy, take = self._policy, lambda tree: tree
        if env_id is not None:
            take = functools.partial(jax.tree.map, lambda x: jnp.asarray(x)[env_id])
            lanes = LaneIds(lanes.number[env_id], lanes.total)
            init, num_envs = policy.init, self._view.num_envs
            policy = policy._replace(init=lambda _: take(init(num_envs)))
        view = self._view._replace(num_envs=len(over))
        key = episode_keys.keys_of(root, lanes, episode_id)
        return restart_policy(policy, view, take(state), over, key)


@jax.jit
def _policy_keys(root: chex.PRNGKey, step: jax.Array) -> jax.Array:
    """The words of the keys of so many steps from `step` on."""
    steps = step + jnp.arange(_AHEAD, dtype=jnp.int32)
    key = episode_keys.at_step(episode_keys.policy_root(root), steps)
    return jax.random.key_data(key)


def _carry(obs: ArrayTree, state: ArrayTree) -> Carry:
    """The part of a carry that `kernel.act` reads."""
    no: Any = ()
    nothing = Episode(key=no, episode_return=no, episode_length=no, episode_id=no)
    return Carry(
        key=no,
        step=no,
        next_episode=no,
        env_state=no,
        obs=obs,
        policy_state=state,
        episode=nothing,
    )
