"""The collector: folds over time of the kernel's one step."""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer

from envs import keys
from envs.types import VectorEnv, node_types
from rollout import checks, kernel, unrolling
from rollout.kernel import blocks, episodes
from rollout.kernel.episode_keys import Roots
from rollout.types import (
    ActionT,
    Carry,
    Episodes,
    ObsT,
    ParamsT,
    Policy,
    RecordFn,
    Transition,
    ValueFn,
)

Acc = TypeVar("Acc")

# Steps in one iteration. On a GPU 2 save a third of the launches, and 4 less than that
# again, but compile twice as long. On a TPU 2 save cycles of large observations only,
# and take hundreds of megabytes more with 65,536 lanes.
_GPU_UNROLL = 2


class Collector(struct.PyTreeNode, Generic[ParamsT, ObsT, ActionT], kw_only=True):
    """Collects experience: a policy in a vector of environments.

    A pytree whose leaves are the environment's parameters, so it may be an argument
    of your own jitted function or closed over. Every method is a pure function of its
    arguments, is jitted, and gives the same bits inside your own `jit`.

    Attributes:
        env: `B` environments side by side.
        policy: the policy that acts in them.
        record_fn: what is recorded of a transition, `Transition` to `Transition`, pure:
            it may add to `extras`, cast `obs`, clip `reward` or put `()` for a field.
            Every method hands out what it returns; the policy and the running totals
            never see it. It must leave the flags, `mask`, `episode_id`,
            `episode_return`, `episode_length` and `accumulated` as they are.
        accumulators: figures of one's own that are kept per episode, by name, besides
            `episode_return` and `episode_length`: they stand in `accumulated` of
            transitions, of episodes and of statistics.
        value_fn: the value of observations, `(params, obs, policy_state)` to `[K]`
            float, row by row; `policy_state` is `()` of a policy without one. It is
            called with the few rows whose episode was truncated, and `final_value` of
            transitions has the result, for `next_values`. It is a constant to
            derivatives.
    """

    env: VectorEnv
    policy: Policy[ParamsT, ObsT, ActionT] = struct.field(pytree_node=False)
    record_fn: RecordFn[ObsT, ActionT] | None = struct.field(
        pytree_node=False, default=None
    )
    # A mapping from names to `Accumulator`s, kept as `Accumulators`.
    accumulators: Any = struct.field(pytree_node=False, default=())
    value_fn: ValueFn | None = struct.field(pytree_node=False, default=None)
    _types: tuple[type, ...] = struct.field(pytree_node=False, default=(), repr=False)

    def __post_init__(self) -> None:
        checks.collector(self.env, self.policy, self.record_fn, self.value_fn)
        checks.kind_of_env(self.env, is_host=False)
        accumulators = checks.accumulators(self.accumulators)
        object.__setattr__(self, "accumulators", accumulators)
        object.__setattr__(self, "_types", node_types(self.env))

    def init(self, key: chex.PRNGKey) -> Carry:
        """Starts the first episode of every lane. Jitted.

        Args:
            key: one typed key; it decides all that is random in the run, and its
                implementation decides the generator.

        Returns:
            The carry to hand to the other methods.

        Raises:
            ValueError: if `key` is not one typed key, or if the policy's initial state
                lacks the lane axis.
        """
        checks.typed_key(key)
        return _init(self, key)

    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane and resets those whose episode ended. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: whatever the policy takes as its parameters.

        Returns:
            The next carry, and the transition, `[B, ...]`.

        Raises:
            ValueError: while tracing, if the policy or the environment returns
                something of the wrong structure, shape or dtype.
        """
        return _step(self, carry, params)

    def collect_steps(
        self, carry: Carry, params: ParamsT, num_steps: int
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes `num_steps` steps in every lane. Jitted.

        Inside your own `jit` it is inlined: a field of the trajectory that is not read
        costs no memory there.

        Args:
            carry: the carry of `init` or of an earlier call; it is not consumed.
            params: whatever the policy takes as its parameters.
            num_steps: T, steps per lane, at least 1. Static: one trace per value.

        Returns:
            The next carry, and the trajectory, `[T, B, ...]`. One call of T steps gives
            the bits of two calls of T/2.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
        """
        num_steps = checks.count("num_steps", num_steps)
        return _collect_steps(self, carry, params, num_steps)

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

        Nothing is stacked, so memory does not grow with `num_steps`.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: whatever the policy takes as its parameters.
            fn: `(acc, transition)` to the next `acc`, of unchanged structure, shapes
                and dtypes; the transition is `[B, ...]`. Static: pass the same function
                again, or it is compiled again.
            acc: what `fn` starts from, any pytree of arrays.
            num_steps: steps per lane, at least 1.

        Returns:
            The next carry, and `acc` after the last step.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        num_steps = checks.count("num_steps", num_steps)
        checks.function("fn", fn)
        fold = _jitted(_fold_steps, fn, (self, carry, params, acc))
        return fold(self, carry, params, acc, fn, num_steps)

    def collect_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        num_episodes: int,
        *,
        max_steps: int,
        min_steps: int | None = None,
    ) -> tuple[Carry, Episodes]:
        """Plays exactly `num_episodes` new episodes. Jitted.

        The lanes serve one queue: a lane whose episode is over takes the next one that
        has not started, and the call ends when all have ended. Which episodes are
        played is settled by the order in which they start, so short ones are not
        favoured. Episode k is the same whichever lane plays it, for any number of
        lanes if the policy draws nothing; one call of N gives the episodes of two
        calls of N/2.

        Args:
            carry: the carry of `init` or of an earlier call. Episodes that are under
                way in it are given up.
            params: whatever the policy takes as its parameters.
            num_episodes: N, at least 1. Static: one trace per value.
            max_steps: steps of an episode after which it is cut, at least 1. A large
                one costs nothing. It bounds the call if an episode may never end.
            min_steps: plays no more episodes than it takes to have so many steps, at
                least 1: the first ones, in the order of their start, so that which
                these are depends on no lane. `Episodes.mask` tells them; N is the most
                there can be, and may be too few. None plays all N.

        Returns:
            The next carry, every lane at the start of a new episode of its own, and
            the episodes, `[N]`, in the order in which they started.

        Raises:
            ValueError: if `num_episodes` or `max_steps` is not an int of at least 1, or
                as `step` does.
        """
        num_episodes = checks.count("num_episodes", num_episodes)
        limit, least = checks.max_steps(max_steps), None
        if min_steps is not None:
            least = jnp.int32(checks.count("min_steps", min_steps))
        return _collect_episodes(
            self, carry, params, limit, episodes.queue, num_episodes, least
        )

    def collect_episodes_per_env(
        self,
        carry: Carry,
        params: ParamsT,
        episodes_per_env: int,
        *,
        max_steps: int,
    ) -> tuple[Carry, Episodes]:
        """Plays `episodes_per_env` new episodes in every lane. Jitted.

        The right choice where lanes differ, as those of `envs.vectorize_each` do: the
        queue of `collect_episodes` would give a lane with short episodes more of them.

        Args:
            carry: the carry of `init` or of an earlier call. Episodes that are under
                way in it are given up.
            params: whatever the policy takes as its parameters.
            episodes_per_env: M, at least 1. Static: one trace per value.
            max_steps: steps of an episode after which it is cut, at least 1.

        Returns:
            The next carry, every lane at the start of a new episode, and the episodes,
            `[M * B]`: lane i's m-th episode (from 0) is number `m * B + i`.

        Raises:
            ValueError: as `collect_episodes` does.
        """
        episodes_per_env = checks.count("episodes_per_env", episodes_per_env)
        limit = checks.max_steps(max_steps)
        return _collect_episodes(
            self, carry, params, limit, episodes.per_env, episodes_per_env
        )

    def fold_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_episodes: int,
        max_steps: int,
    ) -> tuple[Carry, Acc, Episodes]:
        """Plays `num_episodes` episodes and folds each transition. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: whatever the policy takes as its parameters.
            fn: `(acc, transition)` to the next `acc`, of unchanged structure, shapes
                and dtypes. The transition is `[B, ...]`; where its `mask` is False the
                lane is idle and the row void (no reward, no flag). A row at which
                `max_steps` ran out is `truncated`. The episode at position e of the
                queue has the `episode_id` `-1 - e`. Static, as in `fold_steps`.
            acc: what `fn` starts from, any pytree of arrays.
            num_episodes: N, at least 1.
            max_steps: steps of an episode after which it is cut, at least 1.

        Returns:
            The next carry, `acc` after the last step, and the episodes, as
            `collect_episodes` gives them.

        Raises:
            ValueError: as `collect_episodes` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        num_episodes = checks.count("num_episodes", num_episodes)
        checks.function("fn", fn)
        limit = checks.max_steps(max_steps)
        fold = _jitted(_fold_episodes, fn, (self, carry, params, acc, limit))
        return fold(self, carry, params, acc, limit, fn, num_episodes)

    def collect_padded_episodes(
        self, carry: Carry, params: ParamsT, num_episodes: int, *, max_length: int
    ) -> tuple[Carry, Transition[ObsT, ActionT], Episodes]:
        """Plays `num_episodes` episodes and returns them whole. Jitted.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: whatever the policy takes as its parameters.
            num_episodes: N, at least 1. Static: one trace per value.
            max_length: L, steps of an episode after which it is cut, at least 1.
                Static. The memory is that of L x N rows.

        Returns:
            The next carry; the trajectory `[L, N, ...]`, step t of episode k in row
            `[t, k]`, all zero with `mask` False after the end of an episode; and the
            episodes, as `collect_episodes` gives them.

        Raises:
            ValueError: if `num_episodes` or `max_length` is not an int of at least 1,
                or as `step` does.
        """
        num_episodes = checks.count("num_episodes", num_episodes)
        max_length = checks.count("max_length", max_length)
        return _collect_padded(self, carry, params, num_episodes, max_length)

    def _play(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        max_steps: jax.Array,
        num_episodes: int,
        *,
        make_plan: Callable[..., episodes.Plan] = episodes.queue,
        min_steps: jax.Array | None = None,
        holds: bool = True,
    ) -> tuple[Carry, Acc, Episodes]:
        """Makes a plan and plays it; `fn` receives the recorded transitions.

        With `holds=False`, `fn` must return `acc` as it is for a void transition.
        """
        checks.carry(carry, self.env.num_envs)
        roots = kernel.roots_of(self.env, carry)

        def see(acc: Acc, transition: Transition, go: jax.Array) -> Acc:
            new = fn(acc, kernel.record(self.record_fn, transition))
            return blocks.hold(go, new, acc) if holds else new

        return episodes.play(
            kernel.setup_of(self),
            carry,
            params,
            see,
            acc,
            plan=make_plan(carry, roots, num_episodes),
            roots=roots,
            max_steps=max_steps,
            min_steps=min_steps,
        )


# Jitted, since operation by operation a first call compiles some forty programs.
@jax.jit
def _init(collector: Collector, key: chex.PRNGKey) -> Carry:
    return kernel.init(kernel.setup_of(collector), key)


def _take(
    collector: Collector,
    carry: Carry,
    params: Any,
    roots: Roots | None = None,
    policy_key: chex.PRNGKey | None = None,
) -> tuple[Carry, Transition]:
    setup = kernel.setup_of(collector)
    carry, transition = kernel.step(
        setup, carry, params, roots=roots, policy_key=policy_key
    )
    return carry, kernel.record(collector.record_fn, transition)


def _on_devices(jitted: Callable[..., Any]) -> Callable[..., Any]:
    """Says which devices the carry must lie on, where jax speaks of arguments."""

    @functools.wraps(jitted)
    def call(collector: Collector, carry: Carry, *args: Any, **options: Any) -> Any:
        checks.devices(collector.env, carry)
        return jitted(collector, carry, *args, **options)

    return call


_step = _on_devices(jax.jit(_take))


def _jitted(
    fold: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]
) -> Callable[..., Any]:
    """Jits a fold whose `fn` and count are static, unless it is being traced already.

    There `fn` may hold on to what is traced, which must not stay in a cache.
    """
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
    try:
        hash(fn)
    except TypeError:
        return fold
    return fold if is_traced else _JITTED[fold]


def _fold_steps(
    collector: Collector,
    carry: Carry,
    params: Any,
    acc: Acc,
    fn: Callable[[Acc, Transition], Acc],
    num_steps: int,
) -> tuple[Carry, Acc]:
    roots = kernel.roots_of(collector.env, carry)

    def step(
        state: tuple[Carry, Acc], policy_key: chex.PRNGKey
    ) -> tuple[tuple[Carry, Acc], None]:
        carry, transition = _take(collector, state[0], params, roots, policy_key)
        return (carry, fn(state[1], transition)), None

    policy_keys = kernel.policy_keys(roots, carry, num_steps)
    state = carry, acc
    return unrolling.scan(step, state, policy_keys, gpu=_GPU_UNROLL, other=1)[0]


def _fold_episodes(
    collector: Collector,
    carry: Carry,
    params: Any,
    acc: Acc,
    max_steps: jax.Array,
    fn: Callable[[Acc, Transition], Acc],
    num_episodes: int,
) -> tuple[Carry, Acc, Episodes]:
    return collector._play(carry, params, fn, acc, max_steps, num_episodes)


@_on_devices
@functools.partial(jax.jit, static_argnames="num_steps")
def _collect_steps(
    collector: Collector, carry: Carry, params: Any, num_steps: int
) -> tuple[Carry, Transition]:
    roots = kernel.roots_of(collector.env, carry)

    def step(
        carry: Carry, policy_key: chex.PRNGKey
    ) -> tuple[Carry, tuple[Transition, jax.Array]]:
        after, transition = _take(collector, carry, params, roots, policy_key)
        return after, kernel.written(kernel.pack(transition), carry.step)

    policy_keys = kernel.policy_keys(roots, carry, num_steps)
    carry, (rows, flags) = unrolling.scan(
        step, carry, policy_keys, gpu=_GPU_UNROLL, other=1
    )
    return carry, kernel.unpack(rows, flags, jnp.ones(flags.shape, bool))


@_on_devices
@functools.partial(jax.jit, static_argnames=("make_plan", "count"))
def _collect_episodes(
    collector: Collector,
    carry: Carry,
    params: Any,
    max_steps: jax.Array,
    make_plan: Callable[..., episodes.Plan],
    count: int,
    min_steps: jax.Array | None = None,
) -> tuple[Carry, Episodes]:
    carry, _, played = collector._play(
        carry,
        params,
        lambda acc, transition: acc,
        (),
        max_steps,
        count,
        make_plan=make_plan,
        min_steps=min_steps,
    )
    return carry, played


@_on_devices
@functools.partial(jax.jit, static_argnames=("num_episodes", "max_length"))
def _collect_padded(
    collector: Collector,
    carry: Carry,
    params: Any,
    num_episodes: int,
    max_length: int,
) -> tuple[Carry, Transition, Episodes]:
    row = jax.eval_shape(collector.step, carry, params)[1]
    blank, write = episodes.pad(row, carry, num_episodes, max_length)
    carry, padded, played = collector._play(
        carry,
        params,
        write,
        keys.words(blank),
        jnp.int32(max_length),
        num_episodes,
        holds=False,
    )
    return carry, keys.like(padded, blank), played


_JITTED = {
    fold: _on_devices(jax.jit(fold, static_argnames=("fn", count)))
    for fold, count in ((_fold_steps, "num_steps"), (_fold_episodes, "num_episodes"))
}
