"""The options of a stream: what is refused, and what they settle."""

from typing import Any, NamedTuple

import jax

from rollout import checks
from rollout.collector import Collector
from rollout.stream._place import Placement
from rollout.stream._rows import Postprocess
from rollout.stream._window import Spec
from rollout.types import Policy

_MAX_INT = 2**31 - 1  # steps of a batch are counted in int32
_COUNTS = (
    "steps_per_batch",
    "episodes_per_batch",
    "total_steps",
    "max_episode_steps",
)
# What counts steps: those of whole episodes do not come out even.
_NOT_WITH_EPISODES = ("total_steps", "warmup_steps")
_ON_FAULT = ("raise", "drop")


class Options(NamedTuple):
    """The options as `Stream` takes them; see there."""

    steps_per_batch: int | None
    episodes_per_batch: int | None
    total_steps: int | None
    warmup_steps: int
    max_episode_steps: int | None
    reset_each_batch: bool
    truncate_at_batch_end: bool
    postprocess: Postprocess | None
    placement: Placement
    prefetch: int
    recycle: bool
    check_finite: bool
    on_fault: str

    @property
    def limit(self) -> int:
        """Steps of an episode after which it is truncated."""
        return min(self.max_episode_steps or _MAX_INT, _MAX_INT)


def check(options: Options) -> None:
    """Refuses options that cannot be served.

    Raises:
        ValueError: if there is one.
    """
    for name in _COUNTS:
        if getattr(options, name) is not None:
            checks.count(name, getattr(options, name))
    if (options.steps_per_batch is None) == (options.episodes_per_batch is None):
        raise ValueError(
            "Either `steps_per_batch` or `episodes_per_batch` must be given, got "
            f"{options.steps_per_batch} and {options.episodes_per_batch}."
        )
    if (options.steps_per_batch or 0) > _MAX_INT:
        raise ValueError(
            f"`steps_per_batch` must be at most {_MAX_INT}, got "
            f"{options.steps_per_batch}."
        )
    if options.episodes_per_batch is not None:
        _check_episodes(options)
    if options.warmup_steps != 0:
        _check_warmup(options.warmup_steps)
    if isinstance(options.prefetch, bool) or options.prefetch not in (0, 1):
        raise ValueError(f"`prefetch` must be 0 or 1, got {options.prefetch!r}.")
    if options.on_fault not in _ON_FAULT:
        raise ValueError(
            f'`on_fault` must be "raise" or "drop", got {options.on_fault!r}.'
        )
    if options.on_fault == "drop" and not options.check_finite:
        raise ValueError(
            '`on_fault="drop"` needs `check_finite=True`, got `check_finite=False`.'
        )
    if options.reset_each_batch and options.truncate_at_batch_end:
        raise ValueError(
            "Only one of `reset_each_batch` and `truncate_at_batch_end` may be True: "
            "the second already gives every batch episodes of its own."
        )
    _check_placement(options)


def make_spec(options: Options, num_envs: int) -> Spec:
    """Says what is settled when compiling."""
    steps = options.steps_per_batch or 0
    counts = steps, options.total_steps or 0
    return Spec(
        num_rows=-(-steps // num_envs) or options.max_episode_steps,
        has_idle_lanes=any(count % num_envs for count in counts),
        has_warmup=options.warmup_steps > 0,
        # Where a batch of whole episodes ends, nothing is under way.
        reset_each_batch=options.reset_each_batch and steps > 0,
        truncate_at_batch_end=options.truncate_at_batch_end and steps > 0,
        check_finite=options.check_finite,
        drop_faulty=options.on_fault == "drop",
        postprocess=options.postprocess,
        num_episodes=options.episodes_per_batch,
    )


def with_mode(collector: Collector) -> Collector:
    """Makes the collector whose policy takes the mode.

    Raises:
        ValueError: if the policy has none.
    """
    policy = collector.policy
    if policy.mode is None:
        raise ValueError(
            "`deterministic=True` needs a policy with a `mode`, got one without; "
            "`stateless_policy` and `recurrent_policy` take it as `mode_fn`."
        )
    return collector.replace(policy=Policy(init=policy.init, apply=policy.mode))


def same_kind(old: Any, new: Any) -> bool:
    """Tells whether two trees agree in structure, shapes and dtypes."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        return False
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


def describe_kind(tree: Any) -> str:
    """Says of a tree what `same_kind` compares."""
    kinds = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
    return f"{jax.tree.structure(tree)} of {', '.join(kinds) or 'nothing'}"


def _check_episodes(options: Options) -> None:
    if options.max_episode_steps is None:
        raise ValueError(
            "`episodes_per_batch` needs `max_episode_steps`, the number of rows, got "
            "None."
        )
    for name in _NOT_WITH_EPISODES:
        if getattr(options, name):
            raise ValueError(
                f"`{name}` must not be given with `episodes_per_batch`, got "
                f"{getattr(options, name)!r}."
            )
    if options.on_fault == "drop":
        raise ValueError(
            '`on_fault="drop"` must not be given with `episodes_per_batch`: there the '
            "number of episodes is exact."
        )


def _check_warmup(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"`warmup_steps` must be an int of at least 0, got {value!r}.")


def _check_placement(options: Options) -> None:
    placement = options.placement
    named = placement in ("device", "host") if isinstance(placement, str) else False
    if not named and not isinstance(placement, jax.sharding.Sharding):
        raise ValueError(
            '`placement` must be "device", "host" or a `jax.sharding.Sharding`, got '
            f"{placement!r}."
        )
    if options.recycle and placement != "device":
        raise ValueError(
            '`recycle=True` needs `placement="device"`, got '
            f"{placement!r}: a copy elsewhere is not the memory to hand back."
        )
