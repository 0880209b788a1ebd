"""Spaces of observations and actions.

`as_space` converts spaces of other libraries to a `Space`. All other code reads the
`leaves` of a space and their `bounds`, independently of the library.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import checks, prng
from rollout.envs.types import AnySpace, ArrayTree

MASK = "action_mask"  # name of the entry of an observation with the action mask
_NUM_PRINTED = 8  # entries of a bound that `repr` prints one by one


class Space:
    """The set of valid observations or actions of a single environment.

    A custom space is a subclass that defines `sample` and `contains`. If the elements
    are arrays, it also defines `shape` and `dtype`.

    Attributes:
        shape: shape of one element; None if an element has several parts.
        dtype: dtype of one element; None if an element has several parts.
    """

    shape: Any = None
    dtype: Any = None

    def __eq__(self, other: object) -> bool:
        """Compares classes, options and every entry of the bounds."""
        return type(self) is type(other) and _value_of(self) == _value_of(other)

    def __hash__(self) -> int:
        """Hashes the compared values: a space can be a static argument of `jax.jit`."""
        return hash(_value_of(self))

    @property
    def bounds(self) -> tuple[Any, Any] | None:
        """Lowest and highest value of each entry; None if there are no bounds."""
        return None

    def leaves(self) -> list[AnySpace]:
        """Returns the spaces of an element's leaves, in order of `jax.tree.leaves`."""
        return [self]

    def sample(self, key: chex.PRNGKey) -> Any:
        """Samples an element."""
        raise NotImplementedError

    def contains(self, x: Any) -> jax.Array:
        """Returns whether `x` is an element, `()` bool."""
        raise NotImplementedError


