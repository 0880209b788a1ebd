"""The commands `speed`, `render` and `inspect`."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from rollout import checkpoint, inspection, profiling
from rollout.agents.agent_stats import keep_agents, summarize_agents
from rollout.agents.policy_map import random_policy_map
from rollout.cli.arguments import env_title, is_host_env, make_env
from rollout.collector import Collector
from rollout.envs import spaces
from rollout.envs.multi_agent import has_agents
from rollout.gif import record_gif
from rollout.host.host_collector import HostCollector
from rollout.policies import masks, random_policy
from rollout.stats import CollectStats, Moments, merge, summarize
from rollout.stream import Stream
from rollout.types import Transition

_NUM_BATCHES = 20
_MAX_ROWS = 1 << 22  # per batch, so that memory does not grow with the run
_MAX_EPISODE_STEPS = 1_000_000


class Result(NamedTuple):
    """Result of a run of steps or of whole episodes."""

    stats: CollectStats
    agents: Any  # an `AgentStats`; None for environments of one agent
    num_rows: int  # steps of all lanes, including idle and masked-out steps
    compile_time: float  # s
    run_time: float  # s


def measure(options: Namespace) -> Iterator[str]:
    """Measures the speed of N steps, of N episodes, or of the parts of a batch."""
    if options.max_episode_steps and not options.num_episodes:
        raise ValueError("--max-episode-steps needs --num-episodes")
    num_envs = options.num_envs or default_num_envs(options)
    if options.profile:
        profile = profile_batch(options, num_envs)
        yield from run_lines(options)
        yield str(profile)
        return
    collect = collect_episodes if options.num_episodes else collect_steps
    result = collect(options, num_envs)
    yield from run_lines(options)
    yield line("envs", f"{num_envs:,}")
    yield from result_lines(result, options.num_episodes)


def render(options: Namespace) -> Iterator[str]:
    """Plays one episode and renders it as a GIF."""
    make_fn = load_collector if options.folder else make_collector
    collector, params = make_fn(options, 1, is_rendered=True)
    try:
        episodes = record_gif(
            collector,
            params,
            jax.random.key(options.seed),
            options.file,
            max_episode_steps=options.max_episode_steps,
            height=options.height,
            every=options.every,
            fps=options.fps,
        )
    finally:
        if is_host_env(options):  # MuJoCo prints errors about a window at exit
            collector.close()
    yield from run_lines(options)
    yield from episode_lines(summarize(episodes), None)


def inspect(options: Namespace) -> Iterator[str]:
    """Compiles the steps for an accelerator, and returns the report."""
    if not os.path.exists("/dev/nvidiactl"):
        # JAX would print a traceback if only the compiler for GPUs is installed.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")  # do not initialize accelerators
    collector, params = make_collector(options, options.num_envs)
    report = inspection.inspect_program(
        collector,
        params,
        jax.random.key(options.seed),
        accelerator=options.accelerator,
        num_steps=options.num_steps,
    )
    yield line("environment", env_title(options))
    yield line("envs", f"{options.num_envs:,}")
    yield line("steps", f"{options.num_envs * options.num_steps:,}")
    yield str(report)


def make_collector(
    options: Namespace, num_envs: int, is_rendered: bool = False
) -> tuple[Any, Any]:
    """Makes the collector with the random policy, and the parameters of the policy."""
    env = make_env(options, num_envs, is_rendered)
    collector_class: Any = HostCollector if is_host_env(options) else Collector
    if not has_agents(env):
        action_mask_fn = masks.find_mask(env.observation_space, env.action_space)
        policy = random_policy(env.action_space, action_mask_fn=action_mask_fn)
        return collector_class(env=env, policy=policy), None
    collector = collector_class(env=env, policy=random_policy_map(env))
    return collector, dict.fromkeys(env.groups)


def load_collector(
    options: Namespace, num_envs: int, is_rendered: bool = False
) -> tuple[Any, Any]:
    """Makes the collector with the policy of a run, and the parameters of the policy.

    The parameters are those of the best evaluation, or of the last update if the run
    was killed before its first evaluation. The policy takes the most likely action. If
    the run has several seeds, the parameters are those of the first.
    """
    from rollout.recipes import running  # requires optax

    folder = options.folder.expanduser()
    seed = None if running.read_settings(folder).get("num_seeds") is None else 0
    name = "best" if checkpoint.steps(folder / "best") else "last"
    trained, state = running.load(folder, name=name, seed=seed)
    agent = trained.replace(env=make_env(options, num_envs, is_rendered))
    for name in ("observation_space", "action_space"):
        space, trained_space = getattr(agent.spec, name), getattr(trained.spec, name)
        if spaces.to_json(space) != spaces.to_json(trained_space):
            raise ValueError(
                f"ENV must have the {name} of the run in {folder}, {trained_space}, "
                f"got {space} of {options.env}."
            )
    return agent.eval_collector, state.params


def default_num_envs(options: Namespace) -> int:
    """Returns the number of environments, at most one per episode."""
    most_envs = 16 if is_host_env(options) else 1024
    return min(most_envs, options.num_episodes or most_envs)


def batch_rows(num_steps: int, num_envs: int) -> int:
    """Returns the number of steps per environment in a batch."""
    return min(-(-num_steps // _NUM_BATCHES), max(1, _MAX_ROWS // num_envs))


def collect_steps(options: Namespace, num_envs: int) -> Result:
    """Collects `num_steps` steps of every lane; shows progress in a terminal."""
    start = time.perf_counter()
    num_steps = options.num_steps
    collector, params = make_collector(options, num_envs)
    is_for_agents = has_agents(collector.env)

    def reduce_batch(trajectory: Transition) -> Any:
        """Reduces a batch to statistics instead of storing the transitions."""
        return summarize_agents(trajectory) if is_for_agents else ()

    with Stream(
        collector,
        key=jax.random.key(options.seed),
        params=params,
        steps_per_batch=batch_rows(num_steps, num_envs) * num_envs,
        total_steps=num_steps * num_envs,
        postprocess=reduce_batch,
        device="host",
        prefetch=1,
        progress=sys.stderr.isatty(),
    ) as stream:
        metrics = [batch.trajectory for batch in stream]
        # Compile time includes the time to create the environments.
        compile_time = time.perf_counter() - start - stream.stats.seconds
    return Result(
        stats=stream.stats.collected,
        agents=merge(metrics) if is_for_agents else None,
        num_rows=num_steps * num_envs,
        compile_time=compile_time,
        run_time=stream.stats.seconds,
    )


def collect_episodes(options: Namespace, num_envs: int) -> Result:
    """Collects exactly `num_episodes` episodes of at most `max_episode_steps`."""
    start = time.perf_counter()
    base, params = make_collector(options, num_envs)
    is_for_agents = has_agents(base.env)
    collector: Any = keep_agents(base, params) if is_for_agents else base
    carry = collector.init(jax.random.key(options.seed))

    def program(collector: Any, carry: Any, params: Any) -> Any:
        end, episodes = collector.collect_episodes(
            carry,
            params,
            options.num_episodes,
            max_episode_steps=options.max_episode_steps or _MAX_EPISODE_STEPS,
        )
        metrics = summarize_agents(episodes) if is_for_agents else None
        return summarize(episodes), metrics, end.step - carry.step

    if is_host_env(options):
        collector.compile(carry, params)
    else:
        program = jax.jit(program).lower(collector, carry, params).compile()
    end_of_compile = time.perf_counter()
    stats, metrics, steps = jax.device_get(program(collector, carry, params))
    return Result(
        stats=stats,
        agents=metrics,
        num_rows=int(steps) * num_envs,
        compile_time=end_of_compile - start,
        run_time=time.perf_counter() - end_of_compile,
    )


def profile_batch(options: Namespace, num_envs: int) -> profiling.Profile:
    """Times the parts of a batch, and traces another batch."""
    collector, params = make_collector(options, num_envs)
    num_steps = batch_rows(options.num_steps, num_envs)
    key = jax.random.key(options.seed)
    result = profiling.profile(collector, params, key, num_steps)
    carry = collector.init(key)
    with jax.profiler.trace(options.profile):
        jax.block_until_ready(collector.collect_steps(carry, params, num_steps))
    return result


def line(label: str, value: object) -> str:
    """Formats one line of the table."""
    return f"{label:<19} {value}".rstrip()


def run_lines(options: Namespace) -> Iterator[str]:
    """Yields the lines about the environment, the device and jax."""
    yield line("environment", env_title(options))
    yield line("device", jax.devices()[0].device_kind)
    yield line("jax", jax.__version__)


def result_lines(result: Result, num_episodes: int | None) -> Iterator[str]:
    """Yields the lines about the episodes and the speed."""
    stats, agents, seconds = result.stats, result.agents, result.run_time
    num_steps, note = int(stats.num_steps), ""
    num_masked = result.num_rows - num_steps
    if num_episodes:
        note = f" ({100 * num_masked / result.num_rows:.1f} % of the lane-steps idle)"
    yield line("steps", f"{num_steps:,}{note}")
    if num_masked and not num_episodes:
        yield line("masked-out rows", f"{num_masked:,} (environments reset themselves)")
    if agents:
        yield line("agent steps", f"{agents.num_agent_steps:,}")
        yield line("unassigned reward", f"{agents.unassigned_reward:.6g}")
        yield line("stale endings", f"{agents.num_stale:,}")
    yield from episode_lines(stats, agents)
    if num_episodes:
        yield line("mean return", stats.returns)  # with its interval
    yield line("compile time", f"{result.compile_time:.2f} s")
    yield line("run time", f"{seconds:.3f} s")
    if num_episodes:
        yield line("episodes per second", f"{num_episodes / seconds:,.0f}")
    yield line("steps per second", f"{num_steps / seconds:,.0f}")


def episode_lines(stats: CollectStats, agents: Any) -> Iterator[str]:
    """Yields the lines of episodes, followed by agents and policies."""
    if not stats.num_episodes:
        yield line("episodes", "0 (no episode ended in this window)")
        return
    num_unfinished = stats.num_unfinished
    endings = [
        f"{stats.num_terminated:,} terminated",
        f"{stats.num_truncated - num_unfinished:,} truncated",
    ]
    if num_unfinished:
        endings.append(f"{num_unfinished:,} cut by --max-episode-steps")
    yield line("episodes", f"{stats.num_episodes:,} ({', '.join(endings)})")
    yield line("", "".join(f"{name:<12}" for name in ("mean", "std", "min", "max")))
    rows: dict[str, Any] = {}
    if agents:
        policies = {f"  policy {name}": x for name, x in agents.policies.items()}
        rows = {f"  {name}": x for name, x in agents.agents.items()} | policies
    for label, name in (("return", "returns"), ("length", "lengths")):
        for row, x in ({label: stats} | rows).items():
            yield line(row, format_moments(vars(x)[name]))


def format_moments(x: Moments) -> str:
    """Formats mean, standard deviation, minimum and maximum."""
    text = "".join(f"{value:<12.6g}" for value in (x.mean, x.std, x.min, x.max))
    return text if x.count else "never acted"
