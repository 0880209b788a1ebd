"""The command `rollout train`, which is also `python -m rollout.recipes.ppo`.

The fields of the agent's `Config` are options of the command, and the section
`Attributes:` of its docstring describes them.
"""

import functools
import inspect
import os
import re
import sys
import types
import typing
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from rollout import envs
from rollout.cli.arguments import (
    Parser,
    add_count,
    add_env_arguments,
    is_host_env,
    make_env,
    parse_count,
)
from rollout.cli.command import end_on_interrupt, execute
from rollout.envs.multi_agent import has_agents
from rollout.recipes import run
from rollout.recipes.run_settings import name_of
from rollout.stats import moments, plural


def main(
    agent_class: Any, config: Any, num_envs: int, argv: Sequence[str] | None = None
) -> NoReturn:
    """Trains an agent with the options of the command line, and exits.

    Args:
        agent_class: class of the agent, with the fields `env` and `config`.
        config: default hyperparameters. Every number, bool, name and tuple becomes an
            option.
        num_envs: default number of parallel environments.
        argv: arguments; None reads the arguments of the process.
    """
    end_on_interrupt()
    parser = make_parser(agent_class, config, num_envs)
    train = functools.partial(train_agent, agent_class, config)
    parser.set_defaults(run=train, parser=parser)
    sys.exit(execute(parser, argv))


