"""`Collector`: steps or whole episodes of a policy in environments written in JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

import chex
import jax
from flax import struct

from rollout import checks, programs
from rollout.envs.types import VectorEnv, check_vector_env, hash_of_types
from rollout.kernel import episodes, fold, step
from rollout.kernel.carry import check_fits, roots_of
from rollout.kernel.recording import checked_parts, mask_out
from rollout.kernel.values import check_values
from rollout.types import (
    ActionT,
    Carry,
    Episodes,
    ObsT,
    ParamsT,
    Policy,
    RecordFn,
    Transition,
    check_carry,
)

Acc = TypeVar("Acc")
Fn = TypeVar("Fn", bound=Callable[..., Any])


def _jit(*static: str) -> Callable[[Fn], Fn]:
    """Returns `jax.jit` with static arguments, as a decorator that keeps the types."""
    decorate: Any = functools.partial(jax.jit, static_argnames=static)
    return decorate


def _jit_fold(*static: str) -> Callable[[Fn], Fn]:
    """Jits a method that folds `fn`, unless jax is tracing or `fn` has no hash."""

    def decorate(method: Any) -> Any:
        jitted = jax.jit(method, static_argnames=("fn", *static))

        @functools.wraps(method)
        def call(
            self: Any, carry: Carry, params: Any, fn: Any, acc: Any, **options: Any
        ) -> Any:
            # A function that may hold tracers must not become a key of the cache of
            # `jit`: it would keep them alive. Then the fold is traced at every call.
            known = programs.static(fn, self, carry, params, acc)
            run = method if known is None else jitted
            return run(self, carry, params, known or fn, acc, **options)

        return call

    return decorate


class Collector(struct.PyTreeNode, Generic[ParamsT, ObsT, ActionT]):
    """Collects the experience of a policy in a vector of environments.

    A collector is a pytree whose leaves are the parameters of the environment and the
    numbers of the policy, so your own jitted function may take it as an argument or
    close over it. Every method is a pure function of its arguments, is jitted, and
    gives the same bits inside your own `jit`.

    Attributes:
        env: `B` environments side by side.
        policy: the policy that acts in them.
        record_fn: maps each `Transition` to the one that is recorded. Pure. It may add
            to `extras`, cast `obs`, clip `reward` or drop a field by setting it to
            `()`. Every method returns recorded transitions; the policy and the running
            totals never see them. It must leave the flags, `mask`, `episode_id`,
            `episode_return`, `episode_length` and `accumulated` as they are.
        accumulators: custom values to accumulate per episode, by name, besides
            `episode_return` and `episode_length`; transitions, episodes and statistics
            have them in `accumulated`.
        is_host: whether Python steps the environments, as those of a `HostCollector`.
    """

    is_host: ClassVar[bool] = False

    env: VectorEnv
    policy: Policy[ParamsT, ObsT, ActionT]
    _: dataclasses.KW_ONLY
    record_fn: RecordFn[ObsT, ActionT] | None = struct.field(
        pytree_node=False, default=None
    )
    # A mapping from names to `Accumulator`s, kept as `Accumulators`.
    accumulators: Any = struct.field(pytree_node=False, default=())
    # Tells classes of environments and policies apart; see `hash_of_types`.
    _types: int = struct.field(pytree_node=False, default=0, repr=False)

    def __post_init__(self) -> None:
        check_vector_env(self.env)
        object.__setattr__(self, "accumulators", checked_parts(self))
        object.__setattr__(self, "_types", hash_of_types((self.env, self.policy)))

    def freeze(self, carry: Carry) -> Self:
        """Fixes the statistics of normalising wrappers, to evaluate with them.

        Args:
            carry: of a training with the same wrappers, with any number of lanes. Only
                the statistics are read, and the collector begins with `init`.

        Returns:
            A collector whose environments never change these statistics; this one if
            its environments have none.

        Raises:
            ValueError: if `carry` has statistics of other wrappers or observations.
        """
        check_carry(carry)
        env = self.env.freeze(carry.env_state)
        return self if env is self.env else self.replace(env=env)

    @_jit()
    def init(self, key: chex.PRNGKey) -> Carry:
        """Starts the first episode of every lane. Jitted.

        Args:
            key: one typed key: the source of all randomness in the run. Its
                implementation decides the generator.

        Returns:
            The carry to pass to the other methods.

        Raises:
            ValueError: if `key` is not one typed key, or if the policy's initial state
                lacks the lane axis.
        """
        checks.typed_key(key)
        return step.init(self, key)

    @_jit()
    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane and resets those whose episode ended. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.

        Returns:
            The next carry, and the transition, `[B, ...]`.

        Raises:
            ValueError: while tracing, if the policy or the environment returns
                something of the wrong structure, shape or dtype.
        """
        return step.step(self, carry, params, roots_of(self, carry))

    def row_shape(self, params: ParamsT) -> Transition[ObsT, ActionT]:
        """Returns the shapes and dtypes of a row, `[B, ...]`; nothing is played.

        Args:
            params: parameters of the policy.

        Raises:
            ValueError: as `step` does.
        """
        # By the jitted methods, so that what they trace is there for later calls, too.
        carry = jax.eval_shape(Collector.init, self, jax.random.key(0))
        return jax.eval_shape(Collector.step, self, carry, params)[1]

    @_jit()
    def value(self, carry: Carry, params: ParamsT) -> Any:
        """Evaluates the policy's critic at the current observations. Jitted.

        After a call of `collect_steps` these are the values of the observations that
        follow its last row, the `last_value` of `next_values`.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.

        Returns:
            `[B]` float, or by group `[B, A_g]`, as `Policy.value` returns them.

        Raises:
            ValueError: if the policy has no critic; while tracing, if it does not
                return one float per lane, or per agent.
        """
        check_fits(self, carry)
        values = self.policy.value(params, carry.obs, carry.policy_state)
        check_values(values, carry.obs)
        return values

    @_jit("num_steps")
    def collect_steps(
        self, carry: Carry, params: ParamsT, num_steps: int
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes `num_steps` steps in every lane. Jitted.

        Inside your own `jit` it is inlined, and a field of the trajectory that you do
        not read costs no memory.

        Args:
            carry: the carry of `init` or of an earlier call; it is not consumed.
            params: parameters of the policy.
            num_steps: T, steps per lane, at least 1. Static: one trace per value.

        Returns:
            The next carry, and the trajectory, `[T, B, ...]`. One call of T steps gives
            the bits of two calls of T/2.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
        """
        num_steps = checks.int_between("num_steps", num_steps)
        return fold.collect_steps(self, carry, params, num_steps)

    @_jit_fold("num_steps")
    def fold_steps(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_steps: int,
    ) -> tuple[Carry, Acc]:
        """Takes `num_steps` steps and folds each transition into `acc`. Jitted.

        Transitions are not stacked, so memory does not grow with `num_steps`.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.
            fn: `(acc, transition)` to the next `acc`, of unchanged structure, shapes
                and dtypes; the transition is `[B, ...]`. Static: another function
                object compiles again.
            acc: the initial `acc`, any pytree of arrays.
            num_steps: steps per lane, at least 1.

        Returns:
            The next carry, and `acc` after the last step.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        num_steps = checks.int_between("num_steps", num_steps)
        checks.function("fn", fn, "acc", "transition")
        carry, acc, _ = fold.scan_steps(
            self, carry, params, num_steps, lambda _, acc, row: (fn(acc, row), ()), acc
        )
        return carry, acc

    @_jit(
        "num_episodes", "max_episode_steps", "min_steps", "per_env", "return_trajectory"
    )
    def collect_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        num_episodes: int,
        *,
        max_episode_steps: int | None = None,
        min_steps: int | None = None,
        per_env: bool = False,
        return_trajectory: bool = False,
    ) -> tuple[Carry, Episodes]:
        """Plays exactly `num_episodes` new episodes. Jitted.

        The lanes serve one queue: a lane whose episode is over takes the next one that
        has not started, and the call ends when all have ended. Episodes count in the
        order in which they start, so short ones are not favoured.

        If the policy draws nothing, or only from an `EpisodeKey`, and keeps nothing
        `Persistent`, episode k is the same whichever lane plays it and for any number
        of lanes, and one call of N gives the episodes of two calls of N/2. The key that
        a policy is called with is that of a step: with one that draws from it, such as
        `random_policy`, episode k begins alike, and its actions depend on when it is
        played.

        Args:
            carry: the carry of `init` or of an earlier call. Its unfinished episodes
                are given up.
            params: parameters of the policy.
            num_episodes: N, at least 1. Static: one trace per value.
            max_episode_steps: L, steps of an episode after which it is cut, at least 1;
                None for 1,000,000, which ends the call if an episode never ends.
                Required with `return_trajectory`.
            min_steps: plays only the first episodes, in the order of their start, that
                have this many steps together, at least 1; which ones does not depend on
                the lanes. `Episodes.mask` is True for them; N is the most there can
                be, and may be too few. None plays all N.
            per_env: whether every lane plays N episodes of its own instead: the right
                choice where lanes differ, as those of `rollout.envs.vectorize_each` do,
                for a lane with short episodes would take more of the queue. There are
                `N * B` episodes then: lane i's n-th (from 0) is in place `n * B + i`,
                and from a fresh carry it has this number for `at_episode`. An episode
                of the carry without a step is the first. Not with `min_steps`.
            return_trajectory: whether `episodes.trajectory` has all steps of the
                episodes. Memory is that of L x N transitions.

        Returns:
            The next carry, every lane at the start of a new episode of its own; and the
            episodes, `[N]`, in the order in which they started.

        Raises:
            ValueError: if a number is not an int of at least 1, if `min_steps` is given
                with `per_env`, if `max_episode_steps` is not given with
                `return_trajectory`, or as `step` does.
        """
        num_episodes = checks.int_between("num_episodes", num_episodes)
        max_episode_steps = checks.max_episode_steps(
            max_episode_steps, return_trajectory
        )
        min_steps = checks.min_steps(min_steps, per_env)
        # Without rows nothing is accumulated: episodes have their own table.
        fn: Any = lambda acc, transition, index: acc  # noqa: E731
        acc: Any = ()
        if return_trajectory:
            row = self.row_shape(params)
            # One column per episode; with `per_env` every lane plays N of them.
            number = num_episodes * (self.env.num_envs if per_env else 1)
            acc, fn = episodes.pad(row, number, max_episode_steps)
        carry, rows, played = episodes.play(
            self,
            carry,
            params,
            fn,
            acc,
            num_episodes=num_episodes,
            per_env=per_env,
            max_episode_steps=max_episode_steps,
            min_steps=min_steps,
            holds=not return_trajectory,
        )
        if not return_trajectory:
            return carry, played
        if min_steps is not None:  # others were started, and do not count
            rows = mask_out(rows.replace(mask=rows.mask & played.mask[None]))
        return carry, played.replace(trajectory=rows)

    @_jit_fold("num_episodes", "max_episode_steps")
    def fold_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_episodes: int,
        max_episode_steps: int | None = None,
    ) -> tuple[Carry, Acc, Episodes]:
        """Plays `num_episodes` episodes and folds each transition. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.
            fn: `(acc, transition)` to the next `acc`, of unchanged structure, shapes
                and dtypes. The transition is `[B, ...]`; where its `mask` is False the
                lane is idle: no reward, no flag. The step at which `max_episode_steps`
                runs out is `truncated`. The episode at position e of the queue has the
                `episode_id` `-1 - e`. Static, as in `fold_steps`.
            acc: the initial `acc`, any pytree of arrays.
            num_episodes: N, at least 1.
            max_episode_steps: steps of an episode after which it is cut, at least 1;
                None for 1,000,000.

        Returns:
            The next carry, `acc` after the last step, and the episodes, as
            `collect_episodes` returns them.

        Raises:
            ValueError: as `collect_episodes` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        num_episodes = checks.int_between("num_episodes", num_episodes)
        checks.function("fn", fn, "acc", "transition")
        return episodes.play(
            self,
            carry,
            params,
            lambda acc, transition, _: fn(acc, transition),
            acc,
            num_episodes=num_episodes,
            max_episode_steps=checks.max_episode_steps(max_episode_steps),
        )
