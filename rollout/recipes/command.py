"""The command line of the agents: `python -m rollout.recipes.ppo CartPole-v1`."""

import argparse
import dataclasses
import functools
import os
import runpy
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rollout import envs
from rollout.envs.multi_agent import has_agents
from rollout.recipes.running import run


def main(agent_class: Any, config: Any, num_envs: int) -> None:
    """Trains an agent with the options of the command line.

    Args:
        agent_class: class of the agent, with the fields `env` and `config`.
        config: default hyperparameters. Every number and bool becomes an option.
        num_envs: default number of parallel environments.
    """
    parser = argparse.ArgumentParser(
        description=(agent_class.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("env_id", help="such as CartPole-v1 or gymnasium:CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=num_envs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--normalize-rewards", action="store_true", help="see `NormalizeReward`"
    )
    parser.add_argument("--folder", help="default: runs/AGENT-ENVIRONMENT")
    parser.add_argument(
        "--resume", action="store_true", help="continue the folder's run"
    )
    parser.add_argument("--evaluate-every", type=int, help="environment steps")
    parser.add_argument("--num-eval-episodes", type=int, default=100)
    parser.add_argument("--target-return", type=float, help="stop at this mean return")
    parser.add_argument(
        "--no-cache", action="store_true", help="do not keep compiled programs"
    )
    parser.add_argument(
        "--devices", default="1", help="number of devices, or all; default: 1"
    )
    numbers = number_fields(config)
    for name, number_type in numbers.items():
        default = getattr(config, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=number_type,
            default=default,
            help=f"default: {default}",
        )
    options = parser.parse_args()
    config = config.replace(**{name: getattr(options, name) for name in numbers})
    if not options.no_cache:
        keep_programs()
    try:
        if not 0 <= options.seed < 2**32:  # `jax.random.key` would truncate it
            raise ValueError(
                f"`--seed` must be from 0 to 2^32 - 1, got {options.seed}."
            )
        gamma = config.gamma if options.normalize_rewards else None
        make = functools.partial(make_env, options.env_id, gamma=gamma)
        env, eval_env = make(options.num_envs), None
        if options.evaluate_every and not isinstance(env, envs.types.VectorEnv):
            eval_env = make(options.num_envs)
        name = f"{agent_class.__name__}-{options.env_id}".replace(":", "-").lower()
        _, evaluation = run(
            agent_class(env, config, mesh=make_mesh(options.devices)),
            jax.random.key(options.seed),
            folder=options.folder or Path("runs", name),
            evaluate_every=options.evaluate_every,
            num_eval_episodes=options.num_eval_episodes,
            target_return=options.target_return,
            resume=options.resume,
            eval_env=eval_env,
        )
    except (ValueError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(evaluation)


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


def number_fields(config: Any) -> dict[str, Callable[[str], Any]]:
    """Returns the hyperparameters that are numbers or bools, and their parsers."""
    fields: dict[str, Callable[[str], Any]] = {}
    for name, annotation in typing.get_type_hints(type(config)).items():
        types = typing.get_args(annotation) or (annotation,)
        number_type = next((x for x in (float, int) if x in types), None)
        if number_type is not None:
            fields[name] = parse_size if str in types else number_type
        elif annotation is bool:
            fields[name] = parse_bool
    return {
        x.name: fields[x.name] for x in dataclasses.fields(config) if x.name in fields
    }


def parse_size(text: str) -> int | str:
    """Parses an int or "auto"."""
    return text if text == "auto" else int(text)


def parse_bool(text: str) -> bool:
    """Parses "true" or "false"."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return text.lower() == "true"


def load_function(text: str) -> Callable[[], Any]:
    """Loads a function from a file, given as `file.py:function`."""
    path, _, name = text.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))
    try:
        return runpy.run_path(path)[name]
    except (OSError, KeyError) as error:
        raise ValueError(
            "`env_id` must be an id or file.py:function, the name of a function in a "
            f"file, got {text}: {error}"
        ) from error


def make_env(env_id: str, num_envs: int, *, gamma: float | None = None) -> Any:
    """Makes parallel environments, optionally with normalized rewards.

    Args:
        env_id: id of an environment, for example `"brax:hopper"` or
            `"gymnasium:CartPole-v1"`; or `file.py:function`, the name of a function
            without arguments that makes a single environment.
        num_envs: number of parallel environments.
        gamma: discount for the normalization of rewards; None disables it.
    """
    suite, _, name = env_id.partition(":")
    if suite == "gymnasium":
        import gymnasium

        make = functools.partial(gymnasium.make, name, render_mode="rgb_array")
        make = load_function(name) if ".py:" in name else make
        info = make().reset(seed=0)[1]
        masks = {x: info[x] for x in ("action_mask",) if x in info} or None
        host_env: Any = envs.from_gymnasium(make, num_envs, observe_info=masks)
        if gamma is None:
            return host_env
        return envs.NormalizeHostEnv(host_env, gamma=gamma, only=())
    env = load_function(env_id)() if ".py:" in env_id else envs.make(env_id)
    if has_agents(env):
        raise ValueError(f"`env_id` must have a single agent, got {env_id}.")
    env = envs.vectorize(env, num_envs)
    if gamma is None:
        return env
    return envs.NormalizeReward(env, gamma=gamma)