class _Bounded(Space):
    """Base class of spaces with a lowest and a highest value for every entry."""

    low: Any
    high: Any

    @property
    def bounds(self) -> tuple[Any, Any]:
        """Lowest and highest value of each entry."""
        return self.low, self.high

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Samples an element uniformly."""
        return prng.sample_uniform(key, self.low, self.high, self.shape, self.dtype)

    def contains(self, x: jax.Array) -> jax.Array:
        """Returns whether every entry lies within its bounds, `()` bool."""
        return jnp.all((x >= self.low) & (x <= self.high))


class Discrete(_Bounded, struct.PyTreeNode, eq=False):
    """The integers `start`, ..., `start + n - 1`.

    Attributes:
        n: number of elements, an int of at least 1.
        dtype: integer dtype of an element.
        start: smallest element, an int.

    Raises:
        ValueError: if `n` is not an int of at least 1, or if `dtype` is not an integer
            dtype that represents every element.
    """

    n: int = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int32)
    )
    start: int = struct.field(pytree_node=False, default=0)
    shape = ()

    def __post_init__(self) -> None:
        # Convert to Python ints and NumPy dtypes: static fields need equality and a
        # hash.
        object.__setattr__(self, "n", checks.check_int("n", self.n))
        object.__setattr__(self, "start", operator.index(self.start))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        checks.check_int_dtype(self.dtype, self.low, self.high)

    @property
    def low(self) -> int:
        """Smallest element."""
        return self.start

    @property
    def high(self) -> int:
        """Largest element."""
        return self.start + self.n - 1


class Box(_Bounded, struct.PyTreeNode, eq=False):
    """Arrays with every entry between `low` and `high`, both included.

    Attributes:
        low: lower bounds, broadcast to `shape`.
        high: upper bounds, broadcast to `shape`.
        shape: shape of an element.
        dtype: dtype of an element: floats, integers of at most 32 bits, or bool.

    Raises:
        ValueError: if `dtype` is another dtype; or, if the values of the bounds are
            known, if a bound is NaN or not representable in `dtype`, if `low` is above
            `high`, or if a bound (except a jax array) does not broadcast to `shape`.
    """

    low: jax.typing.ArrayLike
    high: jax.typing.ArrayLike
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.float32)
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check_shape(self.shape))
        # `np.float32` and its dtype compare equal, but hash differently.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        dtype, bounds = narrow(self.dtype), (self.low, self.high)
        dtypes = jnp.floating, jnp.integer, jnp.bool_
        if not any(jnp.issubdtype(dtype, x) for x in dtypes):
            raise ValueError(
                f"`dtype` must be a float, integer or bool dtype, got {dtype}."
            )
        # jax also builds pytrees of tracers or placeholders, which have no values to
        # validate.
        for bound in bounds if checks.is_concrete(bounds) else ():
            self._check_bound(bound, dtype)
        for name, bound in (("low", self.low), ("high", self.high)):
            if type(bound) is int and not -(2**31) <= bound < 2**31:
                # As an argument of a jitted function, jax would convert it to int32.
                object.__setattr__(self, name, np.asarray(bound, dtype))
        if checks.is_concrete(bounds) and not np.all(
            np.asarray(self.low) <= np.asarray(self.high)
        ):
            raise ValueError(f"`low` must be at most `high`, got {self!r}.")

    def __repr__(self) -> str:
        """Formats the bounds in one line: a large array by its range."""
        low, high = map(_format_bound, self.bounds)
        return f"Box(low={low}, high={high}, shape={self.shape}, dtype={self.dtype})"

    def _check_bound(self, bound: Any, dtype: np.dtype) -> None:
        shape, value = np.shape(bound), np.asarray(bound, np.float64)
        # Compare the shapes from the last axis: each size must be 1 or equal. A jax
        # array may have more axes if bounds are stacked for `vmap` over environments.
        sizes = zip(reversed(shape), reversed(self.shape), strict=False)
        fits = len(shape) <= len(self.shape) and all(a in (1, b) for a, b in sizes)
        if not fits and not isinstance(bound, jax.Array):
            raise ValueError(
                f"`low` and `high` must broadcast to `shape`, {self.shape}, got a "
                f"bound of shape {shape}."
            )
        is_lost = lost_in_cast(value, dtype)
        if is_lost.any():
            raise ValueError(
                "`low` and `high` must be values of `dtype`, got "
                f"{value[is_lost][0]:g} and {dtype}."
            )

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Samples an element with the same distributions as Gymnasium.

        An entry is uniformly distributed if both bounds are finite, exponentially
        distributed if one bound is finite, and normally distributed if no bound is
        finite.
        """
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return super().sample(key)
        is_known = checks.is_concrete(self.bounds)
        xp = np if is_known else jnp  # NumPy computes known values during tracing
        low, high = (xp.broadcast_to(x, self.shape) for x in self.bounds)
        has_low, has_high = xp.isfinite(low), xp.isfinite(high)
        has_both = has_low & has_high
        if is_known and has_both.all():
            return super().sample(key)
        # Sample with `key` itself, as `super().sample` does: the bits must not depend
        # on whether the bounds are known.
        finite_low, finite_high = (xp.where(has_both, x, 0) for x in (low, high))
        uniform = prng.sample_uniform(
            key, finite_low, finite_high, self.shape, self.dtype
        )
        tail_key, normal_key = prng.fold_in(key, jnp.arange(1, 3, dtype=jnp.int32))
        tail = jax.random.exponential(tail_key, self.shape, self.dtype)
        normal = jax.random.normal(normal_key, self.shape, self.dtype)
        low, high = (jnp.asarray(x, self.dtype) for x in (low, high))
        choices = [uniform, low + tail, high - tail]
        return jnp.select([has_both, has_low, has_high], choices, default=normal)


class MultiDiscrete(_Bounded, struct.PyTreeNode, eq=False):
    """Arrays of integers with one range per entry.

    Entry i is one of `start[i]`, ..., `start[i] + nvec[i] - 1`.

    Attributes:
        nvec: number of values of each entry, an array of ints of at least 1; stored as
            tuples.
        dtype: integer dtype of an element.
        start: smallest value of each entry, an int or an array with the shape of
            `nvec`.

    Raises:
        ValueError: if `nvec` is not an array of ints of at least 1, if `start` is
            neither an int nor an array of ints with the same shape, or if `dtype` is
            not an integer dtype that represents every element.
    """

    nvec: Any = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int32)
    )
    start: Any = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        nvec, start = np.asarray(self.nvec), np.asarray(self.start)
        are_ints = all(x.dtype.kind in "iu" for x in (nvec, start))
        fits = nvec.ndim > 0 and start.shape in ((), nvec.shape)
        if not are_ints or not fits or not np.all(nvec >= 1):
            raise ValueError(
                "`nvec` must be an array of ints of at least 1, and `start` an int or "
                f"as many ints, got {self.nvec!r} and {self.start!r}."
            )
        start = np.broadcast_to(start, nvec.shape)
        # Store tuples, since arrays have no hash.
        object.__setattr__(self, "nvec", _tuples(nvec.tolist()))
        object.__setattr__(self, "start", _tuples(start.tolist()))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        # An empty element has no bounds.
        if nvec.size:
            checks.check_int_dtype(
                self.dtype, int(self.low.min()), int(self.high.max())
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an element, equal to the shape of `nvec`."""
        return np.shape(self.nvec)

    @property
    def low(self) -> np.ndarray:
        """Smallest value of each entry."""
        return np.asarray(self.start)

    @property
    def high(self) -> np.ndarray:
        """Largest value of each entry."""
        return np.asarray(self.start) + np.asarray(self.nvec) - 1


class MultiBinary(_Bounded, struct.PyTreeNode, eq=False):
    """Arrays of zeros and ones.

    Attributes:
        shape: shape of one element.
        dtype: dtype of an element: integer or bool.

    Raises:
        ValueError: if `shape` is not a tuple of ints of at least 0, or if `dtype` is
            neither integer nor bool.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(
        pytree_node=False, default=jnp.dtype(jnp.int8)
    )
    low, high = 0, 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check_shape(self.shape))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype != bool:
            checks.check_int_dtype(self.dtype, self.low, self.high)


