"""Policies that explore: epsilon-greedy actions, a random warm-up, and noise.

Each class wraps a policy and changes its actions. The wrapped policy is applied at
every step, with a separate key. Its critic and its extras are unchanged and refer to
the action of the wrapped policy: a recorded `log_prob` is not the log-probability of
the action sent to the environment. The noise of lane i does not depend on the number of
lanes.

The mode of a wrapper is the mode of the wrapped policy, without exploration. An
`action_mask_fn` also applies to the mode: invalid actions are replaced.

Numbers such as `epsilon` are pytree leaves: they may be traced, mapped by `jax.vmap`,
and replaced without recompilation.

A schedule, as in optax, maps the number of steps that the lane has taken so far, `()`
int32 from 0, to a scalar. Steps are counted per lane and across episode boundaries, in
a `Persistent` part of the policy's state.

An `action_mask_fn` maps the batched `obs` to the valid actions, `[B, n]` bool. If the
environment returns a mask in `info`, `rollout.envs.ObserveInfo(env, fn, initial)` adds
it to `obs`, and `action_mask_fn` reads `obs["info"]`. If no action is valid, the action
is sampled from all actions, and `extras["no_valid_action"]` is True.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rollout.base import checks, prng, trees
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import base, masks
from rollout.policies.base import PolicyWrapper
from rollout.policies.masks import ActionMaskFn
from rollout.types import (
    ActionT,
    Key,
    Obs,
    ObsT,
    ParamsT,
    Persistent,
    PolicyState,
    PolicyStep,
)

ScheduleFn = Callable[[jax.Array], Any]  # maps steps, `()` int32, to a `()` float


@dataclasses.dataclass(frozen=True)
class LinearSchedule:
    """A linear schedule of exploration. Use it as `epsilon` of `EpsilonGreedy`.

        initial + (final - initial) min(step / num_steps, 1)

    Equivalent to `optax.linear_schedule`, but schedules with equal values are equal, so
    that equal policies share compiled programs.

    Attributes:
        initial: value at step 0.
        final: value from step `num_steps` onward.
        num_steps: number of steps per lane until the final value, at least 1.

    Raises:
        ValueError: if `num_steps` is not an int of at least 1.
    """

    initial: float
    final: float
    num_steps: int

    def __post_init__(self) -> None:
        checks.check_int("num_steps", self.num_steps)

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Returns the value at a step, `()` int to `()` float."""
        remaining = 1 - jnp.clip(step, 0, self.num_steps) / self.num_steps
        return (self.initial - self.final) * remaining + self.final


class Schedule(struct.PyTreeNode):
    """A schedule as a pytree without leaves, for fields that may also be numbers."""

    fn: ScheduleFn = struct.field(pytree_node=False)

    def __repr__(self) -> str:
        """Prints the name of the function."""
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)


class ExplorationState(struct.PyTreeNode, kw_only=True):
    """State of an exploring policy with a schedule or time-correlated noise."""

    inner: ArrayTree  # [B, ...], state of the wrapped policy
    step: Any = ()  # Persistent [B] int32, steps taken so far; () without a schedule
    noise: Any = ()  # [B, ...], time-correlated noise; () if there is none


