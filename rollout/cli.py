"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It collects a number of steps or exactly N episodes, and prints the statistics and the
speed. Other options record one episode as a GIF, time the parts of a batch, or report
how the steps would run on an accelerator.
"""

import ast
import importlib
import os
import runpy
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from rollout import inspection, profiling
from rollout.agents.agent_stats import keep_agents, summarize_agents
from rollout.agents.mapping import static_mapping
from rollout.agents.policy_map import policy_map
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
from rollout.inspection.compilation import NAMES
from rollout.policies import masks, random_policy
from rollout.stats import CollectStats, Moments, merge, summarize
from rollout.stream import Stream
from rollout.types import Transition

_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"
_PIPE_CLOSED = 141  # as a shell counts SIGPIPE
_JaxError = jax.errors.JaxRuntimeError
_ERRORS = (ValueError, ImportError, MemoryError, OSError, EnvFault, _JaxError)
_NUM_BATCHES = 20
_MAX_ROWS = 1 << 22  # per batch, so that memory does not grow with the run


class Result(NamedTuple):
    """Result of a run of steps or of whole episodes."""

    stats: CollectStats
    agents: Any  # an `AgentStats`; None for environments of one agent
    num_rows: int  # steps of all lanes, including idle and masked-out steps
    compile_time: float  # s
    run_time: float  # s


def line(label: str, value: object) -> str:
    """Formats one line of the table."""
    return f"{label:<19} {value}".rstrip()


def head(run: Namespace) -> list[str]:
    """Formats the lines about the environment, the device and jax."""
    device = line("device", jax.devices()[0].device_kind)
    return [line("environment", run.title), device, line("jax", jax.__version__)]


def result_lines(run: Namespace, result: Result) -> Iterator[str]:
    """Yields the lines about the episodes and the speed."""
    stats, agents, seconds = result.stats, result.agents, result.run_time
    num_steps, note = int(stats.num_steps), ""
    num_out = result.num_rows - num_steps
    if run.num_episodes:
        note = f" ({100 * num_out / result.num_rows:.1f} % of the lane-steps idle)"
    yield line("envs", f"{run.num_envs:,}")
    yield line("steps", f"{num_steps:,}{note}")
    if num_out and not run.num_episodes:
        yield line("masked-out rows", f"{num_out:,} (environments reset themselves)")
    if agents:
        yield line("agent steps", f"{agents.num_agent_steps:,}")
        yield line("unassigned reward", f"{agents.unassigned_reward:.6g}")
        yield line("stale endings", f"{agents.num_stale:,}")
    yield from episodes(stats, agents)
    if run.num_episodes:
        yield line("mean return", stats.returns)  # with its interval
    yield line("compile time", f"{result.compile_time:.2f} s")
    yield line("run time", f"{seconds:.3f} s")
    if run.num_episodes:
        yield line("episodes per second", f"{run.num_episodes / seconds:,.0f}")
    yield line("steps per second", f"{num_steps / seconds:,.0f}")


def episodes(stats: CollectStats, agents: Any) -> Iterator[str]:
    """Yields lines of metrics of episodes, followed by agents and policies."""
    if not stats.num_episodes:
        yield line("episodes", "0 (no episode ended in this window)")
        return
    num_cut = stats.num_unfinished
    truncated = f"{stats.num_truncated - num_cut:,} truncated"
    cut = f", {num_cut:,} cut by --max-episode-steps" if num_cut else ""
    endings = f"{stats.num_terminated:,} terminated, {truncated}{cut}"
    yield line("episodes", f"{stats.num_episodes:,} ({endings})")
    yield line("", "".join(f"{name:<12}" for name in ("mean", "std", "min", "max")))
    rows: dict[str, Any] = {}
    if agents:
        policies = {f"  policy {name}": x for name, x in agents.policies.items()}
        rows = {f"  {name}": x for name, x in agents.agents.items()} | policies
    for label, name in (("return", "returns"), ("length", "lengths")):
        for row, x in ({label: stats} | rows).items():
            yield line(row, _moments(getattr(x, name)))


def _moments(x: Moments) -> str:
    text = "".join(f"{value:<12.6g}" for value in (x.mean, x.std, x.min, x.max))
    return text if x.count else "never acted"


class _Parser(ArgumentParser):
    """A parser that prints errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser() -> ArgumentParser:
    """Makes the parser. `parse` sets the defaults that depend on the type of run."""
    text = "Collects experience with the random policy and reports on it."
    parser = _Parser("python -m rollout", description=text, allow_abbrev=False)
    add = parser.add_argument
    text = "id, such as CartPole-v1, jumanji:Snake-v1, pgx:chess; or your own, "
    add("env", nargs="?", help=f"{text}module:Class or file.py:function")
    add("--num-envs", type=count, help="lanes (1024, of gymnasium: and envpool: 16)")
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--num-steps", type=count, default=1000, help="steps of every lane (1000)")
    mode("--num-episodes", type=count, help="play exactly so many episodes instead")
    mode("--gif", type=Path, help="play one episode and draw it as .gif")
    text = "time the parts of a batch, and trace one to this folder"
    mode("--profile", type=Path, help=text)
    mode("--inspect", choices=NAMES, help="report on an accelerator, run nothing")
    text = "longest episode, with --num-episodes (1000000) or --gif (1000)"
    add("--max-episode-steps", type=count, help=text)
    add("--seed", type=seed, default=0, help="seed of everything random (0)")
    text = "NAME=VALUE of the environment, VALUE a Python literal; repeatable"
    add("--env-param", type=parameter, action="append", default=[], help=text)
    add("--list-envs", action="store_true", help="print the known ids and exit")
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parses and checks the arguments, and sets defaults for the type of run.

    Returns:
        The arguments, with two more attributes: `is_on_host`, True if Python steps the
        environments, and `title`, the environment with its parameters.
    """
    run = parser.parse_args(argv)
    if run.list_envs:
        return run
    if run.env is None:
        parser.error("the environment is missing; --list-envs prints the ids")
    if run.max_episode_steps and not (run.num_episodes or run.gif):
        parser.error("--max-episode-steps needs --num-episodes or --gif")
    params = ", ".join(f"{name}={value!r}" for name, value in run.env_param)
    run.title = f"{run.env} ({params})" if params else run.env
    run.is_on_host = run.env.startswith(("gymnasium:", "envpool:"))
    most_envs = 16 if run.is_on_host else 1024
    num_episodes = 1 if run.gif else run.num_episodes
    run.num_envs = run.num_envs or min(most_envs, num_episodes or most_envs)
    run.max_episode_steps = run.max_episode_steps or (1000 if run.gif else 1_000_000)
    return run


def seed(text: str) -> int:
    """Parses a seed; `jax.random.key` would truncate a seed of more than 32 bits."""
    if not 0 <= int(text) < 2**32:
        raise ArgumentTypeError(f"must be from 0 to 2^32 - 1, got {text}")
    return int(text)


def count(text: str) -> int:
    """Parses an int of at least 1; argparse prints "invalid count value" on errors."""
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def parameter(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE."""
    name, _, literal = text.partition("=")
    try:
        if name.isidentifier():
            return name, ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    message = "must be NAME=VALUE, VALUE a Python literal"
    raise ArgumentTypeError(f"{message}, got {text!r}")


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
    # Let Ctrl-C end the process: XLA compiles for seconds without checking signals.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())