class Repeated(Space, struct.PyTreeNode, eq=False):
    """Stacks of `num` elements of one space, with a new leading axis in every leaf.

    Attributes:
        space: space of each element.
        num: number of elements, an int of at least 1.

    Raises:
        ValueError: if `num` is not an int of at least 1.
    """

    space: AnySpace
    num: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num", checks.check_int("num", self.num))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the stack; None if an element has several parts."""
        return None if self.space.shape is None else (self.num, *self.space.shape)

    @property
    def dtype(self) -> jax.typing.DTypeLike | None:
        """Dtype of an element; None if an element has several parts."""
        return self.space.dtype

    @property
    def bounds(self) -> tuple[Any, Any] | None:
        """Bounds of each element, without the leading axis."""
        return self.space.bounds

    def leaves(self) -> list[AnySpace]:
        """Returns the repeated spaces of an element's leaves."""
        return [Repeated(leaf, self.num) for leaf in self.space.leaves()]

    def sample(self, key: chex.PRNGKey) -> ArrayTree:
        """Samples each element with a separate key."""
        # Fold in the index, so that a smaller `num` gives the same first elements.
        number = jnp.arange(self.num, dtype=jnp.int32)
        return jax.vmap(self.space.sample)(prng.fold_in(key, number))

    def contains(self, x: ArrayTree) -> jax.Array:
        """Returns whether every row is an element of `space`, `()` bool."""
        return jnp.all(jax.vmap(self.space.contains)(x))


class Composite(Space, struct.PyTreeNode, eq=False):
    """Pytrees of elements of several spaces.

    Attributes:
        spaces: pytree of spaces, with the structure of an element.
    """

    spaces: ArrayTree

    @property
    def parts(self) -> list[AnySpace]:
        """Spaces of the parts, in the order of `jax.tree.leaves`."""
        return jax.tree.leaves(self.spaces, is_leaf=_is_space)

    @property
    def structure(self) -> Any:
        """Tree structure of an element, with every part as a leaf."""
        return jax.tree.structure(self.spaces, is_leaf=_is_space)

    def leaves(self) -> list[AnySpace]:
        """Returns the spaces of an element's leaves, in order of `jax.tree.leaves`."""
        return [leaf for part in self.parts for leaf in part.leaves()]

    def sample(self, key: chex.PRNGKey) -> Any:
        """Samples every part with a separate key."""
        samples = [
            part.sample(prng.fold_in(key, number))
            for number, part in enumerate(self.parts)
        ]
        return self.structure.unflatten(samples)

    def contains(self, x: Any) -> jax.Array:
        """Returns whether every part is an element of its space, `()` bool."""
        pairs = zip(self.parts, self.structure.flatten_up_to(x), strict=True)
        return jnp.all(jnp.stack([part.contains(value) for part, value in pairs]))


class Dict(Composite, eq=False):
    """Dicts of elements of several spaces.

    Attributes:
        spaces: spaces by name.

    Raises:
        ValueError: if `spaces` has a part that `as_space` does not accept, if it is
            empty, or if names have different types, which jax cannot sort.
    """

    spaces: Mapping[str, AnySpace]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spaces", _parts(self.spaces, self.spaces.items()))
        if len({type(name) for name in self.spaces}) > 1:
            raise ValueError(
                f"`spaces` must have names of one type, got {list(self.spaces)}."
            )


