"""A small control task with the observation spaces of a Playground robot (Go1)."""

import jax
import jax.numpy as jnp
from flax import struct

from rollout import envs

NUM_JOINTS = 12
NOISE = 0.1  # standard deviation of the actor's measurements


@struct.dataclass
class PrivilegedEnv:
    """Twelve joints follow targets while constant hidden forces push the joints.

    `obs["state"]`, `[48]`, is for an actor: noisy errors, noisy velocities, the last
    action and the targets. `obs["privileged_state"]`, `[123]`, is for a critic:
    `state`, followed by the exact errors, velocities, positions, targets, last action
    and forces, and the elapsed time. Noise is random; the dynamics are deterministic.

    The reward is the mean of `exp(-error²)` over the joints, in (0, 1]. Episodes are
    truncated after `limit` steps and never terminate. With `limit=32`, random actions
    return 16. PPO with `gamma=0.9` returns 30 after 80 updates of 1,024 steps.
    """

    limit: int = 32

    @property
    def observation_space(self) -> envs.spaces.Dict:
        return envs.spaces.Dict(
            {
                "state": envs.Box(-jnp.inf, jnp.inf, (48,)),
                "privileged_state": envs.Box(-jnp.inf, jnp.inf, (123,)),
            }
        )

    @property
    def action_space(self) -> envs.Box:
        return envs.Box(-1.0, 1.0, (NUM_JOINTS,))

    def reset(self, key):
        target_key, force_key, noise_key = jax.random.split(key, 3)
        shape = (NUM_JOINTS,)
        state = {
            "n": jnp.int32(0),
            "position": jnp.zeros(shape),
            "velocity": jnp.zeros(shape),
            "action": jnp.zeros(shape),
            "target": jax.random.uniform(target_key, shape, minval=-1.0),
            "force": jax.random.uniform(force_key, shape, minval=-0.3, maxval=0.3),
        }
        return state, observe(noise_key, state)

    def step(self, key, state, action):
        velocity = action + state["force"]
        position = state["position"] + 0.3 * velocity
        n = state["n"] + 1
        state = {
            **state,
            "n": n,
            "position": position,
            "velocity": velocity,
            "action": action,
        }
        error = state["target"] - position
        return envs.EnvStep(
            state=state,
            obs=observe(key, state),
            reward=jnp.mean(jnp.exp(-jnp.square(error))),
            terminated=jnp.bool_(False),
            truncated=n == self.limit,
        )


def observe(key, state) -> dict[str, jax.Array]:
    error = state["target"] - state["position"]
    noise = NOISE * jax.random.normal(key, (2, NUM_JOINTS))
    measured = jnp.stack([error, state["velocity"]]) + noise
    actor_obs = jnp.concatenate([*measured, state["action"], state["target"]])
    phase = 0.1 * state["n"]
    time = jnp.stack([phase, jnp.sin(phase), jnp.cos(phase)])
    names = ("velocity", "position", "target", "action", "force")
    exact = [error, *(state[name] for name in names)]
    critic_obs = jnp.concatenate([actor_obs, *exact, time])
    return {"state": actor_obs, "privileged_state": critic_obs}
