"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It collects a number of steps or exactly N episodes, and prints the statistics and the
speed. Other options record one episode as a GIF, time the parts of a batch, or report
how the steps would run on an accelerator.
"""

import importlib
import os
import runpy
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import jax

from rollout import inspection, profiling
from rollout.agents.agent_stats import keep_agents, summarize_agents
from rollout.agents.mapping import static_mapping
from rollout.agents.policy_map import policy_map
from rollout.cli import table
from rollout.cli.arguments import make_parser, parse
from rollout.cli.table import Result
from rollout.collector import Collector
from rollout.envs.host.envpool import from_envpool
from rollout.envs.host.gymnasium import from_gymnasium
from rollout.envs.host.types import EnvFault
from rollout.envs.multi_agent import has_agents
from rollout.envs.registry import SUITES, env_ids, make
from rollout.envs.suites import from_gymnax
from rollout.envs.vectorize import vectorize
from rollout.gif import record_gif
from rollout.host.host_collector import HostCollector
from rollout.moments import merge
from rollout.policies import masks, random_policy
from rollout.stats import CollectStats, summarize
from rollout.stream.stream import Stream
from rollout.types import Transition

_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"
_PIPE_CLOSED = 141  # as a shell counts SIGPIPE
_JaxError = jax.errors.JaxRuntimeError
_ERRORS = (ValueError, ImportError, MemoryError, OSError, EnvFault, _JaxError)
_NUM_BATCHES = 20
_MAX_ROWS = 1 << 22  # per batch, so that memory does not grow with the run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 141 if the reader of stdout has closed the pipe, as a shell
            counts the signal; 2 after an error, with one line on stderr.
    """
    parser = make_parser()
    run = parse(parser, argv)
    try:
        _execute(run)
        return 0
    except BrokenPipeError:
        return _PIPE_CLOSED
    except _ERRORS as error:
        parser.error(str(error).partition("\n")[0])
    except Exception as error:
        # A bug in this library or in the environment: show the traceback.
        if not run.env_param:
            raise
        # An invalid parameter can raise any error in the environment.
        parser.error(f"{run.title} fails: {error}")


def run_and_exit() -> NoReturn:
    """Runs the command line and exits the process with its status."""
    # Ctrl-C ends the process: XLA compiles for seconds without checking signals.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())


def _execute(run: Namespace) -> None:
    """Executes a run and prints the table of results."""
    if run.list_envs:
        _print(*env_ids("installed"), _OTHER_IDS)
    elif run.inspect:
        if not os.path.exists("/dev/nvidiactl"):
            # If only the compiler for GPUs is installed, jax would print a traceback.
            os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        sizes = {"envs": run.num_envs, "steps": run.num_envs * run.num_steps}
        rows = [table.line(name, f"{size:,}") for name, size in sizes.items()]
        _print(table.line("environment", run.title), *rows, inspect(run))
    elif run.gif:
        _print(*table.head(run), *table.episodes(draw(run), None))
    elif run.profile:
        _print(*table.head(run), profile(run))
    else:
        result = play(run) if run.num_episodes else collect(run)
        _print(*table.head(run), *table.collected(run, result))