class Tuple(Composite, eq=False):
    """Tuples of elements of several spaces.

    Attributes:
        spaces: spaces in order.

    Raises:
        ValueError: if `spaces` has a part that `as_space` does not accept, or if it is
            empty.
    """

    spaces: tuple[AnySpace, ...]

    def __post_init__(self) -> None:
        parts = _parts(self.spaces, enumerate(self.spaces))
        object.__setattr__(self, "spaces", tuple(parts.values()))


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """The spaces of an environment.

    Use it to build a network, or to predict with an agent, without the environment.

    Attributes:
        observation_space: observation space of a single environment.
        action_space: action space of a single environment.
        num_envs: number of parallel environments.
    """

    observation_space: AnySpace
    action_space: AnySpace
    num_envs: int = 1


def env_spec(env: Any) -> EnvSpec:
    """Returns the spaces and `num_envs` of a `VectorEnv` or a `HostVectorEnv`.

    Observation bounds that depend on traced parameters become infinite.

    Raises:
        ValueError: if `env` is a single environment or not an environment, or if a
            space has no entries.
    """
    names = "observation_space", "action_space", "num_envs"
    if missing := [name for name in names if not hasattr(env, name)]:
        raise ValueError(
            "`env` must be parallel environments, for example a result of "
            "`rollout.envs.make_vec(env_id, num_envs)`, got "
            f"{checks.describe(env)} without `{missing[0]}`."
        )
    return make_spec(lambda: (env.observation_space, env.action_space), env.num_envs)


def make_spec(read_fn: Callable[[], tuple[Any, Any]], num_envs: int) -> EnvSpec:
    """Makes an `EnvSpec`; see `env_spec`.

    Args:
        read_fn: function that reads the observation space and the action space.
        num_envs: number of environments.
    """
    names = "observation_space", "action_space"

    def read() -> tuple[AnySpace, AnySpace]:
        observation_space, action_space = read_fn()
        observation_space = as_space(observation_space, "env.observation_space")
        return observation_space, as_space(action_space, "env.action_space")

    spaces = read()
    if not checks.is_concrete(spaces):  # constants become tracers inside `jit`
        with jax.ensure_compile_time_eval():
            spaces = read()
    for name, space in zip(names, spaces, strict=False):
        # Networks cannot have zero inputs or outputs. The shape of a custom space may
        # be unknown.
        shapes = [leaf.shape for leaf in space.leaves()]
        if all(shape is not None and 0 in shape for shape in shapes):
            raise ValueError(
                f"`env.{name}` must have at least one entry for an agent, got shape "
                f"{', '.join(map(str, shapes))}. Add a constant observation with "
                "`rollout.envs.TransformObs`, or an action that has no effect."
            )
    observation_space, action_space = spaces
    if not checks.is_concrete(observation_space):
        observation_space = jax.tree.map(
            lambda x: x if checks.is_concrete(x) else np.inf, observation_space
        )
    return EnvSpec(observation_space, action_space, num_envs)


def as_space(space: Any, name: str = "space") -> AnySpace:
    """Converts a space of Gymnasium, gymnax or JaxMARL to a `Space`.

    The function identifies spaces of other libraries by class name and does not import
    these libraries. jax has no 64-bit numbers by default, so 64-bit dtypes become
    32-bit dtypes.

    Args:
        space: a `Space`, which is returned unchanged; a `Box`, `Discrete`,
            `MultiDiscrete`, `MultiBinary`, `Dict` or `Tuple` of another library; or a
            dict or tuple of such spaces.
        name: name of the space in error messages.

    Returns:
        A `Space` with the same elements, with dtypes of at most 32 bits.

    Raises:
        ValueError: if the space is not supported, for example `Text`, `Graph`,
            `Sequence` or `OneOf` of Gymnasium, if it has no parts, or if it is a box of
            64-bit integers none of which fits into 32 bits.
    """
    if isinstance(space, Space):
        return space
    # Compare class names: importing Gymnasium and gymnax would take seconds.
    names = [base.__name__ for base in type(space).__mro__]
    class_name = next((x for x in names if x in _CLASS_NAMES), "")
    parts = space.spaces if class_name in ("Dict", "Tuple") else space
    is_list = type(parts) in (tuple, list)
    if (is_list or isinstance(parts, Mapping)) and not parts:
        raise ValueError(f"`{name}` must have at least one part, got {space!r}.")
    if isinstance(parts, Mapping):
        return Dict({key: as_space(part, name) for key, part in parts.items()})
    if is_list:
        return Tuple(tuple(as_space(part, name) for part in parts))
    if class_name:
        return _convert(class_name, space)
    raise ValueError(
        f"`{name}` must be a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple "
        "of `envs`, Gymnasium or gymnax, a dict or tuple of these, or a subclass of "
        f"`rollout.envs.spaces.Space`, got {space!r}."
    )