def make_parser(agent_class: Any, config: Any, num_envs: int) -> Parser:
    """Makes the parser, with an option for each field of the config."""
    package, _, name = name_of(agent_class).partition(":")[0].rpartition(".")
    parser = Parser(
        f"rollout train {name}" if package == "rollout.recipes" else None,
        usage="%(prog)s ENV [options]",
        description=(agent_class.__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    add_env_arguments(parser)
    add = parser.add_argument
    add_count(parser, "--num-envs", "parallel environments", default=num_envs)
    text = "number of seeds to train in one program (1)"
    add_count(parser, "--num-seeds", text)
    text = "divide rewards by the standard deviation of returns"
    add("--normalize-rewards", action="store_true", help=text)
    text = "folder of the run (runs/AGENT-ENV)"
    add("--folder", type=Path, metavar="FOLDER", help=text)
    add("--resume", action="store_true", help="continue the run in the folder")
    text = "environment steps between evaluations (evaluates once, at the end)"
    add_count(parser, "--evaluate-every", text)
    add_count(parser, "--num-eval-episodes", "episodes per evaluation", default=100)
    text = "mean return of an evaluation at which the training stops"
    add("--target-return", type=float, metavar="FLOAT", help=text)
    text = "number of devices, or all (1)"
    add("--devices", default="1", metavar="INT", help=text)
    add("--no-cache", action="store_true", help="do not keep compiled programs")
    add_config_options(parser, config)
    return parser


def add_config_options(parser: ArgumentParser, config: Any) -> None:
    """Adds an option for each field of a config, described by its docstring."""
    group = parser.add_argument_group("hyperparameters", "Fields of `Config`.")
    annotations = typing.get_type_hints(type(config))
    descriptions = read_attributes(type(config).__doc__ or "")
    for name, value in vars(config).items():
        parser_fn = value_parser(annotations[name])
        if parser_fn is None:
            continue
        default = ",".join(map(str, value)) if isinstance(value, tuple) else value
        text = f"{descriptions.get(name, '')} ({default})"
        group.add_argument(
            f"--{name.rstrip('_').replace('_', '-')}",
            dest=f"config.{name}",
            type=parser_fn,
            default=value,
            metavar="VALUE",
            help=text.replace("%", "%%"),
        )


def read_attributes(docstring: str) -> dict[str, str]:
    """Returns the descriptions in the section `Attributes:` of a docstring."""
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def value_parser(annotation: Any) -> Callable[[str], Any] | None:
    """Returns the function that parses the values of a field; None if there is none."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    if int in members and str in members:
        return parse_size
    parsers: dict[Any, Callable[[str], Any]] = {
        float: float,
        int: int,
        bool: parse_bool,
        str: str,
        tuple[int, ...]: parse_ints,
        tuple[str, ...]: parse_names,
    }
    return next((parsers[x] for x in parsers if x in members), None)


def parse_size(text: str) -> int | str:
    """Parses an int or "auto"."""
    return text if text == "auto" else parse_count(text)


def parse_bool(text: str) -> bool:
    """Parses "true" or "false"."""
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"must be true or false, got {text}")
    return text.lower() == "true"


def parse_ints(text: str) -> tuple[int, ...]:
    """Parses ints, separated by commas."""
    return tuple(parse_count(x) for x in text.split(","))


def parse_names(text: str) -> tuple[str, ...]:
    """Parses names, separated by commas."""
    return tuple(text.split(","))


def train_agent(agent_class: Any, config: Any, options: Namespace) -> Iterable[Any]:
    """Trains an agent with `run`, and returns its last evaluation."""
    values = {x: y for x, y in vars(options).items() if x.startswith("config.")}
    config = config.replace(**{x.removeprefix("config."): values[x] for x in values})
    if not options.no_cache:
        keep_programs()
    gamma = config.gamma if options.normalize_rewards else None
    env, eval_env = make_training_env(options, gamma), None
    if options.evaluate_every and is_host_env(options):
        eval_env = make_training_env(options, gamma)
    name = f"{agent_class.__name__}-{options.env}".replace(":", "-").lower()
    key = jax.random.key(options.seed)
    if options.num_seeds:
        key = jax.random.split(key, options.num_seeds)
    _, evaluation = run(
        agent_class(env, config, mesh=make_mesh(options.devices)),
        key,
        folder=options.folder or Path("runs", name),
        evaluate_every=options.evaluate_every,
        num_eval_episodes=options.num_eval_episodes,
        target_return=options.target_return,
        resume=options.resume,
        eval_env=eval_env,
    )
    for host_env in (env, eval_env) if is_host_env(options) else ():
        if host_env is not None:
            host_env.close()  # MuJoCo prints errors about a window at exit
    if not options.num_seeds:
        return (evaluation,)
    returns: Any = np.asarray(evaluation.returns.mean)
    is_finite: Any = np.isfinite(returns)
    over_seeds = moments(returns, is_finite, xp=np)
    return (f"return {over_seeds}, {plural(options.num_seeds, 'seed')}",)


def make_training_env(options: Namespace, gamma: float | None) -> Any:
    """Makes the environments, with normalized rewards unless `gamma` is None."""
    env = make_env(options, options.num_envs, is_rendered=True)
    if gamma is None:
        return env
    if has_agents(env):
        raise ValueError(
            f"ENV must have a single agent with --normalize-rewards, got {options.env}."
        )
    if is_host_env(options):
        return envs.NormalizeHostEnv(env, gamma=gamma, only=())
    return envs.NormalizeReward(env, gamma=gamma)


def keep_programs() -> None:
    """Keeps compiled programs in `~/.cache/rollout`: the next run starts faster.

    `XDG_CACHE_HOME` replaces `~/.cache`. If `JAX_COMPILATION_CACHE_DIR` is set, JAX
    keeps programs there.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rollout")
    jax.config.update("jax_compilation_cache_dir", str(folder.expanduser()))
    # Also keep small programs: there are many before the first update.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def make_mesh(devices: str) -> jax.sharding.Mesh | None:
    """Makes a mesh of the first devices, or of all; None for one device."""
    num_devices = jax.device_count()
    if devices != "all":
        if not devices.isdigit() or not 1 <= int(devices) <= num_devices:
            raise ValueError(
                f"`--devices` must be all, or from 1 to {num_devices}, the number of "
                f"devices that jax has, got {devices}. On a CPU, set the environment "
                "variable JAX_NUM_CPU_DEVICES to have more."
            )
        num_devices = int(devices)
    if num_devices == 1:
        return None
    return jax.make_mesh(
        (num_devices,), ("lanes",), devices=jax.devices()[:num_devices]
    )
