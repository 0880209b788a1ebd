"""How fast is evaluation of N episodes, compared with a fixed horizon?

Times 1,024 episodes of the random policy in CartPole-v1, in interleaved runs in one
process: `collect_episodes` over 1,024 lanes; gymnax's `RolloutWrapper.batch_rollout`,
which steps 1,024 environments 500 times each even if the first episode ends earlier;
and `batch_rollout` inside a jit that reads only the returns, so that XLA eliminates all
other outputs. Then prints how busy 256 lanes are while they serve 4,096 episodes.

    python benchmarks/episodes_speed.py
"""

from argparse import Namespace
from collections.abc import Iterator

import jax
from gymnax.experimental import RolloutWrapper
from harness import lanes, measure, run

ENV_ID, HORIZON, NUM_EPISODES, MAX_STEPS = "CartPole-v1", 500, 1024, 10_000


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times the three programs."""
    collector, key = lanes(ENV_ID, NUM_EPISODES), jax.random.key(0)
    carry, keys = collector.init(key), jax.random.split(key, NUM_EPISODES)
    wrapper = RolloutWrapper(env_name=ENV_ID, num_env_steps=HORIZON)
    returns_fn = jax.jit(lambda keys: wrapper.batch_rollout(keys, None)[-1])
    counts = {"num_episodes": NUM_EPISODES, "max_episode_steps": MAX_STEPS}
    programs = {
        "ours": lambda: collector.collect_episodes(carry, None, **counts),
        "whole": lambda: wrapper.batch_rollout(keys, None),
        "returns": lambda: returns_fn(keys),
    }
    ms = {name: 1e3 * x.wall for name, x in measure(programs, args.repeats).items()}
    yield {
        "jax": jax.__version__,
        "`rollout`, ms": f"{ms['ours']:.1f}",
        "`RolloutWrapper`, ms": f"{ms['whole']:.0f}",
        "speed, `rollout` / that": f"{ms['whole'] / ms['ours']:.0f}",
        "`RolloutWrapper`, only returns read, ms": f"{ms['returns']:.0f}",
        "speed, `rollout` / this": f"{ms['returns'] / ms['ours']:.0f}",
    }
    collector = lanes(ENV_ID, 256)
    carry = collector.init(key)
    next_carry, episodes = collector.collect_episodes(
        carry, None, 4096, max_episode_steps=MAX_STEPS
    )
    busy = float(episodes.num_steps / ((next_carry.step - carry.step) * 256))
    print(f"\n256 lanes serve 4,096 episodes: {busy:.1%} of the lane-steps are busy")


if __name__ == "__main__":
    run(__doc__, 15, {"whole episodes": rows})