def space_of(tree: ArrayTree) -> AnySpace:
    """Returns the space of all pytrees with the structure, shapes and dtypes of `tree`.

    Leaves of type `Space` are returned unchanged.
    """

    def box(x: Any) -> AnySpace:
        if isinstance(x, Space):
            return x
        if jnp.issubdtype(x.dtype, jnp.bool_):
            low, high = 0, 1
        elif jnp.issubdtype(x.dtype, jnp.integer):
            low, high = _limits(x.dtype)
        else:
            low, high = -np.inf, np.inf
        return Box(low, high, x.shape, x.dtype)

    def combine(boxes: Any) -> AnySpace:
        if isinstance(boxes, Space):
            return boxes
        if boxes and type(boxes) is dict:
            return Dict({name: combine(part) for name, part in boxes.items()})
        if boxes and type(boxes) is tuple:
            return Tuple(tuple(map(combine, boxes)))
        return Composite(boxes)

    return combine(jax.tree.map(box, tree, is_leaf=_is_space))


def to_json(space: AnySpace) -> Any:
    """Converts a space to a representation for `json.dump`.

    Args:
        space: a space of this module, which may be nested.

    Returns:
        Dicts and lists that `from_json` reads. A custom space becomes None, since its
        code is not saved.
    """
    match space:
        case Discrete():
            return {"Discrete": [space.n, str(space.dtype), space.start]}
        case MultiDiscrete():
            return {"MultiDiscrete": [space.nvec, str(space.dtype), space.start]}
        case MultiBinary():
            return {"MultiBinary": [space.shape, str(space.dtype)]}
        case Box():
            low, high = (np.asarray(x, float).tolist() for x in space.bounds)
            return {"Box": [low, high, space.shape, str(space.dtype)]}
        case Repeated():
            return {"Repeated": [to_json(space.space), space.num]}
        case Dict():
            # Store pairs: JSON would convert names that are numbers to strings.
            parts = space.spaces.items()
            return {"Dict": [[name, to_json(part)] for name, part in parts]}
        case Tuple():
            return {"Tuple": [to_json(part) for part in space.spaces]}
    return None


def from_json(data: Any) -> AnySpace:
    """Inverts `to_json`.

    Raises:
        ValueError: if the saved space was a custom space.
    """
    if data is None:
        raise ValueError("`data` must describe a space of `rollout.envs.spaces`.")
    ((class_name, args),) = data.items()
    match class_name:
        case "Box":
            low, high, shape, dtype = args
            bounds = np.float64(low), np.float64(high)
            return Box(*bounds, tuple(shape), np.dtype(dtype))
        case "Dict":
            return Dict({name: from_json(part) for name, part in args})
        case "Tuple":
            return Tuple(tuple(map(from_json, args)))
        case "Repeated":
            return Repeated(from_json(args[0]), args[1])
        case "Discrete":
            return Discrete(*args)
        case "MultiDiscrete":
            return MultiDiscrete(*args)
    return MultiBinary(*args)


def is_mask(path: Any) -> bool:
    """Returns whether `path` leads to a dict entry or field with the name `MASK`."""
    return jax.tree_util.keystr(path[-1:], simple=True) == MASK


def get_action_mask(obs: ArrayTree) -> jax.Array | None:
    """Returns the entry `action_mask` of an observation; None if there is no mask."""
    leaves = jax.tree.leaves_with_path(obs)
    return next((x for path, x in leaves if is_mask(path)), None)


def narrow(dtype: Any) -> np.dtype:
    """Converts a 64-bit dtype to 32 bits, as jax does by default."""
    return jnp.dtype(_NARROW.get(str(jnp.dtype(dtype)), dtype))