class _Exploration(PolicyWrapper[ParamsT, ObsT, ActionT]):
    """Base class of exploration wrappers; a subclass defines how actions change."""

    _has_noise: ClassVar[bool] = False  # whether noise is carried between steps

    action_space: AnySpace = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        space = as_space(self.action_space, "action_space")
        object.__setattr__(self, "action_space", space)

    def _amount(self) -> Any:
        """Returns the amount of exploration: a number or a `Schedule`."""
        raise NotImplementedError

    def _init_noise(self, num_envs: int) -> Any:
        """Returns the noise at the start of an episode, `[B, ...]`."""
        del num_envs  # unused
        return ()

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        """Changes the action of the wrapped policy.

        Args:
            decision: output of the wrapped policy. Its state is an `ExplorationState`
                if this policy has a schedule or noise.
            obs: `[B, ...]`, observations.
            amount: amount of exploration: the number, or the values of the schedule,
                `[B]` float32; 0.0 in the mode.
            keys: two typed keys.
        """
        raise NotImplementedError

    @property
    def _has_state(self) -> bool:
        # Without a schedule or noise, use the wrapped policy's state directly, so that
        # states that a recurrent policy records keep their structure.
        return self._has_noise or isinstance(self._amount(), Schedule)

    def init(self, num_envs: int) -> PolicyState:
        """Returns the initial state, which contains the wrapped policy's state."""
        inner = self.policy.init(num_envs)
        if not self._has_state:
            return inner
        steps = Persistent(jnp.zeros((num_envs,), jnp.int32))
        return ExplorationState(
            inner=inner,
            step=steps if isinstance(self._amount(), Schedule) else (),
            noise=self._init_noise(num_envs),
        )

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the wrapped policy and explores."""
        return self._act(False, params, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Returns the mode of the wrapped policy, with invalid actions replaced."""
        return self._act(True, params, obs, state, key)

    def value(self, params: Any, obs: Any, state: Any) -> ArrayTree:
        """Evaluates the critic of the wrapped policy."""
        inner: Any = state.inner if self._has_state else state
        return self.policy.value(params, obs, inner)

    @property
    def has_mode(self) -> bool:
        """Whether the wrapped policy has a mode."""
        return self.policy.has_mode

    @property
    def has_value(self) -> bool:
        """Whether the wrapped policy has a critic."""
        return self.policy.has_value

    def _act(
        self, use_mode: bool, params: Any, obs: Any, state: Any, key: Key
    ) -> PolicyStep:
        # Use a separate key for the wrapped policy, so that its samples are independent
        # of the exploration.
        inner_key, *keys = prng.fold_in(key, jnp.arange(3, dtype=jnp.int32))
        apply = self.policy.mode if use_mode else self.policy.apply
        inner = state.inner if self._has_state else state
        decision = base.decision(
            "The wrapped `policy.apply`",
            apply(params, obs, inner, inner_key),
            self.action_space,
            masks.num_lanes(obs),
            obs,
        )
        amount = self._amount()
        if isinstance(amount, Schedule):
            step = state.step.value
            amount = jax.vmap(amount.fn)(step).astype(jnp.float32)
            # Saturate at the largest integer: an overflow would restart the schedule.
            step = step + (step < jnp.iinfo(jnp.int32).max).astype(jnp.int32)
            state = state.replace(step=Persistent(step))
        elif amount is None or jnp.ndim(amount):
            raise ValueError(
                f"`{type(self).__name__}` must have one number for all lanes, got "
                f"{checks.describe(amount)}. Use `jax.vmap` over the policy."
            )
        if self._has_state:
            decision = decision._replace(state=state.replace(inner=decision.state))
        # Do not explore in the mode, but replace its invalid actions.
        return self._explore(decision, obs, 0.0 if use_mode else amount, keys)


class EpsilonGreedy(_Exploration[ParamsT, ObsT, ActionT]):
    """Replaces each lane's action with probability epsilon by a uniformly random one.

    If `action_mask_fn` is given, the random action is sampled from the valid actions,
    and an invalid action of the wrapped policy is replaced by a random valid action.

    The state is the wrapped policy's state, with a step count if `epsilon` is a
    schedule. The extras are the wrapped policy's extras, which refer to the action of
    the wrapped policy. If `action_mask_fn` is given, they also contain
    `no_valid_action`, `[B]` bool.

    Attributes:
        policy: the wrapped policy.
        action_space: action space of a single environment, as in `random_policy`.
        epsilon: `()`, probability of a random action per step, in [0, 1]: a number, or
            a schedule over the steps of the lane. A schedule is clipped to [0, 1], and
            NaN is treated as 0.
        action_mask_fn: function of `obs` that returns the valid actions, as in
            `random_policy`.

    Raises:
        ValueError: if `epsilon` is a number outside [0, 1]; if a bound of the space is
            not finite; if `action_mask_fn` is given and the space has no discrete part.
            While tracing: if the mask is not `[B, n]` bool; if the action does not fit
            the space; if `action_mask_fn` is given and the extras are neither `()` nor
            a dict, or contain a `no_valid_action` other than `[B]` bool.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., section 2.2.
    """

    epsilon: float | jax.Array | ScheduleFn | Schedule
    action_mask_fn: ActionMaskFn | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_amount(self, "epsilon", highest=1.0)
        masks.check_can_sample(self.action_space, self.action_mask_fn)

    def _amount(self) -> Any:
        return self.epsilon

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        # Samples are below 1: epsilon 1 always explores, and NaN never explores.
        sample = prng.uniform(keys[0], 0.0, 1.0, (masks.num_lanes(obs),))
        flag = sample < amount
        return _replace(
            decision, obs, flag, keys[1], self.action_space, self.action_mask_fn
        )