def _print(*lines: object) -> None:
    """Prints lines and flushes stdout, which may be closed or full."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # Python would flush stdout again at exit and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def make_collector(run: Namespace) -> tuple[Any, Any]:
    """Makes the collector and the parameters of its policy.

    Raises:
        ValueError: if there is no such environment.
    """
    options = dict(run.env_param)
    suite, _, env_id = run.env.partition(":")
    if run.is_on_host:
        if suite == "envpool":
            env: Any = from_envpool(env_id, run.num_envs, seed=run.seed, **options)
        else:
            source: Any = _find_factory(env_id) if ".py:" in env_id else env_id
            if run.gif and (source is env_id or _accepts(source, "render_mode")):
                options["render_mode"] = "rgb_array"
            env = from_gymnasium(source, run.num_envs, **options)
        return HostCollector(env=env, policy=random_policy(env.action_space)), None
    is_id = not env_id or suite in SUITES
    single_env: Any = (make if is_id else _make_custom)(run.env, **options)
    env = vectorize(single_env, run.num_envs)
    if not has_agents(single_env):
        policy = _random_policy(env.observation_space, env.action_space)
        return Collector(env=env, policy=policy), None
    obs, action = env.observation_spaces, env.action_spaces
    policies = {x: _random_policy(obs[x], action[x]) for x in env.groups}
    groups = {agent: x for x, names in env.groups.items() for agent in names}
    policy = policy_map(policies, static_mapping(groups), env)
    return Collector(env=env, policy=policy), dict.fromkeys(policies)


def collect(run: Namespace) -> Result:
    """Collects `num_steps` steps of every lane, with a bar if stderr is a terminal."""
    start = time.perf_counter()
    collector, params = make_collector(run)
    is_for_agents = has_agents(collector.env)

    def reduce_batch(trajectory: Transition) -> Any:
        """Reduces a batch to statistics, so that rows are not stored."""
        return summarize_agents(trajectory) if is_for_agents else ()

    with Stream(
        collector,
        key=jax.random.key(run.seed),
        params=params,
        steps_per_batch=num_rows(run) * run.num_envs,
        total_steps=run.num_steps * run.num_envs,
        postprocess=reduce_batch,
        device="host",
        prefetch=1,
        progress=sys.stderr.isatty(),
    ) as stream:
        stream.compile()
        # The time to create the environments counts as compile time.
        compile_time = time.perf_counter() - start
        metrics = [batch.trajectory for batch in stream]
    return Result(
        stats=stream.stats.collected,
        agents=merge(metrics) if is_for_agents else None,
        num_rows=run.num_steps * run.num_envs,
        compile_time=compile_time,
        run_time=stream.stats.seconds,
    )


def play(run: Namespace) -> Result:
    """Plays exactly `num_episodes` episodes of at most `max_episode_steps`."""
    start = time.perf_counter()
    base, params = make_collector(run)
    is_for_agents = has_agents(base.env)
    collector: Any = keep_agents(base, params) if is_for_agents else base
    carry = collector.init(jax.random.key(run.seed))

    def program(collector: Any, carry: Any, params: Any) -> Any:
        end, episodes = collector.collect_episodes(
            carry, params, run.num_episodes, max_episode_steps=run.max_episode_steps
        )
        metrics = summarize_agents(episodes) if is_for_agents else None
        return summarize(episodes), metrics, end.step - carry.step

    if run.is_on_host:
        collector.compile(carry, params)
    else:
        program = jax.jit(program).lower(collector, carry, params).compile()
    end_of_compile = time.perf_counter()
    stats, metrics, steps = jax.device_get(program(collector, carry, params))
    return Result(
        stats=stats,
        agents=metrics,
        num_rows=int(steps) * run.num_envs,
        compile_time=end_of_compile - start,
        run_time=time.perf_counter() - end_of_compile,
    )


def draw(run: Namespace) -> CollectStats:
    """Records the first episode that `play` would play, as a GIF."""
    collector, params = make_collector(run)
    key, max_episode_steps = jax.random.key(run.seed), run.max_episode_steps
    return summarize(
        record_gif(collector, params, key, run.gif, max_episode_steps=max_episode_steps)
    )


def inspect(run: Namespace) -> inspection.Report:
    """Compiles `num_steps` steps of every lane for an accelerator."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")  # do not initialize accelerators
    collector, params = make_collector(run)
    options = {"accelerator": run.inspect, "num_steps": run.num_steps}
    return inspection.inspect_program(
        collector, params, jax.random.key(run.seed), **options
    )


def profile(run: Namespace) -> profiling.Profile:
    """Times the parts of a batch, and traces another batch."""
    collector, params = make_collector(run)
    key, size = jax.random.key(run.seed), num_rows(run)
    result = profiling.profile(collector, params, key, size)
    carry = collector.init(key)
    with jax.profiler.trace(run.profile):
        jax.block_until_ready(collector.collect_steps(carry, params, size))
    return result


def num_rows(run: Namespace) -> int:
    """Returns the number of rows in a batch."""
    return min(-(-run.num_steps // _NUM_BATCHES), max(1, _MAX_ROWS // run.num_envs))


def _make_custom(text: str, **options: Any) -> Any:
    """Makes a user's JAX environment; adapts environments with gymnax's interface."""
    env = _find_factory(text)(**options)
    return from_gymnax(env) if hasattr(env, "step_env") else env


def _find_factory(text: str) -> Callable[..., Any]:
    """Imports the class or function of `module:Class` or `file.py:function`."""
    path, _, name = text.rpartition(":")
    is_file = path.endswith(".py")
    sys.path.insert(0, str(Path(path).parent) if is_file else "")
    try:
        names = runpy.run_path(path) if is_file else vars(importlib.import_module(path))
        return names[name]
    except (ImportError, OSError, KeyError) as error:
        raise ValueError(
            "the environment must be one of --list-envs, module:Class or "
            f"file.py:function, got {text}: {error}"
        ) from error


def _accepts(fn: Callable[..., Any], name: str) -> bool:
    """Returns whether a function accepts a keyword argument."""
    params = signature(fn).parameters
    return name in params or any(x.kind is x.VAR_KEYWORD for x in params.values())


def _random_policy(observation_space: Any, action_space: Any) -> Any:
    action_mask_fn = masks.find(observation_space, action_space)
    return random_policy(action_space, action_mask_fn=action_mask_fn)
