"""Encoders of observations, variables of networks, and checks of a user's network.

`Encoder` turns an observation of any space into feature vectors for dense layers.
Images go through a convolutional network. The parts of a dictionary are encoded one by
one.

    class QNetwork(nn.Module):
        @nn.compact
        def __call__(self, obs):
            features = join(Encoder(env.observation_space)(obs))  # [..., n]
            return nn.Dense(num_actions)(nn.relu(nn.Dense(128)(features)))

`split_params` separates the parameters to train from the other variables of a network.
`check_network` checks the outputs of a user's network.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError, ModifyScopeVariableError

from rollout.base import checks
from rollout.base.convolution import conv_general_dilated as conv_general_dilated
from rollout.envs.spaces import MASK, Box, Dict, as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers import flatten_obs
from rollout.envs.wrappers.observations import match_parts

PRIVILEGED = "privileged_state"  # MuJoCo Playground's name for simulator-only values
_MIN_SIZE = 36  # pixels, the smallest image that the Nature network accepts

_CONSTANTS = (
    "The recipes call `network.apply(variables, obs)` and train only the collection "
    "`params`. Use `LayerNorm`, or `BatchNorm(use_running_average=True)`, whose "
    "statistics are constants, and `Dropout(deterministic=True)`."
)


class NatureCNN(nn.Module):
    """The convolutional network of DQN, for images of at least 36 x 36 pixels.

    Attributes:
        kernel_init: initializer of all layers.

    Source:
        "Human-level control through deep reinforcement learning" (Mnih et al., 2015).
    """

    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Maps `[B, H, W, C]` float images to `[B, 512]` features."""
        x = image
        for num_channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(_conv(num_channels, size, stride, self.kernel_init)(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(512, kernel_init=self.kernel_init)(x))


class MinAtarCNN(nn.Module):
    """A small convolutional network, for images of at least 3 x 3 cells.

    Attributes:
        kernel_init: initializer of all layers.

    Source:
        "MinAtar: An Atari-Inspired Testbed" (Young and Tian, arXiv:1903.03176).
    """

    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Maps `[B, H, W, C]` float images to `[B, 128]` features."""
        x = nn.relu(_conv(16, 3, 1, self.kernel_init)(image))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(128, kernel_init=self.kernel_init)(x))


def _conv(num_channels: int, size: int, stride: int, kernel_init: Any) -> nn.Conv:
    return nn.Conv(
        num_channels,
        (size, size),
        stride,
        padding="VALID",
        kernel_init=kernel_init,
        conv_general_dilated=conv_general_dilated,  # faster inside a scan on a CPU
    )


class Encoder(nn.Module):
    """Encodes the parts of an observation as feature vectors.

    - Images with at least 36 x 36 pixels go through a `NatureCNN`. An image is a `Box`
      with three axes, or a `Box` of uint8 with two or four axes (grayscale, stacked
      frames). Its two largest axes are height and width; the remaining axes, first or
      last, are channels.
    - `Discrete` and `MultiDiscrete` are one-hot encoded; all other parts are flattened.
    - uint8 with bounds 0 and 255 is divided by 255.
    - An entry `action_mask` is omitted.

    Attributes:
        observation_space: space of a single observation.
        keys: entries of a `Dict` observation to encode; None for all entries. Entries
            that the observation lacks are skipped.
        cnn: True also encodes images of less than 36 x 36 pixels by a `MinAtarCNN`;
            False flattens all images; None decides by size.
        kernel_init: initializer of the convolutional networks.
    """

    observation_space: AnySpace
    keys: tuple[str, ...] | None = None
    cnn: bool | None = None
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, obs: ArrayTree) -> dict[str, jax.Array]:
        """Encodes an observation or a batch of observations.

        Args:
            obs: `[..., *shape]`.

        Returns:
            `[..., n]` float32 features by key of a `Dict` observation; one entry "obs"
            for any other space.

        Raises:
            ValueError: if the parts of `obs` do not match the space.
        """
        obs, space = select_parts(self.observation_space, obs, self.keys)
        features: dict[str, list[jax.Array]] = {}
        for path, x, part in match_parts(space, obs):
            key = path[0].key if isinstance(space, Dict) else "obs"
            names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
            name = "_".join(["cnn", *names])
            features.setdefault(key, []).append(self.encode(part, x, name))
        return {key: jnp.concatenate(x, axis=-1) for key, x in features.items()}

    def encode(self, space: AnySpace, x: jax.Array, name: str) -> jax.Array:
        """Encodes one array `[..., *shape]` of the observation as `[..., n]`."""
        axes = image_axes(space, self.cnn)
        x = jnp.asarray(x)
        if is_bytes(space):
            x = x.astype(jnp.float32) / 255
        if axes is None:
            return flatten_obs(space, x)
        batch = x.shape[: x.ndim - len(space.shape)]
        image = channels_last(x.reshape(-1, *space.shape), axes).astype(jnp.float32)
        is_large = min(image.shape[1:3]) >= _MIN_SIZE
        network = NatureCNN if is_large else MinAtarCNN
        return network(self.kernel_init, name=name)(image).reshape(*batch, -1)


def join(features: dict[str, jax.Array], keys: tuple[str, ...] | None = None) -> Any:
    """Concatenates the features of an `Encoder`, `[..., n]`.

    Args:
        features: `[..., n]` by key.
        keys: entries to concatenate, in the order of `features`; None for all entries.

    Raises:
        ValueError: if an entry is missing.
    """
    if missing := [key for key in keys or () if key not in features]:
        raise ValueError(
            f"`obs` must have the parts {', '.join(map(str, keys or ()))}, got "
            f"{', '.join(map(str, features)) or 'none'} without {missing[0]}."
        )
    parts = [x for key, x in features.items() if keys is None or key in keys]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def split_params(variables: ArrayTree) -> tuple[Any, dict[str, Any]]:
    """Separates the parameters that an optimizer updates from constants.

    The recipes train only the collection `params` of a flax network. Its other
    collections, such as `batch_stats`, are constants.

    Args:
        variables: variables of a flax network, `{"params": ..., "batch_stats": ...}`,
            or a dict of variables of several networks and of single arrays to train.

    Returns:
        The variables with only the collections `params`, and a dict with the other
        collections. `join_params` joins them.
    """
    if not isinstance(variables, Mapping):
        return variables, {}
    if "params" in variables:
        constants = {name: x for name, x in variables.items() if name != "params"}
        return {"params": variables["params"]}, constants
    pairs = {name: split_params(x) for name, x in variables.items()}
    params = {name: x for name, (x, _) in pairs.items()}
    return params, {name: x for name, (_, x) in pairs.items() if x}


def join_params(params: ArrayTree, constants: Mapping[str, Any]) -> Any:
    """Joins the results of `split_params`."""
    parts = {
        name: join_params(params[name], x) if name in params else x
        for name, x in constants.items()
    }
    return {**params, **parts} if parts else params


def with_constants(
    loss_fn: Callable[..., Any], constants: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns a loss of the results of `split_params`, as a function of only `params`.

    Args:
        loss_fn: function `(variables, *args)`.
        constants: variables without derivatives.
    """
    return lambda params, *args: loss_fn(join_params(params, constants), *args)


def obs_keys(
    name: str,
    keys: tuple[str, ...] | None,
    observation_space: AnySpace,
    *,
    without: str | None = None,
) -> tuple[str, ...] | None:
    """Resolves `Config.actor_obs` or `Config.critic_obs`.

    Args:
        name: name of the option, for messages.
        keys: value of the option; None for all entries.
        observation_space: space of a single observation.
        without: entry to omit if `keys` is None.

    Returns:
        Entries of a `Dict` observation, without action masks; None for other spaces.

    Raises:
        ValueError: if `keys` are not entries of a `Dict`, or if no entry remains.
    """
    space = as_space(observation_space)
    parts = space.spaces if isinstance(space, Dict) else {}
    names = [x for x in parts if x not in mask_keys(space)]
    if keys is None:
        selected = tuple(x for x in names if x != without)
    else:
        selected = tuple(keys) if not isinstance(keys, str) else (keys,)
    is_dict = isinstance(space, Dict)
    if (is_dict and not selected) or not set(selected) <= set(names):
        raise ValueError(
            f"`config.{name}` must name parts of the observation "
            f"({', '.join(map(str, names)) or 'which has no parts'}), got {keys!r}."
        )
    return selected if is_dict else None


def mask_keys(space: AnySpace) -> tuple[str, ...]:
    """Returns the entries of a `Dict` observation that contain only an action mask."""
    parts = space.spaces if isinstance(space, Dict) else {}
    return tuple(
        name
        for name, part in parts.items()
        if name == MASK or (isinstance(part, Dict) and set(part.spaces) == {MASK})
    )


def select_parts(
    space: AnySpace, obs: ArrayTree, keys: tuple[str, ...] | None
) -> tuple[ArrayTree, AnySpace]:
    """Selects entries of a `Dict` observation, and their space.

    Args:
        space: space of a single observation.
        obs: `[..., *shape]`; entries may be missing.
        keys: entries to select; None for all entries.
    """
    space = as_space(space)
    if not isinstance(space, Dict) or not isinstance(obs, Mapping):
        return obs, space
    names = [x for x in space.spaces if x in obs and (keys is None or x in keys)]
    if not names:  # a space has at least one part
        return {}, space
    return {x: obs[x] for x in names}, Dict({x: space.spaces[x] for x in names})


def is_bytes(space: AnySpace) -> bool:
    """Returns whether a space contains uint8 from 0 to 255, such as pixels."""
    if not isinstance(space, Box) or np.dtype(space.dtype) != np.uint8:
        return False
    low, high = space.bounds
    return bool(np.all(np.asarray(low) == 0) and np.all(np.asarray(high) == 255))


def image_axes(space: AnySpace, cnn: bool | None = None) -> tuple[int, int] | None:
    """Returns the axes of height and width if `Encoder` uses a convolutional network.

    Args:
        space: space of one array.
        cnn: option of `Encoder`.
    """
    if cnn is False or not isinstance(space, Box):
        return None
    is_uint8 = np.dtype(space.dtype) == np.uint8
    if len(space.shape) != 3 and not (is_uint8 and len(space.shape) in (2, 4)):
        return None
    height, width = sorted(np.argsort(space.shape, kind="stable")[-2:].tolist())
    min_size = 3 if cnn else _MIN_SIZE
    is_image = min(space.shape[height], space.shape[width]) >= min_size
    return (height, width) if is_image else None


def channels_last(image: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Moves height and width before the channels and merges all channel axes.

    Args:
        image: `[B, *shape]`.
        axes: axes of height and width within `shape`.

    Returns:
        `[B, H, W, C]`.
    """
    height, width = (axis + 1 for axis in axes)
    channels = [i for i in range(1, image.ndim) if i not in (height, width)]
    image = image.transpose(0, height, width, *channels)
    return image.reshape(*image.shape[:3], math.prod(image.shape[3:]))


def check_module(name: str, network: Any) -> None:
    """Checks that a network is a flax module.

    Raises:
        ValueError: if `network` does not have the methods `init` and `apply`, or if a
            field is not hashable, for example an array.
    """
    class_name = type(network).__name__
    if not hasattr(network, "init") or not hasattr(network, "apply"):
        raise ValueError(
            f"`{name}` must be a module of `flax.linen`, got a {class_name}. Convert a "
            "module of `flax.nnx` by `flax.nnx.bridge.to_linen(Class, ...)`."
        )
    try:
        hash(network)
    except TypeError as error:
        raise ValueError(
            f"`{name}` must be hashable, got a {class_name} with a field that is not, "
            "for example an array. Convert arrays to tuples, or store them by "
            '`self.variable("constants", name, lambda: array)` in the module: the '
            "recipes do not train the collection `constants`."
        ) from error


def check_nnx(network: Any, variables: Mapping[str, Any], *args: ArrayTree) -> None:
    """Checks that a module of `flax.nnx.bridge` does not change its state.

    The bridge discards changes without an error, unlike a module of `flax.linen`.

    Raises:
        ValueError: if a call changes a variable, as batch normalization in training.
    """
    names = [name for name in variables if name != "params"]

    def find_changes(variables: Mapping[str, Any]) -> list[str]:
        new_variables = network.apply(variables, *args, mutable=names)[1]
        pairs = {x: (variables[x], new_variables[x]) for x in names}
        # An unchanged variable is the same tracer.
        is_same = lambda old, new: old is new  # noqa: E731
        return [x for x in names if not jax.tree.all(jax.tree.map(is_same, *pairs[x]))]

    changes: list[str] = []
    jax.eval_shape(lambda x: changes.extend(find_changes(x)), variables)
    if changes:
        raise ValueError(f"A network must not change {changes[0]!r}. {_CONSTANTS}")


def check_network(
    name: str,
    apply_fn: Callable[..., Any],
    args: tuple[ArrayTree, ...],
    *shapes: tuple[int, ...],
    batch_shape: tuple[int, ...],
) -> None:
    """Checks the outputs of a network for a batch and for a single observation.

        apply_fn = functools.partial(network.apply, params)
        check_network("network", apply_fn, (obs,), (num_actions,), (), batch_shape=(B,))

    Collection calls a network with a batch. The loss is the loss of one row, so it
    calls the network with a single observation. `jax.eval_shape` computes the shapes
    without running the network.

    Args:
        name: argument of the agent that has the network, for the message.
        apply_fn: function of `args` that returns an array or a tuple of arrays.
        args: `[*batch_shape, ...]`, such as observations.
        *shapes: shape of each output for a single observation.
        batch_shape: leading axes of `args`.

    Raises:
        ValueError: if the number of arrays or a shape is wrong, if the network needs a
            key or changes variables, as `nn.Dropout` and `nn.BatchNorm` do in training,
            or if it raises for a single observation.
    """
    try:
        output = jax.eval_shape(apply_fn, *args)
    except (ModifyScopeVariableError, InvalidRngError) as error:
        raise ValueError(
            f"`{name}` must not change variables or need a key. {_CONSTANTS} flax "
            f"raised: {error}"
        ) from error
    _check_output(name, output, [(*batch_shape, *shape) for shape in shapes])
    row = jax.eval_shape(
        lambda args: jax.tree.map(lambda x: x[(0,) * len(batch_shape)], args), args
    )
    hint = (
        "The loss is the loss of one row, so a network must accept a single "
        "observation without a batch axis. To flatten an image after convolutions, "
        "write `x.reshape(*x.shape[:-3], -1)`."
    )
    try:
        output = jax.eval_shape(apply_fn, *row)
    except Exception as error:
        message = f"`{name}` raises for a single observation: {error}\n{hint}"
        raise ValueError(message) from error
    _check_output(name, output, [*shapes], f"for a single observation. {hint}")


def _check_output(
    name: str,
    output: Any,
    shapes: list[tuple[int, ...]],
    hint: str = "for a batch. Change the last layers of the network. To remove a last "
    "axis of size 1, write `x[..., 0]`.",
) -> None:
    """Raises unless `output` has the given shapes."""
    is_tuple = len(shapes) > 1 and isinstance(output, tuple | list)
    arrays = output if is_tuple else (output,)
    if [getattr(x, "shape", None) for x in arrays] != shapes:
        count = "one array" if len(shapes) == 1 else f"a tuple of {len(shapes)} arrays"
        expected, got = (
            " and ".join(texts)
            for texts in (map(str, shapes), map(checks.describe, arrays))
        )
        raise ValueError(
            f"`{name}` must return {count} of shape {expected}, got {got}, {hint}"
        )