class RandomWarmup(_Exploration[ParamsT, ObsT, ActionT]):
    """Takes random actions in the first steps of each lane, then the policy's actions.

    Random actions are uniform. Steps are counted across episode boundaries. The wrapped
    policy is applied from the first step, so its state and extras are valid when its
    first action is used. If `action_mask_fn` is given, every action is valid, and the
    extras also contain `no_valid_action`, as in `EpsilonGreedy`.

    Attributes:
        policy: the wrapped policy, which acts after the warm-up.
        action_space: action space of a single environment, as in `random_policy`.
        num_steps: `()` int, number of random steps per lane, at least 0. Episodes may
            end during the warm-up.
        action_mask_fn: function of `obs` that returns the valid actions, as in
            `random_policy`.

    Raises:
        ValueError: if `num_steps` is not an int of at least 0, or for the reasons
            listed in `EpsilonGreedy`.

    Source:
        "Spinning Up in Deep RL" (OpenAI, 2018), `start_steps` of DDPG, TD3 and SAC.
    """

    num_steps: int | jax.Array
    action_mask_fn: ActionMaskFn | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Check numbers only: JAX also builds policies from tracers and placeholders.
        if isinstance(self.num_steps, int | float | str):
            checks.check_int("num_steps", self.num_steps, least=0)
        masks.check_can_sample(self.action_space, self.action_mask_fn)

    def _amount(self) -> Any:
        return Schedule(lambda step: step < self.num_steps)

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        flag = jnp.broadcast_to(jnp.asarray(amount) > 0, masks.num_lanes(obs))
        action_mask_fn, space = self.action_mask_fn, self.action_space
        if action_mask_fn is not None or prng.num_parts() > 1:
            return _replace(decision, obs, flag, keys[0], space, action_mask_fn)

        def sample(action: ArrayTree) -> ArrayTree:
            step = decision._replace(action=action)
            return _replace(step, obs, flag, keys[0], space, None).action

        def sample_if_any(action: ArrayTree) -> ArrayTree:
            return lax.cond(jnp.any(flag), sample, lambda x: x, action)

        # Skip sampling after the warm-up. On a GPU always sample: the host would have
        # to read the condition. With several devices, devices would have to wait.
        action = lax.platform_dependent(
            decision.action, cuda=sample, rocm=sample, default=sample_if_any
        )
        return decision._replace(action=action)


