"""`Collector`: collects steps or whole episodes in environments written in JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

import chex
import jax
from flax import struct

from rollout.base import checks, programs
from rollout.base.names import Hints
from rollout.envs.types import VectorEnv, check_vector_env
from rollout.kernel import episodes, keys, scan, step
from rollout.kernel.state import (
    check_fits,
    check_values,
    checked_accumulators,
    mask_out,
    roots_of,
)
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
    """Jits a method that folds `fn`, unless JAX is tracing or `fn` is not hashable."""

    def decorate(method: Any) -> Any:
        jitted = jax.jit(method, static_argnames=("fn", *static))

        @functools.wraps(method)
        def call(
            self: Any, carry: Carry, params: Any, fn: Any, acc: Any, **options: Any
        ) -> Any:
            # A function that may close over tracers must not become a cache key of
            # `jit`, which would keep the tracers alive. Every call then traces again.
            static_fn = programs.static(fn, self, carry, params, acc)
            run = method if static_fn is None else jitted
            return run(self, carry, params, static_fn or fn, acc, **options)

        return call

    return decorate


class Collector(Hints, struct.PyTreeNode, Generic[ParamsT, ObsT, ActionT]):
    """Collects the experience of a policy in a vector of environments.

    A collector is a pytree whose leaves are the parameters of the environment and the
    numeric fields of the policy, so a jitted function may take it as an argument or
    close over it. Every method is a pure function of its arguments. Jitted methods
    return bitwise identical results inside an outer `jit`.

    Attributes:
        env: vector of `B` environments.
        policy: the policy that chooses the actions.
        record_fn: maps each `Transition` to the recorded transition. Pure. It may add
            to `extras`, cast `obs`, clip `reward` or drop a field by setting it to
            `()`. Every method returns recorded transitions, but the policy and the
            returns use the original transitions. It must not change `terminated`,
            `truncated`, `mask`, `accumulated` and fields that begin with `episode_`.
        accumulators: custom values to accumulate per episode, by name. Transitions,
            episodes and statistics return them in `accumulated`.
        is_host: whether Python steps the environments, as in a `HostCollector`.
    """

    is_host: ClassVar[bool] = False

    env: VectorEnv
    policy: Policy[ParamsT, ObsT, ActionT]
    _: dataclasses.KW_ONLY
    record_fn: RecordFn[ObsT, ActionT] | None = struct.field(
        pytree_node=False, default=None
    )
    # A mapping from names to `Accumulator`s, stored as `Accumulators`.
    accumulators: Any = struct.field(pytree_node=False, default=())
    # Distinguishes classes of environments and policies; see `hash_of_types`.
    _types: int = struct.field(pytree_node=False, default=0, repr=False)

    def __post_init__(self) -> None:
        check_vector_env(self.env)
        object.__setattr__(self, "accumulators", checked_accumulators(self))
        types = programs.hash_of_types(
            self.env, self.policy, static=(self.record_fn, self.accumulators)
        )
        object.__setattr__(self, "_types", types)

    def freeze(self, carry: Carry) -> Self:
        """Fixes the statistics of normalizing wrappers. Use it before evaluation.

        Args:
            carry: carry of a training run with the same wrappers and any number of
                lanes. Only the statistics are read: call `init` for a new carry.

        Returns:
            A collector whose environments never change the statistics. If the
            environments have no statistics, the same collector.

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
            key: one typed key, the source of all randomness in the run. The
                implementation of the key determines the random number generator.

        Returns:
            The carry to pass to the other methods.

        Raises:
            ValueError: if `key` is not one typed key, or if the policy's initial state
                lacks the lane axis.
        """
        checks.check_key(key)
        return step.init(self, key)

    @_jit()
    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane and resets the finished lanes. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.

        Returns:
            The next carry, and the transition, `[B, ...]`.

        Raises:
            ValueError: while tracing, if an output of the policy or the environment
                has the wrong structure, shape or dtype.
        """
        return step.step(self, carry, params, roots_of(self, carry))

    def row_shape(self, params: ParamsT) -> Transition[ObsT, ActionT]:
        """Returns the shapes and dtypes of a transition, `[B, ...]`, without a step.

        Args:
            params: parameters of the policy.

        Raises:
            ValueError: as `step` does.
        """
        # Trace the jitted methods, so that later calls reuse the cached traces.
        carry = jax.eval_shape(Collector.init, self, jax.random.key(0))
        return jax.eval_shape(Collector.step, self, carry, params)[1]

    @_jit()
    def value(self, carry: Carry, params: ParamsT) -> Any:
        """Evaluates the policy's critic at the current observations. Jitted.

        Call it after `collect_steps` to compute `last_value` for `next_values`: the
        values of the observations after the last step.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.

        Returns:
            `[B]` float, or `[B, A_g]` by group, as `Policy.value` returns them.

        Raises:
            ValueError: if the policy has no critic; while tracing, if the critic does
                not return one float per lane, or per agent.
        """
        check_fits(self, carry)
        values = self.policy.value(params, carry.obs, carry.policy_state)
        check_values(values, carry.obs)
        return values

    @_jit("num_steps", "max_episode_steps", "at_batch_end")
    def collect_steps(
        self,
        carry: Carry,
        params: ParamsT,
        num_steps: int,
        *,
        max_episode_steps: int | None = None,
        at_batch_end: str = "continue",
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes `num_steps` steps in every lane. Jitted.

        Inside an outer `jit` the call is inlined, and unused fields of the trajectory
        take no memory.

        Args:
            carry: the carry of `init` or of an earlier call; it is not donated.
            params: parameters of the policy.
            num_steps: T, steps per lane, at least 1. Static: one trace per value.
            max_episode_steps: time limit of an episode in steps, counted across calls.
                The last step is marked as `truncated`. If the environment terminates at
                the same step, both flags are set. None sets no limit.
            at_batch_end: treatment of episodes that are unfinished at the end of a
                call. `"continue"` continues them in the next call. `"reset"` starts new
                episodes in every call: it discards the unfinished episodes of the
                previous call without setting a flag. `"truncate"` also starts new
                episodes, but marks the last step of unfinished episodes as `truncated`.
                `record_fn` and the accumulators observe this flag, `info` does not.
                `next_obs` is the true successor.

        Returns:
            The next carry, and the trajectory, `[T, B, ...]`. One call of T steps
            returns the same bits as two calls of T/2, unless `at_batch_end` is
            `"reset"` or `"truncate"`.

        Raises:
            ValueError: if `num_steps` or `max_episode_steps` is not an int of at least
                1, if `at_batch_end` is another text, or as `step` does.
        """
        num_steps = checks.check_int("num_steps", num_steps)
        if max_episode_steps is not None:
            max_episode_steps = checks.check_max_episode_steps(max_episode_steps)
        ends = "continue", "reset", "truncate"
        checks.check_choice("at_batch_end", at_batch_end, ends)
        if at_batch_end == "reset":
            start = keys.next_episodes(self.env, carry, roots_of(self, carry))
            # An episode without any step is already new: keep it.
            carry = step.restart(self, carry, carry.episode.episode_length > 0, start)
        return scan.collect_steps(
            self,
            carry,
            params,
            num_steps,
            limit=max_episode_steps,
            cut_last=at_batch_end == "truncate",
        )

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
            fn: maps `(acc, transition)` to the next `acc`, of unchanged structure,
                shapes and dtypes; the transition is `[B, ...]`. Static: every new
                function object is compiled.
            acc: the initial `acc`, any pytree of arrays.
            num_steps: steps per lane, at least 1.

        Returns:
            The next carry, and `acc` after the last step.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        num_steps = checks.check_int("num_steps", num_steps)
        checks.check_function("fn", fn, "acc", "transition")
        carry, acc, _ = scan.scan_steps(
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

        The lanes take episodes from one queue: a finished lane starts the next episode
        of the queue, and the call returns when all N episodes have ended. The N
        episodes are the first to start, so there is no bias toward short episodes.

        If the policy is deterministic or samples only from an `EpisodeKey`, and has no
        `Persistent` state, episode k does not depend on the lane or the number of
        lanes. One call of N then returns the same episodes as two calls of N/2. The key
        argument of a policy changes at every step: if the policy samples from it, as
        `random_policy` does, episode k starts from the same state, but its actions
        depend on the lane and on the step at which the episode starts.

        Args:
            carry: the carry of `init` or of an earlier call. Unfinished episodes are
                discarded.
            params: parameters of the policy.
            num_episodes: N, at least 1. Static: one trace per value.
            max_episode_steps: L, steps after which an episode is truncated, at least 1.
                None is 1,000,000, so that the call returns even if an episode never
                ends. Required with `return_trajectory`.
            min_steps: total number of steps, at least 1. Stops early: the call returns
                the first episodes, in the order of their start, that have this many
                steps together, for any number of lanes. `Episodes.mask` is True for
                these episodes. If all N episodes have fewer steps, the call returns
                all of them. None plays all N.
            per_env: whether every lane plays N episodes, without a queue. Use it if
                lanes differ, as in `rollout.envs.vectorize_each`: a lane with short
                episodes would take more of the queue. The call returns `N * B`
                episodes. Episode n (from 0) of lane i has the index `n * B + i`, which
                is also its number for `at_episode` if the carry is from `init`. If the
                current episode of a lane has no steps yet, it is episode 0. Not
                allowed with `min_steps`.
            return_trajectory: whether `episodes.trajectory` contains all steps of the
                episodes, which needs memory for L x N transitions.

        Returns:
            The next carry, with every lane at the start of a new episode; and the
            episodes, `[N]`, in the order in which they started.

        Raises:
            ValueError: if a number is not an int of at least 1, if `min_steps` is given
                with `per_env`, if `max_episode_steps` is not given with
                `return_trajectory`, or as `step` does.
        """
        num_episodes = checks.check_int("num_episodes", num_episodes)
        max_episode_steps = checks.check_max_episode_steps(
            max_episode_steps, return_trajectory
        )
        min_steps = checks.check_min_steps(min_steps, per_env)
        # Without a trajectory `acc` stays empty: `play` stores the episode results.
        fn: Any = lambda acc, transition, index: acc  # noqa: E731
        acc: Any = ()
        if return_trajectory:
            row = self.row_shape(params)
            # One column per episode; with `per_env` every lane plays N episodes.
            number = num_episodes * (self.env.num_envs if per_env else 1)
            acc, fn = episodes.pad(row, number, max_episode_steps)
        carry, rows, result = episodes.play(
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
            return carry, result
        if min_steps is not None:  # mask out later episodes
            rows = mask_out(rows.replace(mask=rows.mask & result.mask[None]))
        return carry, result.replace(trajectory=rows)

    @_jit_fold("num_episodes", "max_episode_steps", "per_env")
    def fold_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_episodes: int,
        max_episode_steps: int | None = None,
        per_env: bool = False,
    ) -> tuple[Carry, Acc, Episodes]:
        """Plays `num_episodes` episodes and folds each transition. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: parameters of the policy.
            fn: maps `(acc, transition)` to the next `acc`, of unchanged structure,
                shapes and dtypes. The transition is `[B, ...]`. If `mask` is False, the
                lane is idle, and its reward and flags are 0. If an episode reaches
                `max_episode_steps`, its last step is `truncated`. The episode at
                position e of the queue has the `episode_id` `-1 - e`. Static, as in
                `fold_steps`.
            acc: the initial `acc`, any pytree of arrays.
            num_episodes: N, at least 1.
            max_episode_steps: steps after which an episode is truncated, at least 1;
                None is 1,000,000.
            per_env: whether every lane plays N episodes, as in `collect_episodes`.

        Returns:
            The next carry, `acc` after the last step, and the episodes, as
            `collect_episodes` returns them.

        Raises:
            ValueError: as `collect_episodes` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        num_episodes = checks.check_int("num_episodes", num_episodes)
        checks.check_function("fn", fn, "acc", "transition")
        return episodes.play(
            self,
            carry,
            params,
            lambda acc, transition, _: fn(acc, transition),
            acc,
            num_episodes=num_episodes,
            per_env=per_env,
            max_episode_steps=checks.check_max_episode_steps(max_episode_steps),
        )