def one_of(space: AnySpace | None) -> AnySpace | None:
    """Returns the element space of a `Repeated`, and any other space unchanged."""
    while isinstance(space, Repeated):
        space = space.space
    return space


def lost_in_cast(value: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns a bool array, True for numbers not representable in `dtype`.

    A float is representable unless it overflows: a loss of digits is ignored.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        cast = value.astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.isinf(cast) & ~np.isinf(value)
    return cast != value


def _value_of(space: Any) -> Any:
    """Returns hashable data: spaces of one class are equal if their data is equal."""
    if isinstance(space, Box):
        if not checks.is_concrete(space.bounds):  # traced bounds are equal by identity
            return space.shape, space.dtype, *map(id, space.bounds)
        # Adding 0.0 turns -0.0 into 0.0: both are equal but differ in their bytes.
        bounds = [np.broadcast_to(x, space.shape) + 0.0 for x in space.bounds]
        bounds = [x.astype(np.float64) for x in bounds]
        return space.shape, space.dtype, *(x.tobytes() for x in bounds)
    if isinstance(space, Composite):
        return space.structure, tuple(space.parts)
    if isinstance(space, Repeated):
        return space.space, space.num
    is_pytree = not jax.tree_util.all_leaves([space])
    return jax.tree.structure(space) if is_pytree else id(space)


def _is_space(x: object) -> bool:
    return isinstance(x, Space)


def _parts(spaces: Any, items: Iterable[tuple[Any, Any]]) -> dict[Any, AnySpace]:
    """Converts the parts of a space to a dict by name or index."""
    if not spaces:
        raise ValueError(f"`spaces` must have at least one part, got {spaces!r}.")
    return {name: as_space(part, f"spaces[{name!r}]") for name, part in items}


def _check_shape(shape: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple of ints; raises unless the sizes are ints."""
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        fix = f" Write `({shape},)`." if isinstance(shape, int | np.integer) else ""
        raise ValueError(
            f"`shape` must be a tuple of ints of at least 0, got {shape!r}.{fix}"
        )
    return sizes


def _tuples(x: int | list) -> int | tuple:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _convert(class_name: str, space: Any) -> AnySpace:
    """Converts a space of another library by its class name."""
    dtype, start = narrow(space.dtype), getattr(space, "start", 0)
    if class_name == "Discrete":
        return Discrete(int(space.n), dtype, int(start))
    if class_name == "MultiBinary":
        return MultiBinary(tuple(space.shape), dtype)
    if class_name == "MultiDiscrete":
        # Gymnasium has the attribute `nvec`, and JaxMARL `num_categories`.
        sizes = space.nvec if hasattr(space, "nvec") else space.num_categories
        return MultiDiscrete(np.asarray(sizes), dtype, np.asarray(start))
    low, high = space.low, space.high
    # The shape of the box in JaxMARL's Hanabi is a number.
    shape = tuple(int(size) for size in np.atleast_1d(space.shape))
    if dtype != space.dtype:
        if dtype.kind in "iu":
            lowest, highest = _limits(dtype)
            if np.any(np.asarray(low) > highest) or np.any(np.asarray(high) < lowest):
                raise ValueError(
                    f"A Box of {space.dtype} must have elements that fit into {dtype}, "
                    f"because jax has no 64-bit integers by default, got {space!r}. "
                    "Subtract `low` in a wrapper of the environment."
                )
            low, high = (np.clip(x, lowest, highest) for x in (low, high))
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            low, high = (np.asarray(x).astype(dtype) for x in (low, high))
    return Box(low, high, shape, dtype)


def _limits(dtype: np.dtype) -> tuple[int, int]:
    return np.iinfo(dtype).min, np.iinfo(dtype).max


_CLASS_NAMES = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Tuple")
_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32"}


def _format_bound(bound: Any) -> str:
    """Formats a number, a small array, or the range of a large array."""
    if not checks.is_concrete(bound):
        return checks.describe(bound)
    try:
        values = np.asarray(bound)
    except RuntimeError:  # the array was deleted, or is on devices of other processes
        return checks.describe(bound)
    if values.size and values.min() == values.max():
        return str(values.flat[0])
    if values.size <= _NUM_PRINTED:
        return str(values.tolist())
    return f"{values.dtype}{list(values.shape)} in [{values.min()}, {values.max()}]"
