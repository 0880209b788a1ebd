"""How fast is recommendation, compared with a plain Python loop of the same steps?

The policy samples an item that the user has not been recommended yet; users leave
depending on the categories of the last items. The plain loop works like libraries with
NumPy environments: it steps the environments one after the other and calls the policy
once for all of them. Runs are interleaved; ratios are ratios of medians. Also compares
the memory of the compiled program with the size of masks and rows.

    python benchmarks/recommendation_speed.py
"""

from argparse import Namespace
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from harness import Program, lanes, measure, run

import rollout
from rollout import envs

NUM_USERS, NUM_CATEGORIES, WINDOW, THRESHOLD, MAX_TURN = 100, 31, 5, 2, 100
NUM_STEPS = 64


class PlainEnv:
    """A recommendation environment in NumPy with one user at a time."""

    def __init__(self, feedback: np.ndarray, categories: np.ndarray) -> None:
        self.feedback, self.categories = feedback, categories
        self.rng = np.random.default_rng(0)

    def reset(self) -> np.ndarray:
        """Samples a user."""
        self.user = self.rng.integers(len(self.feedback))
        self.items: list[int] = []
        return np.array([self.user, self.feedback.shape[1]])

    def step(self, item: int) -> tuple[np.ndarray, float, bool, bool]:
        """Recommends an item."""
        last = self.items[-WINDOW:]
        counts = self.categories[last].sum(axis=0)
        leaves = bool((counts[self.categories[item]] > THRESHOLD).any())
        self.items.append(item)
        obs = np.array([self.user, item])
        cut = len(self.items) >= MAX_TURN
        return obs, self.feedback[self.user, item], leaves, cut


def tables(num_items: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples random feedback and categories."""
    rng = np.random.default_rng(0)
    feedback = rng.random((NUM_USERS, num_items), np.float32)
    return feedback, rng.random((num_items, NUM_CATEGORIES)) < 2 / NUM_CATEGORIES


def plain_loop(num_items: int, num_lanes: int, num_steps: int) -> Program:
    """Makes a loop that steps all lanes, masks items and stores rows."""
    users = [PlainEnv(*tables(num_items)) for _ in range(num_lanes)]
    rng = np.random.default_rng(1)
    obs = np.stack([env.reset() for env in users])
    mask = np.ones((num_lanes, num_items), bool)

    def run() -> None:
        rows = []
        for _ in range(num_steps):
            scores = np.where(mask, rng.random(mask.shape), -1.0)
            items = scores.argmax(axis=1)
            for lane, env in enumerate(users):
                new, reward, leaves, cut = env.step(int(items[lane]))
                rows.append((obs[lane].copy(), items[lane], reward, leaves, cut, new))
                mask[lane, items[lane]] = False
                obs[lane] = new
                if leaves or cut:
                    obs[lane], mask[lane] = env.reset(), True

    return run


def make_collector(num_items: int, num_lanes: int) -> rollout.Collector:
    """Makes a `Collector` for the same steps, whose rows omit the masks."""
    feedback, categories = tables(num_items)
    rule = envs.recommendation.LeaveByCategory(categories, WINDOW, THRESHOLD)
    env = envs.wrappers.NoRepeat(
        envs.recommendation.RecommendationEnv(feedback, rule, max_turn=MAX_TURN)
    )
    policy = rollout.random_policy(
        env.action_space, action_mask_fn=lambda obs: obs["action_mask"]
    )
    return lanes(env, num_lanes, policy, record_fn=without_masks)


def without_masks(t: rollout.Transition) -> rollout.Transition:
    """Removes the action masks from a transition."""
    small = lambda obs: {name: obs[name] for name in ("user", "item")}  # noqa: E731
    return t.replace(obs=small(t.obs), next_obs=small(t.next_obs))


def fast_loop(collector: rollout.Collector) -> Program:
    """Makes a program that calls `collect_steps` and continues from its carry."""
    carry = collector.init(jax.random.key(0))

    def run() -> rollout.Transition:
        nonlocal carry
        carry, rows = collector.collect_steps(carry, None, NUM_STEPS)
        return rows

    return run


def memory(collector: rollout.Collector) -> tuple[float, float]:
    """Returns the bytes of the compiled program, and of the masks and rows it needs.

    The carry is donated, as in a training loop, so the next carry reuses its memory.
    """
    carry = collector.init(jax.random.key(0))
    collect = type(collector).collect_steps
    step = jax.jit(collect, static_argnums=3, donate_argnums=1)
    args = collector, carry, None, NUM_STEPS
    analysis = step.lower(*args).compile().memory_analysis()
    total = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    rows = jax.eval_shape(lambda: collect(*args))[1]
    masks = 2 * size(carry.obs["action_mask"])  # current and next obs
    env = jax.tree.map(jnp.asarray, jax.tree.leaves(collector.env))
    return total, size(rows) + masks + size(env)


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each number of items and lanes."""
    for num_items in (1_000, 10_000):
        for num_lanes in (64, 1_024):
            collector = make_collector(num_items, num_lanes)
            num_slow = 4 if num_lanes > 64 else NUM_STEPS
            plain = plain_loop(num_items, num_lanes, num_slow)
            programs = {"plain": plain, "ours": fast_loop(collector)}
            timing = measure(programs, args.repeats)
            slow = num_slow * num_lanes / timing["plain"].wall
            fast = NUM_STEPS * num_lanes / timing["ours"].wall
            used, needed = memory(collector)
            yield {
                "items": f"{num_items:,}",
                "lanes": f"{num_lanes:,}",
                "`rollout`, steps/s": f"{fast:,.0f}",
                "`plain loop`, steps/s": f"{slow:,.0f}",
                "`rollout` / `plain loop`": f"{fast / slow:.0f}",
                "memory, MB": f"{used / 1e6:.1f}",
                "memory / masks and rows": f"{used / needed:.2f}",
            }


if __name__ == "__main__":
    run(__doc__, 9, {"recommendation": rows})
