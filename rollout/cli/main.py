"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It collects a number of steps or exactly N episodes, and prints their statistics and the
speed. Other options draw one episode, time the parts of a batch, or report how the
steps would run on an accelerator.
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
_MAX_ROWS = 1 << 22  # of a batch, so that its memory does not grow with the run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 141 if the reader of stdout is gone, as a shell counts the
            signal; 2 after an error, with one line on stderr.
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
        # A bug of ours, or of the environment: the traceback is what helps.
        if not run.env_param:
            raise
        # A wrong value fails wherever the environment first uses it.
        parser.error(f"{run.title} fails: {error}")


def run_and_exit() -> NoReturn:
    """Runs the command line as a process, and ends the process."""
    # Ctrl-C ends it at once: XLA compiles for seconds without looking at Python's.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())


def _execute(run: Namespace) -> None:
    """Executes a run, and prints its table."""
    if run.list_envs:
        _print(*env_ids("installed"), _OTHER_IDS)
    elif run.inspect:
        if not os.path.exists("/dev/nvidiactl"):
            # With a GPU's compiler and no GPU jax would print a traceback.
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
    """Prints lines, and flushes stdout, which may be closed or full."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # Python would try again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def make_collector(run: Namespace) -> tuple[Any, Any]:
    """Makes the collector, and the parameters of its policy.

    Raises:
        ValueError: if there are no such environments.
    """
    options = dict(run.env_param)
    suite, _, env_id = run.env.partition(":")
    if run.is_on_host:
        if suite == "envpool":
            env: Any = from_envpool(env_id, run.num_envs, seed=run.seed, **options)
        else:
            own: Any = _find(env_id) if ".py:" in env_id else env_id
            if run.gif and (own is env_id or _takes(own, "render_mode")):
                options["render_mode"] = "rgb_array"
            env = from_gymnasium(own, run.num_envs, **options)
        return HostCollector(env=env, policy=random_policy(env.action_space)), None
    is_id = not env_id or suite in SUITES
    one: Any = (make if is_id else _make_own)(run.env, **options)
    env = vectorize(one, run.num_envs)
    if not has_agents(one):
        policy = _random_policy(env.observation_space, env.action_space)
        return Collector(env=env, policy=policy), None
    seen, spaces = env.observation_spaces, env.action_spaces
    every = {x: _random_policy(seen[x], spaces[x]) for x in env.groups}
    groups = {agent: x for x, names in env.groups.items() for agent in names}
    policy = policy_map(every, static_mapping(groups), env)
    return Collector(env=env, policy=policy), dict.fromkeys(every)


def collect(run: Namespace) -> Result:
    """Collects `num_steps` steps of every lane, with a bar if stderr is a terminal."""
    start = time.perf_counter()
    collector, params = make_collector(run)
    is_for_agents = has_agents(collector.env)

    def keep(trajectory: Transition) -> Any:
        """Keeps statistics only: the rows are not stored."""
        return summarize_agents(trajectory) if is_for_agents else ()

    with Stream(
        collector,
        key=jax.random.key(run.seed),
        params=params,
        steps_per_batch=num_rows(run) * run.num_envs,
        total_steps=run.num_steps * run.num_envs,
        postprocess=keep,
        device="host",
        prefetch=1,
        progress=sys.stderr.isatty(),
    ) as stream:
        stream.compile()
        # Making the environments counts as compiling: it is what one waits for first.
        compile_time = time.perf_counter() - start
        kept = [batch.trajectory for batch in stream]
    return Result(
        stats=stream.stats.collected,
        agents=merge(kept) if is_for_agents else None,
        num_rows=run.num_steps * run.num_envs,
        compile_time=compile_time,
        run_time=stream.stats.seconds,
    )


def play(run: Namespace) -> Result:
    """Plays exactly `num_episodes` episodes of at most `max_episode_steps`."""
    start = time.perf_counter()
    made, params = make_collector(run)
    is_for_agents = has_agents(made.env)
    collector: Any = keep_agents(made, params) if is_for_agents else made
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
    compiled = time.perf_counter()
    stats, metrics, steps = jax.device_get(program(collector, carry, params))
    return Result(
        stats=stats,
        agents=metrics,
        num_rows=int(steps) * run.num_envs,
        compile_time=compiled - start,
        run_time=time.perf_counter() - compiled,
    )


def draw(run: Namespace) -> CollectStats:
    """Draws the first episode that `play` would play, as a GIF."""
    collector, params = make_collector(run)
    key, max_episode_steps = jax.random.key(run.seed), run.max_episode_steps
    return summarize(
        record_gif(collector, params, key, run.gif, max_episode_steps=max_episode_steps)
    )


def inspect(run: Namespace) -> inspection.Report:
    """Compiles `num_steps` steps of every lane for an accelerator."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")  # does not look for accelerators
    collector, params = make_collector(run)
    options = {"accelerator": run.inspect, "num_steps": run.num_steps}
    return inspection.inspect_program(
        collector, params, jax.random.key(run.seed), **options
    )


def profile(run: Namespace) -> profiling.Profile:
    """Times the parts of a batch, and traces one more."""
    collector, params = make_collector(run)
    key, size = jax.random.key(run.seed), num_rows(run)
    found = profiling.profile(collector, params, key, size)
    carry = collector.init(key)
    with jax.profiler.trace(run.profile):
        jax.block_until_ready(collector.collect_steps(carry, params, size))
    return found


def num_rows(run: Namespace) -> int:
    """Returns the number of rows in a batch."""
    return min(-(-run.num_steps // _NUM_BATCHES), max(1, _MAX_ROWS // run.num_envs))


def _make_own(text: str, **options: Any) -> Any:
    """Makes a user's own environment in JAX; adapts one of gymnax's kind."""
    env = _find(text)(**options)
    return from_gymnax(env) if hasattr(env, "step_env") else env


def _find(text: str) -> Callable[..., Any]:
    """Finds what makes an environment, `module:Class` or `file.py:function`."""
    where, _, name = text.rpartition(":")
    is_file = where.endswith(".py")
    sys.path.insert(0, str(Path(where).parent) if is_file else "")
    try:
        own = runpy.run_path(where) if is_file else vars(importlib.import_module(where))
        return own[name]
    except (ImportError, OSError, KeyError) as error:
        raise ValueError(
            "the environment must be one of --list-envs, module:Class or "
            f"file.py:function, got {text}: {error}"
        ) from error


def _takes(fn: Callable[..., Any], name: str) -> bool:
    """Returns whether a function takes an argument by name."""
    kinds = signature(fn).parameters
    return name in kinds or any(x.kind is x.VAR_KEYWORD for x in kinds.values())


def _random_policy(observation_space: Any, action_space: Any) -> Any:
    action_mask_fn = masks.find(observation_space, action_space)
    return random_policy(action_space, action_mask_fn=action_mask_fn)
