"""Policies that explore: epsilon-greedy actions, a random warm-up, and noise.

Each class wraps a policy and changes its actions. The wrapped policy is applied at
every step, with a key of its own. Its critic and its extras are unchanged: they
belong to the wrapped policy's action, so a `log_prob` is not that of the action sent.
Lane i samples the same noise for any number of lanes.

The mode of an exploring policy is the mode of the wrapped policy, without exploration.
With an `action_mask_fn` its action is still a valid one.

Numbers such as `epsilon` are leaves: they may be traced, mapped by `jax.vmap`, and
replaced without compiling again.

A schedule, as in optax, maps the number of steps that the lane has taken so far, `()`
int32 from 0, to a scalar. Each lane counts its own steps, also over episode boundaries,
in a `Persistent` part of the policy's state.

An `action_mask_fn` maps the batched `obs` to the valid actions, `[B, n]` bool. If the
environment has a mask in `info`, `rollout.envs.ObserveInfo(env, fn, initial)` adds it
to `obs`, and `action_mask_fn` reads `obs["info"]`. If no action is valid, the action is
sampled from all, since one must be sent, and `extras["no_valid_action"]` is True.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rollout import checks
from rollout.envs import prng, trees
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies import masks, outputs, uniform
from rollout.policies.masks import ActionMaskFn
from rollout.policies.policy_wrapper import PolicyWrapper
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

ScheduleFn = Callable[[jax.Array], Any]  # steps taken, `()` int32, to `()` float


class Schedule(struct.PyTreeNode):
    """A schedule as a pytree without leaves: a field that may also hold a number."""

    fn: ScheduleFn = struct.field(pytree_node=False)

    def __repr__(self) -> str:
        """Prints the name of the function."""
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)


class ExplorationState(struct.PyTreeNode, kw_only=True):
    """State of an exploring policy that has a schedule or noise of its own."""

    inner: ArrayTree  # [B, ...], of the wrapped policy
    step: Any = ()  # Persistent [B] int32, steps taken so far; () without a schedule
    noise: Any = ()  # [B, ...], noise that is correlated over time


class _Exploration(PolicyWrapper[ParamsT, ObsT, ActionT]):
    """Base of exploring policies; a subclass defines how actions change."""

    _has_noise: ClassVar[bool] = False  # whether noise is carried between steps

    action_space: AnySpace = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        space = as_space(self.action_space, "action_space")
        object.__setattr__(self, "action_space", space)

    def _amount(self) -> Any:
        """Returns how much to explore: a number or a `Schedule`."""
        raise NotImplementedError

    def _init_noise(self, num_envs: int) -> Any:
        """Returns the noise at the start of an episode, `[B, ...]`."""
        del num_envs  # unused
        return ()

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        """Changes a decision.

        Args:
            decision: output of the wrapped policy. Its state is an `ExplorationState`
                if this policy has a schedule or noise.
            obs: `[B, ...]`.
            amount: the number, or `[B]` float32 of the schedule; 0.0 in the mode.
            keys: two typed keys.
        """
        raise NotImplementedError

    @property
    def _has_state(self) -> bool:
        # Otherwise the state is the wrapped policy's own, and so is what a recurrent
        # policy records of it.
        return self._has_noise or isinstance(self._amount(), Schedule)

    def init(self, num_envs: int) -> PolicyState:
        """Returns the initial state; it holds the wrapped policy's."""
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
        """Applies the wrapped policy, and explores."""
        return self._act(False, params, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Returns the mode of the wrapped policy; a mask still holds."""
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
        # The wrapped policy has a key of its own: no sample of this policy is also one
        # of the wrapped policy.
        inner_key, *keys = prng.fold_in(key, jnp.arange(3, dtype=jnp.int32))
        apply = self.policy.mode if use_mode else self.policy.apply
        inner = state.inner if self._has_state else state
        decision = outputs.decision(
            "The wrapped `policy.apply`",
            apply(params, obs, inner, inner_key),
            self.action_space,
            uniform.num_lanes(obs),
            obs,
        )
        amount = self._amount()
        if isinstance(amount, Schedule):
            step = state.step.value
            amount = jax.vmap(amount.fn)(step).astype(jnp.float32)
            # The count stays at the largest integer, so that no schedule restarts.
            step = step + (step < jnp.iinfo(jnp.int32).max).astype(jnp.int32)
            state = state.replace(step=Persistent(step))
        elif amount is None or jnp.ndim(amount):
            raise ValueError(
                f"`{type(self).__name__}` must explore by one number, got "
                f"{checks.describe(amount)}. Use `jax.vmap` over the policy."
            )
        if self._has_state:
            decision = decision._replace(state=state.replace(inner=decision.state))
        # The mode explores by 0, but a mask still forbids actions in it.
        return self._explore(decision, obs, 0.0 if use_mode else amount, keys)


class EpsilonGreedy(_Exploration[ParamsT, ObsT, ActionT]):
    """Replaces each lane's action, with probability epsilon, by a uniformly random one.

    With an `action_mask_fn` the random action is a valid one, and an invalid action of
    the wrapped policy is replaced by a random valid one.

    The state is the wrapped policy's, with a step count if `epsilon` is a schedule. The
    extras are the wrapped policy's for its own action; with an `action_mask_fn` they
    also have `no_valid_action`, `[B]` bool.

    Attributes:
        policy: the policy to explore around.
        action_space: any space that `random_policy` takes.
        epsilon: `()`, probability per step, in [0, 1]: a number, or a schedule over the
            steps of the lane. A schedule's value above 1 counts as 1, one below 0 or
            NaN as 0.
        action_mask_fn: `obs` to the valid actions, as in `random_policy`.

    Raises:
        ValueError: if `epsilon` is a number outside [0, 1]; if a bound of the space is
            not finite; if an `action_mask_fn` is given and the space is not discrete.
            While tracing: if the mask is not `[B, n]` bool; if the action does not fit
            the space; with an `action_mask_fn`, if the extras are neither `()` nor a
            dict, or have another `no_valid_action`.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., section 2.2.
    """

    epsilon: float | jax.Array | ScheduleFn | Schedule
    action_mask_fn: ActionMaskFn | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_amount(self, "epsilon", highest=1.0)
        masks.check_drawable(self.action_space, self.action_mask_fn)

    def _amount(self) -> Any:
        return self.epsilon

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        # Strictly below: NaN never explores, and 1 always does: samples are below 1.
        sample = prng.uniform(keys[0], 0.0, 1.0, (uniform.num_lanes(obs),))
        flag = sample < amount
        return _replace(
            decision, obs, flag, keys[1], self.action_space, self.action_mask_fn
        )


class RandomWarmup(_Exploration[ParamsT, ObsT, ActionT]):
    """Takes random actions in the first steps of each lane, then the policy's.

    Random actions are uniform; the steps are counted over episode boundaries. `policy`
    is applied from the first step, so its state and its extras are ready when its
    actions are first taken. With an `action_mask_fn` every action is a valid one, and
    the extras are those of `EpsilonGreedy`.

    Attributes:
        policy: the policy that acts after the warm-up.
        action_space: any space that `random_policy` takes.
        num_steps: `()` int, random steps per lane, at least 0. Episodes may end
            within them.
        action_mask_fn: `obs` to the valid actions, as in `random_policy`.

    Raises:
        ValueError: if `num_steps` is not an int of at least 0, or as `EpsilonGreedy`
            does.

    Source:
        "Spinning Up in Deep RL" (OpenAI, 2018), `start_steps` of DDPG, TD3 and SAC.
    """

    num_steps: int | jax.Array
    action_mask_fn: ActionMaskFn | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        # jax also builds policies of tracers and placeholders.
        if isinstance(self.num_steps, int | float | str):
            checks.int_between("num_steps", self.num_steps, least=0)
        masks.check_drawable(self.action_space, self.action_mask_fn)

    def _amount(self) -> Any:
        return Schedule(lambda step: step < self.num_steps)

    def _explore(self, decision: PolicyStep, obs: Obs, amount: Any, keys: Any) -> Any:
        flag = jnp.broadcast_to(jnp.asarray(amount) > 0, uniform.num_lanes(obs))
        action_mask_fn, space = self.action_mask_fn, self.action_space
        if action_mask_fn is not None or prng.num_parts() > 1:
            return _replace(decision, obs, flag, keys[0], space, action_mask_fn)

        def sample(action: ArrayTree) -> ArrayTree:
            step = decision._replace(action=action)
            return _replace(step, obs, flag, keys[0], space, None).action

        def sample_if_any(action: ArrayTree) -> ArrayTree:
            return lax.cond(jnp.any(flag), sample, lambda x: x, action)

        # After the warm-up nothing is sampled. Not on a GPU, where a condition would
        # wait for the host, nor on several devices, where lanes would wait for each
        # other.
        action = lax.platform_dependent(
            decision.action, cuda=sample, rocm=sample, default=sample_if_any
        )
        return decision._replace(action=action)


class _Noise(_Exploration[ParamsT, ObsT, ActionT]):
    """Base of policies that add noise to actions of floats."""

    scale: float | jax.Array | ScheduleFn | Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        _set_amount(self, "scale")
        dtype = self.action_space.dtype
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                "`action_space` must be one of floats to add noise to, got "
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
        # The mode samples nothing.
        if not isinstance(amount, float) or amount != 0.0:
            amount = jnp.asarray(amount, action.dtype)  # [B], or ()
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

    The state is the wrapped policy's, with a step count if `scale` is a schedule. The
    extras are the wrapped policy's, for its action without the noise.

    Attributes:
        policy: the policy to explore around.
        action_space: a space of floats; without bounds nothing is clipped.
        scale: `()`, standard deviation in the unit of the action: a number of at least
            0, or a schedule over the steps of the lane.

    Raises:
        ValueError: if `scale` is a number below 0 or not finite; if the space is not
            one of floats. While tracing: if the action does not fit the space.

    Source:
        "Addressing Function Approximation Error in Actor-Critic Methods" (TD3),
        arXiv:1802.09477, algorithm 1.
    """

    def _noise(self, state: Any, normal: jax.Array) -> tuple[jax.Array, Any]:
        return normal, state


class OrnsteinUhlenbeck(_Noise[ParamsT, ObsT, ActionT]):
    """Adds noise that is correlated over time, and clips to the space's bounds.

        x_t = x_{t-1} - θ x_{t-1} dt + scale √dt N(0, 1),  a_t + x_t  in every entry

    The noise x starts at 0 with every episode. Its standard deviation tends to
    scale / √(2θ - θ² dt), within some 1 / (θ dt) steps. The state holds the wrapped
    policy's, the noise, and a step count if `scale` is a schedule. The extras are the
    wrapped policy's, for its action without the noise.

    Attributes:
        policy: the policy to explore around.
        action_space: a space of floats; without bounds nothing is clipped.
        scale: `()`, standard deviation that the noise gains per unit of time without
            reversion, in the unit of the action: a number of at least 0, or a
            schedule over the steps of the lane.
        theta: `()`, rate of the reversion to 0, per unit of time, at least 0.
        dt: `()`, time of one step, at least 0; theta * dt must be below 2.

    Raises:
        ValueError: if `scale`, `theta` or `dt` is a number outside its range; if the
            space is not one of floats. While tracing: if the action does not fit the
            space.

    Source:
        "On the Theory of the Brownian Motion" (Uhlenbeck & Ornstein, Physical Review
        36, 1930), by the Euler-Maruyama step; as exploration in "Continuous control
        with deep reinforcement learning" (DDPG), arXiv:1509.02971, section 3.
    """

    _has_noise = True

    theta: float | jax.Array = 0.15
    dt: float | jax.Array = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if checks.is_known(pair := (self.theta, self.dt)):
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
    """Replaces actions by random ones where `flag`, or where a mask forbids them."""
    if action_mask_fn is None:
        action = uniform.uniform(space, flag.shape[0], key)
    else:
        allowed = masks.read(action_mask_fn, obs, space)
        flag = flag | ~masks.is_allowed(allowed, decision.action, space)
        action, no_valid_action = masks.draw(allowed, space, key)
        extras: Any = decision.extras
        extras = {} if isinstance(extras, tuple) and not extras else extras
        what = (
            "With an `action_mask_fn` the wrapped policy's extras must be () or a dict"
        )
        checks.kind(what, extras, dict)
        # Another wrapper with a mask inside of this one has its own flag.
        inner = extras.get("no_valid_action", no_valid_action)
        what = (
            "The wrapped policy's `no_valid_action` must be that of an `action_mask_fn`"
        )
        checks.same(what, no_valid_action, inner)
        extras = {**extras, "no_valid_action": no_valid_action | inner}
        decision = decision._replace(extras=extras)
    return decision._replace(action=trees.select(flag, action, decision.action))


def _set_amount(policy: Any, name: str, highest: float = math.inf) -> None:
    """Checks a number in [0, highest]; wraps a function as a `Schedule`."""
    value = getattr(policy, name)
    if callable(value):
        object.__setattr__(policy, name, Schedule(value))
    elif not isinstance(value, Schedule):
        _check_range(name, value, highest, ", or a schedule")


def _check_range(name: str, value: Any, highest: float, more: str = "") -> None:
    """Checks numbers in [0, highest]; tracers and placeholders of jax pass."""
    bounded = f"in [0, {highest:g}]"
    range_text = "at least 0 and finite" if highest == math.inf else bounded
    if isinstance(value, str | list | tuple | dict):
        raise ValueError(f"`{name}` must be {range_text}{more}, got {value!r}.")
    if checks.is_known(value) and value is not None:
        numbers = np.asarray(value)
        if not np.all((numbers >= 0) & (numbers <= highest) & np.isfinite(numbers)):
            raise ValueError(f"`{name}` must be {range_text}{more}, got {value!r}.")