def _execute(run: Namespace) -> None:
    """Executes a run and prints the table of results."""
    if run.list_envs:
        _print(*env_ids("installed"), _OTHER_IDS)
    elif run.inspect:
        if not os.path.exists("/dev/nvidiactl"):
            # With only the compiler for GPUs installed, JAX would print a traceback.
            os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        sizes = {"envs": run.num_envs, "steps": run.num_envs * run.num_steps}
        rows = [line(name, f"{size:,}") for name, size in sizes.items()]
        _print(line("environment", run.title), *rows, inspect(run))
    elif run.gif:
        _print(*head(run), *episodes(draw(run), None))
    elif run.profile:
        _print(*head(run), profile(run))
    else:
        result = play(run) if run.num_episodes else collect(run)
        _print(*head(run), *result_lines(run, result))


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
    """Collects `num_steps` steps of every lane; shows progress in a terminal."""
    start = time.perf_counter()
    collector, params = make_collector(run)
    is_for_agents = has_agents(collector.env)

    def reduce_batch(trajectory: Transition) -> Any:
        """Reduces a batch to statistics instead of storing the transitions."""
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
        metrics = [batch.trajectory for batch in stream]
        # Compile time includes the time to create the environments.
        compile_time = time.perf_counter() - start - stream.stats.seconds
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
    """Makes a custom JAX environment; adapts environments with gymnax's interface."""
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