class _Noise(_Exploration[ParamsT, ObsT, ActionT]):
    """Base class of policies that add noise to float actions."""

    scale: float | jax.Array | ScheduleFn | Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_amount(self, "scale")
        dtype = self.action_space.dtype
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                "`action_space` must have a float dtype to add noise, got "
                f"{type(self.action_space).__name__} with dtype {dtype}."
            )

    def _amount(self) -> Any:
        return self.scale

    def _noise(self, state: Any, normal: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the noise of a step, `[B, ...]`, and the next state."""
        raise NotImplementedError

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        del obs  # unused
        action, state, space = decision.action, decision.state, self.action_space
        # Skip sampling in the mode, where `amount` is the float 0.0.
        if not isinstance(amount, float) or amount != 0.0:
            amount = jnp.asarray(amount, action.dtype)  # [B] or ()
            column = amount.reshape(amount.shape + (1,) * (action.ndim - amount.ndim))
            key = prng.inline(keys[0])
            normal = column * jax.random.normal(key, action.shape, action.dtype)
            noise, state = self._noise(state, normal)
            action = action + noise
        if space.bounds is not None:
            low, high = (
                jnp.broadcast_to(jnp.asarray(bound, space.dtype), space.shape)[None]
                for bound in space.bounds
            )
            action = jnp.clip(action, low, high)
        return decision._replace(action=action, state=state)


class GaussianNoise(_Noise[ParamsT, ObsT, ActionT]):
    """Adds independent Gaussian noise to the action and clips to the space's bounds.

        a_t + ε_t,  ε_t ~ N(0, scale²)  in every entry

    The state is the wrapped policy's state, with a step count if `scale` is a schedule.
    The extras are the wrapped policy's extras, which refer to the action without noise.

    Attributes:
        policy: the wrapped policy.
        action_space: action space of a single environment, with a float dtype. Actions
            are not clipped if the space has no bounds.
        scale: `()`, standard deviation of the noise, in the unit of the action: a
            number of at least 0, or a schedule over the steps of the lane.

    Raises:
        ValueError: if `scale` is a number below 0 or not finite; if the space has no
            float dtype. While tracing: if the action does not fit the space.

    Source:
        "Addressing Function Approximation Error in Actor-Critic Methods" (TD3),
        arXiv:1802.09477, algorithm 1.
    """

    def _noise(self, state: Any, normal: jax.Array) -> tuple[jax.Array, Any]:
        return normal, state


class OrnsteinUhlenbeck(_Noise[ParamsT, ObsT, ActionT]):
    """Adds time-correlated noise to the action and clips to the space's bounds.

        x_t = x_{t-1} - θ x_{t-1} dt + scale √dt N(0, 1),  a_t + x_t  in every entry

    The noise x is reset to 0 at the start of every episode. Its standard deviation
    converges to scale / √(2θ - θ² dt) within about 1 / (θ dt) steps. The state contains
    the wrapped policy's state, the noise, and a step count if `scale` is a schedule.
    The extras are the wrapped policy's extras, which refer to the action without noise.

    Attributes:
        policy: the wrapped policy.
        action_space: action space of a single environment, with a float dtype. Actions
            are not clipped if the space has no bounds.
        scale: `()`, standard deviation of the noise after one unit of time without
            reversion, in the unit of the action: a number of at least 0, or a schedule
            over the steps of the lane.
        theta: `()`, rate of the reversion to 0, per unit of time, at least 0.
        dt: `()`, time per step, at least 0; theta * dt must be below 2.

    Raises:
        ValueError: if `scale`, `theta` or `dt` is a number outside its range; if the
            space has no float dtype. While tracing: if the action does not fit the
            space.

    Source:
        "On the Theory of the Brownian Motion" (Uhlenbeck & Ornstein, Physical Review
        36, 1930), with the Euler-Maruyama method. Used for exploration in "Continuous
        control with deep reinforcement learning" (DDPG), arXiv:1509.02971, section 3.
    """

    _has_noise = True

    theta: float | jax.Array = 0.15
    dt: float | jax.Array = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if checks.is_concrete(pair := (self.theta, self.dt)):
            theta, dt = map(np.asarray, pair)
            if not np.all((theta >= 0) & (dt >= 0) & (theta * dt < 2)):
                raise ValueError(
                    "`theta` and `dt` must be at least 0, and `theta` * `dt` below 2, "
                    "or the noise grows without bound, got "
                    f"{self.theta!r} and {self.dt!r}."
                )

    def _init_noise(self, num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, *self.action_space.shape), self.action_space.dtype)

    def _noise(self, state: Any, normal: jax.Array) -> tuple[jax.Array, Any]:
        x = state.noise
        x = x - self.theta * self.dt * x + jnp.sqrt(self.dt) * normal
        return x, state.replace(noise=x)


def _replace(
    decision: PolicyStep,
    obs: Obs,
    flag: jax.Array,
    key: Key,
    space: AnySpace,
    action_mask_fn: ActionMaskFn | None,
) -> PolicyStep:
    """Replaces an action by a random one if `flag` is True or the action is invalid."""
    if action_mask_fn is None:
        action = masks.sample_actions(space, flag.shape[0], key)
    else:
        action_mask = masks.read(action_mask_fn, obs, space)
        flag = flag | ~masks.is_valid(action_mask, decision.action, space)
        action, no_valid_action = masks.sample(action_mask, space, key)
        extras: Any = decision.extras
        extras = {} if isinstance(extras, tuple) and not extras else extras
        message = "The wrapped policy's extras must be () or a dict"
        checks.check_type(message, extras, dict)
        # A wrapped policy with a mask has already set the flag: combine both flags.
        inner_flag = extras.get("no_valid_action", no_valid_action)
        message = "The wrapped policy's `no_valid_action` must be one bool per lane"
        checks.check_same_types(message, no_valid_action, inner_flag)
        extras = {**extras, "no_valid_action": no_valid_action | inner_flag}
        decision = decision._replace(extras=extras)
    return decision._replace(action=trees.select(flag, action, decision.action))


def _set_amount(policy: Any, name: str, highest: float = math.inf) -> None:
    """Checks a number in [0, highest]; wraps a function as a `Schedule`."""
    value = vars(policy)[name]
    if callable(value):
        object.__setattr__(policy, name, Schedule(value))
    elif not isinstance(value, Schedule):
        _check_range(name, value, highest, ", or a schedule")


def _check_range(name: str, value: Any, highest: float, suffix: str = "") -> None:
    """Checks numbers in [0, highest]; ignores tracers and placeholders of JAX."""
    bounded = f"in [0, {highest:g}]"
    range_text = "at least 0 and finite" if highest == math.inf else bounded
    is_wrong = isinstance(value, str | list | tuple | dict)
    if not is_wrong and value is not None and checks.is_concrete(value):
        numbers = np.asarray(value)
        is_valid = (numbers >= 0) & (numbers <= highest) & np.isfinite(numbers)
        is_wrong = not np.all(is_valid)
    if is_wrong:
        raise ValueError(f"`{name}` must be {range_text}{suffix}, got {value!r}.")
