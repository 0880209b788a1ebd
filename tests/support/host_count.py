"""A counting environment in JAX and in NumPy, and collectors of both."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from cases import CountEnv
from flax import struct

import rollout
from rollout import envs
from rollout.base import prng
from rollout.envs.host.types import (
    AsyncHostVectorEnv,
    EnvFault,
    HostStep,
    HostVectorEnv,
)
from rollout.host import HostCollector


@struct.dataclass(kw_only=True)
class SeedCount(CountEnv):
    """A `CountEnv` that computes an episode's length from the seed on the host.

    Its info contains only the action.
    """

    def reset(self, key):
        state, obs = super().reset(key)
        spread = self.max_length - self.min_length + 1
        length = self.min_length + (prng.bits(key, ()) >> 1).astype(jnp.int32) % spread
        return {**state, "length": length.astype(jnp.int32)}, obs

    def step(self, key, state, action):
        result = super().step(key, state, action)
        return result.replace(info={"action": action})


class HostCount(HostVectorEnv):
    """`B` counting environments in NumPy.

    Args:
        num_envs: B.
        min_length, max_length, limit: see `CountEnv`; each may also be `[B]`.
        resets_itself: whether the next step resets a done environment, as in EnvPool.
        fault_fn: maps `(number of the step or reset, env)` to a fault: an exception,
            "nan", "nan reward", or None.
    """

    observation_space = envs.Box(0.0, 1e6, (1,))
    action_space = envs.Discrete(3)
    can_rebuild = True

    def __init__(
        self,
        num_envs,
        *,
        min_length=2,
        max_length=9,
        limit=7,
        resets_itself=False,
        fault_fn=lambda number, env: None,
    ):
        self.num_envs = num_envs
        self.bounds = [
            np.broadcast_to(x, num_envs) for x in (min_length, max_length, limit)
        ]
        self.resets_itself, self.fault_fn = resets_itself, fault_fn
        self.length = np.zeros(num_envs, np.int64)
        self.obs = np.zeros((num_envs, 1), np.float32)
        self.is_done = np.ones(num_envs, bool)  # reset required before the next step
        self.resets_next = np.zeros(num_envs, bool)
        self.number = np.zeros(num_envs, np.int64)  # number of calls per environment
        self.has_failed, self.rebuilt_ids = np.zeros(num_envs, bool), []
        self.num_resets, self.is_closed = 0, False

    def reset(self, seeds, mask):
        assert mask.any()
        assert not self.has_failed[mask].any()
        causes = {}
        for env in np.flatnonzero(mask):
            self.number[env] += 1
            fault = self.fault_fn(int(self.number[env]), int(env))
            self.has_failed[env] = fault is not None
            if isinstance(fault, Exception):
                causes[int(env)] = fault
                continue
            self.num_resets += 1
            if self.resets_itself and self.is_done[env] and self.length[env]:
                self.resets_next[env] = True
            else:
                self.obs[env] = np.nan if fault == "nan" else 0.0
            low, high, _ = (bound[env] for bound in self.bounds)
            self.length[env] = low + (int(seeds[env]) >> 1) % (high - low + 1)
            self.is_done[env] = False
        if causes:
            raise EnvFault(causes)
        return self.obs

    def step(self, action):
        assert not self.is_done.any(), "step after the end of an episode"
        is_step = ~self.resets_next
        self.obs[self.resets_next] = -1.0
        self.obs += 1.0
        n = self.obs[:, 0]
        faulty, causes = np.zeros(self.num_envs, bool), {}
        reward = np.where(is_step, n, 0.0).astype(np.float32)
        for env in range(self.num_envs):
            self.number[env] += 1
            fault = self.fault_fn(int(self.number[env]), env)
            if fault == "nan reward":
                reward[env] = np.nan
            elif fault == "nan":
                self.obs[env] = np.nan
            elif fault:
                faulty[env], causes[env] = True, fault
        self.has_failed |= faulty
        terminated = is_step & (n == self.length)
        truncated = is_step & (n == self.bounds[2])
        self.is_done = terminated | truncated
        self.resets_next = np.zeros(self.num_envs, bool)
        return HostStep(
            obs=self.obs,
            reward=reward,
            terminated=terminated & ~faulty,
            truncated=truncated & ~faulty,
            faulty=faulty,
            info={"action": action},
            mask=is_step if self.resets_itself else None,
            causes=causes,
        )

    def rebuild(self, mask):
        self.rebuilt_ids += list(np.flatnonzero(mask))
        self.has_failed[mask] = False
        self.is_done[mask], self.resets_next[mask] = True, False
        self.length[mask] = 0

    def close(self):
        self.is_closed = True


class DelayedCount(HostCount, AsyncHostVectorEnv):
    """Counting environments whose steps take some virtual time.

    Args:
        latency_fn: maps `(rng, env)` to the seconds of a step.
    """

    def __init__(self, num_envs, *, latency_fn=lambda rng, env: 0.0, **options):
        super().__init__(num_envs, **options)
        self.latency_fn = latency_fn
        self.rng, self.time = np.random.default_rng(0), 0.0
        self.num_sent, self.queue = 0, []  # (time of the result, number sent, env)

    def reset(self, seeds, mask):
        self.queue = [x for x in self.queue if not mask[x[-1]]]
        return super().reset(seeds, mask)

    def send(self, action, env_id):
        for env in env_id.tolist():
            assert env not in [x[-1] for x in self.queue]
            time = self.time + self.latency_fn(self.rng, env)
            self.queue.append((time, self.num_sent, env))
            self.num_sent += 1

    def receive(self, num_ready, timeout=None):
        ready = sorted(self.queue)[:num_ready]
        assert len(ready) == num_ready
        self.queue = [x for x in self.queue if x not in ready]
        self.time = max(self.time, ready[-1][0])
        env_id = np.array([x[-1] for x in ready], np.int32)
        other_ids = np.setdiff1d(np.arange(self.num_envs), env_id)
        names = "obs", "is_done", "number"
        old_values = {x: getattr(self, x)[other_ids].copy() for x in names}
        self.is_done[other_ids] = False
        result = self.step(np.zeros(self.num_envs, np.int32))
        for name, value in old_values.items():
            getattr(self, name)[other_ids] = value
        causes = {i: x for i, x in result.causes.items() if i in env_id}
        fields = [x[env_id] for x in result[:5]]
        return type(result)(*fields, info={}, causes=causes), env_id


KEY = jax.random.key(3)


def act(params, obs, count, key):
    """Samples actions, counts the steps of the policy and records both."""
    noise = jax.random.uniform(key, count.shape)
    action = (noise * 3).astype(jnp.int32)
    return action, count + 1, {"count": count, "noise": noise}


def critic(params, obs, count):
    """Returns small integers, so that sums are exact."""
    return 10.0 * obs[:, 0] + count


def empty(num_envs):
    return jnp.zeros(num_envs, int)


POLICY = rollout.recurrent_policy(act, empty, value_fn=critic)


def add_square(transition):
    return transition.replace(extras={**transition.extras, "two": transition.reward**2})


def zeros(num_envs):
    return jnp.zeros(num_envs, jnp.float32)


ACCUMULATORS = {
    "squares": rollout.Accumulator(zeros, lambda x, t: x + t.reward**2),
}
OPTIONS = {"policy": POLICY, "accumulators": ACCUMULATORS, "record_fn": add_square}


@functools.cache
def in_jax(num_envs=4, **params):
    env = envs.vectorize(SeedCount(**params), num_envs, auto_reset="select")
    return rollout.Collector(env=env, **OPTIONS)


def on_host(num_envs=4, **params):
    return HostCollector(env=HostCount(num_envs, **params), **OPTIONS)


def count_rows(acc, transition):
    """Counts steps, and sums rewards and extras."""
    num_steps, total = acc
    row_sum = transition.reward + sum(jax.tree.leaves(transition.extras))
    num_steps = num_steps + transition.mask.sum(dtype=jnp.int32)
    return num_steps, total + jnp.where(transition.mask, row_sum, 0)


INITIAL_SUM = np.int32(0), np.zeros(4, np.float32)


def episodes(num_episodes, **options):
    options = {"max_episode_steps": 6, **options}
    return lambda x, carry: x.collect_episodes(carry, None, num_episodes, **options)


def values(collector, carry):
    carry, _ = collector.collect_steps(carry, None, 5)
    return carry, collector.value(carry, None)


# Calls of a collector with four lanes.
CALLS = {
    "steps": lambda x, carry: x.collect_steps(carry, None, 40),
    "values": values,
    "fewer episodes than lanes": episodes(3),
    "more episodes than lanes": episodes(11, max_episode_steps=4),
    "padded episodes": lambda x, carry: x.collect_episodes(
        carry, None, 7, max_episode_steps=6, return_trajectory=True
    ),
    "rows of enough steps": lambda x, carry: x.collect_episodes(
        carry, None, 9, max_episode_steps=6, min_steps=17, return_trajectory=True
    ),
    "rows of each lane": lambda x, carry: x.collect_episodes(
        carry, None, 3, max_episode_steps=6, per_env=True, return_trajectory=True
    ),
    "folded steps": lambda x, carry: x.fold_steps(
        carry, None, count_rows, INITIAL_SUM, num_steps=150
    ),
    "folded episodes": lambda x, carry: x.fold_episodes(
        carry, None, count_rows, INITIAL_SUM, num_episodes=40, max_episode_steps=6
    ),
}


def assert_same(host, kernel):
    """Checks that two trees are equal, bit for bit."""
    chex.assert_trees_all_equal(jax.device_get(host), jax.device_get(kernel))


def assert_same_carry(host, kernel):
    assert_same(
        host.replace(key=0, env_state=0, episode=host.episode.replace(key=0)),
        kernel.replace(key=0, env_state=0, episode=kernel.episode.replace(key=0)),
    )
