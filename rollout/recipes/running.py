"""`run` trains with logs, evaluations and checkpoints; `load` reads the result.

agent = PPO(rollout.envs.make_vec("CartPole-v1", num_envs=64), Config())
run(agent, jax.random.key(0), folder="runs/cartpole", evaluate_every=50_000)
agent, state = load("runs/cartpole")
action = agent.predict(state.params, obs)
"""

import csv
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

import rollout
from rollout import checkpoint, envs
from rollout.envs import spaces
from rollout.envs.spaces import EnvSpec, env_spec
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers.running_stats import prior
from rollout.training import make_collector

SETTINGS, METRICS, EVALUATIONS = "agent.json", "metrics.csv", "evaluations.csv"
NUM_CHUNKS = 20  # parts of a training without `evaluate_every`


class Progress(NamedTuple):
    """Argument of the callback of `run`, after each part of the training."""

    steps: int  # environment steps so far
    state: Any  # `TrainState` of the agent
    metrics: dict[str, np.ndarray]  # `[n]`, of the updates since the last call
    evaluation: rollout.stats.CollectStats | None


class LoadedState(NamedTuple):
    """Result of `load`: the parameters for `predict`."""

    params: ArrayTree


def run(
    agent: Any,
    key: chex.PRNGKey,
    *,
    folder: str | Path,
    evaluate_every: int | None = None,
    num_eval_episodes: int = 100,
    target_return: float | None = None,
    resume: bool = False,
    callback: Callable[[Progress], bool | None] | None = None,
    eval_env: Any = None,
) -> tuple[Any, rollout.stats.CollectStats]:
    """Trains an agent, and writes logs, evaluations and checkpoints to a folder.

    The folder has:

    - `agent.json`: class, config and spaces of the agent, for `load`;
    - `metrics.csv`: a row per update, and `evaluations.csv`: a row per evaluation;
    - `best` and `last`: parameters of the best evaluation and of the last update, for
      `load`, and `resume`: the whole state;
    - `curve.png`, and `agent.gif` if the environment can be drawn;
    - event files for TensorBoard, if the package `tensorboard` is installed.

    A run that was killed and resumed gives the same files as an uninterrupted one, bit
    for bit in JAX environments, and in host environments that can save their state.

    Args:
        agent: an agent of `rollout.recipes`, or one with the same methods.
        key: one typed key: the source of all randomness.
        folder: folder of this run; it must not have another run.
        evaluate_every: environment steps between evaluations, rounded up to whole
            updates; None evaluates once, at the end.
        num_eval_episodes: episodes per evaluation, at least 1.
        target_return: stops the training once the mean return of an evaluation is at
            least this; None trains for `config.num_updates` updates.
        resume: continues the run in `folder`, or starts it if there is none. Settings
            must be equal, except `num_updates`. If the learning rate is annealed, it
            follows the schedule of the new `num_updates`.
        callback: called with a `Progress` after each evaluation, and 20 times without
            `evaluate_every`. The training stops if it returns False.
        eval_env: host environments for evaluations during the training. JAX
            environments need none.

    Returns:
        The last `TrainState`, and the statistics of the last evaluation.

    Raises:
        ValueError: if `folder` has a run and `resume` is False; if `resume` is True and
            a setting or a file does not fit the run.
    """
    folder = Path(folder).expanduser()
    settings = describe(agent) | {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "evaluate_every": evaluate_every,
        "num_eval_episodes": num_eval_episodes,
    }
    is_host = agent.collector.is_host
    if is_host and eval_env is None and evaluate_every is not None:
        raise ValueError(
            "`eval_env` must be given with `evaluate_every` for host environments: an "
            "evaluation would end the episodes of the training. Make it as `env`."
        )
    check_folder(folder, settings, resume)
    train_key, eval_key = jax.random.split(key)
    state = agent.init(train_key)
    num_done, best_return = 0, -np.inf
    if checkpoint.steps(folder / "resume"):
        state, best_return = restore(agent, state, folder / "resume")
        num_done = int(state.num_updates)
    first_step = int(agent.env_steps(num_done)) if num_done else 0
    trim_table(folder / METRICS, first_step, num_done)
    trim_table(folder / EVALUATIONS, first_step)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
    train = agent.train if is_host else jax.jit(agent.train, static_argnums=1)
    num_updates, env = agent.config.num_updates, agent.env
    chunk = chunk_size(agent, evaluate_every)
    writer, evaluation, start = TensorBoardWriter(folder), None, time.monotonic()
    while num_done < num_updates:
        size = min(chunk - num_done % chunk, num_updates - num_done)
        state, metrics = train(state, size)
        metrics = {name: np.asarray(x) for name, x in sorted(metrics.items())}
        counts = agent.env_steps(num_done + np.arange(1, size + 1))
        append_rows(folder / METRICS, {"steps": counts, **metrics})
        num_done, steps = num_done + size, int(counts[-1])
        evaluation, is_last = None, num_done == num_updates
        if evaluate_every is not None or is_last:
            evaluation = evaluate(
                agent,
                state,
                jax.random.fold_in(eval_key, num_done),
                num_eval_episodes,
                eval_env or env,
            )
            mean = float(evaluation.returns.mean)
            append_rows(folder / EVALUATIONS, evaluation_row(steps, evaluation))
            if not mean <= best_return:
                best_return = mean
                save_policy(agent, state, folder / "best", num_done)
        save_policy(agent, state, folder / "last", num_done)
        tree = resumable(agent, state, best_return)
        checkpoint.save(folder / "resume", tree, step=num_done)
        for i, count in enumerate(counts):
            writer.write(int(count), {name: x[i] for name, x in metrics.items()})
        speed = (steps - first_step) / (time.monotonic() - start)
        print(progress_line(steps, metrics, evaluation, speed), flush=True)
        is_solved = (
            target_return is not None
            and evaluation is not None
            and float(evaluation.returns.mean) >= target_return
        )
        progress = Progress(steps, state, metrics, evaluation)
        if (callback is not None and callback(progress) is False) or is_solved:
            break
    if evaluation is None:
        final_key = jax.random.fold_in(eval_key, num_done)
        evaluation = evaluate(
            agent, state, final_key, num_eval_episodes, eval_env or env
        )
    draw_curve(folder)
    draw_gif(agent, state, eval_key, eval_env or env, folder / "agent.gif")
    return state, evaluation


def load(
    folder: str | Path,
    *,
    name: str = "best",
    agent_class: type | None = None,
    **fields: Any,
) -> tuple[Any, LoadedState]:
    """Loads an agent of `run`, to predict without an environment.

        agent, state = load("runs/cartpole")
        action = agent.predict(state.params, obs)

    Observations are normalized as in the training. Nothing in the folder is executed.

    Args:
        folder: folder of the run.
        name: "best" or "last", the checkpoint.
        agent_class: class of the agent, if it is not of `rollout.recipes`.
        **fields: other fields of the agent, such as `network`, if they were not the
            defaults.

    Returns:
        The agent, and a state with `params`.

    Raises:
        FileNotFoundError: if the folder has no run, or no such checkpoint.
        ValueError: if the agent has a class or fields that must be passed.
    """
    folder = Path(folder).expanduser()
    settings = json.loads((folder / SETTINGS).read_text())
    agent_class = agent_class or class_of(settings["agent"])
    if missing := sorted(settings["fields"].keys() - fields.keys()):
        field = settings["fields"][missing[0]]
        raise ValueError(
            f"`{missing[0]}` must be passed to `load`: the agent in {folder} has a "
            f"{field}, and `run` saves no code."
        )
    config_class = type(agent_class.__dataclass_fields__["config"].default)
    config = config_class(
        **{
            field: tuple(value) if isinstance(value, list) else value
            for field, value in settings["config"].items()
            if not isinstance(
                value, dict
            )  # a schedule, of which only the name is saved
        }
    )
    spec = EnvSpec(
        space_from_json(settings["observation_space"]),
        space_from_json(settings["action_space"]),
        settings["num_envs"],
    )
    agent = agent_class(env=spec, config=config, **fields)
    key = jax.random.key(0)
    obs = jax.vmap(spec.observation_space.sample)(key[None])
    params = jax.eval_shape(agent.init_learner, key, obs).params
    normalizer, statistics = settings["normalizer"], None
    if normalizer is not None:
        raw_space = space_from_json(normalizer["observation_space"])
        raw = jax.vmap(raw_space.sample)(key[None])
        statistics = prior(raw, space=raw_space, only=normalizer["only"])
    like: Any = {"params": params, "statistics": statistics}
    tree: Any = checkpoint.restore(folder / name, like)
    if normalizer is not None:
        statistics, epsilon = tree["statistics"], normalizer["epsilon"]
        spec = dataclasses.replace(
            spec, normalize_fn=lambda obs: statistics.normalize(obs, epsilon)
        )
    return agent.replace(env=spec), LoadedState(tree["params"])


def describe(agent: Any) -> dict[str, Any]:
    """Returns what `load` needs to build the agent, as JSON."""
    kind, normalizer = type(agent), obs_normalizer(agent.env)
    others = {
        field.name: type(getattr(agent, field.name)).__qualname__
        for field in dataclasses.fields(agent)
        if field.name not in ("env", "config")
        and getattr(agent, field.name) != field.default
    }
    config = {
        field.name: config_value(getattr(agent.config, field.name))
        for field in dataclasses.fields(agent.config)
    }
    settings = {
        "agent": f"{kind.__module__}:{kind.__qualname__}",
        "rollout": rollout.__version__,
        "config": config,
        "fields": others,
        "observation_space": space_to_json(agent.spec.observation_space),
        "action_space": space_to_json(agent.spec.action_space),
        "num_envs": agent.spec.num_envs,
        "normalizer": normalizer
        and {
            "observation_space": space_to_json(
                env_spec(normalizer.env).observation_space
            ),
            "only": normalizer.only,
            "epsilon": normalizer.epsilon,
        },
    }
    return json.loads(json.dumps(settings))


def obs_normalizer(env: Any) -> Any:
    """Returns the wrapper of an environment that normalizes observations, or None."""
    while env is not None:
        if isinstance(env, envs.NormalizeObs | envs.NormalizeHost):
            return env
        env = getattr(env, "env", None)
    return None


def config_value(value: Any) -> Any:
    """Returns a hyperparameter as JSON; of a function only the name."""
    if callable(value):
        return {"function": f"{value.__module__}.{value.__qualname__}"}
    return np.asarray(value).item() if isinstance(value, jax.Array) else value


def class_of(name: str) -> Any:
    """Returns the class of an agent of this package."""
    module, _, kind = name.partition(":")
    # A file must not decide which module is imported.
    if not re.fullmatch(r"rollout\.recipes\.[a-z0-9_]+", module):
        raise ValueError(
            f"`agent_class` must be passed to `load`: the agent is a {name}, which is "
            "not of `rollout.recipes`."
        )
    return getattr(importlib.import_module(module), kind)


def space_to_json(space: AnySpace) -> Any:
    """Describes a space, None if its structure is neither dict nor tuple."""
    match space:
        case spaces.Discrete():
            return {"Discrete": [space.n, str(space.dtype), space.start]}
        case spaces.MultiDiscrete():
            return {"MultiDiscrete": [space.nvec, str(space.dtype), space.start]}
        case spaces.MultiBinary():
            return {"MultiBinary": [space.shape, str(space.dtype)]}
        case spaces.Box():
            low, high = (np.asarray(x, float).tolist() for x in space.bounds)
            return {"Box": [low, high, space.shape, str(space.dtype)]}
        case spaces.Repeated():
            return {"Repeated": [space_to_json(space.space), space.num]}
        case spaces.Dict():
            parts = space.spaces.items()
            return {"Dict": {name: space_to_json(part) for name, part in parts}}
        case spaces.Tuple():
            return {"Tuple": [space_to_json(part) for part in space.spaces]}
    return None


def space_from_json(data: Any) -> AnySpace:
    """Inverts `space_to_json`."""
    if data is None:
        raise ValueError(
            "`folder` must have a run with spaces of dicts and tuples only."
        )
    ((kind, args),) = data.items()
    match kind:
        case "Box":
            low, high, shape, dtype = args
            bounds = np.float64(low), np.float64(high)
            return spaces.Box(*bounds, tuple(shape), np.dtype(dtype))
        case "Dict":
            return spaces.Dict({name: space_from_json(x) for name, x in args.items()})
        case "Tuple":
            return spaces.Tuple(tuple(map(space_from_json, args)))
        case "Repeated":
            return spaces.Repeated(space_from_json(args[0]), args[1])
    return getattr(spaces, kind)(*args)


def check_folder(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Raises unless the folder is free, or has a run of the same settings to resume."""
    files = (SETTINGS, METRICS, EVALUATIONS, "best", "last", "resume")
    if not any((folder / name).exists() for name in files):
        folder.mkdir(parents=True, exist_ok=True)
        return
    if not resume:
        raise ValueError(
            f"`folder` must be free, got {folder}, which has a run. Pass `resume=True` "
            "to continue it, or another folder."
        )
    if not (folder / SETTINGS).exists():
        raise ValueError(f"`folder` must have {SETTINGS} to resume, got {folder}.")
    saved = flat(json.loads((folder / SETTINGS).read_text()))
    for name, value in flat(settings).items():
        if name not in ("config.num_updates", "rollout") and value != saved.get(name):
            option = name.removeprefix("config.")
            raise ValueError(
                f"`{option}` must be {saved.get(name)!r} to resume the run in "
                f"{folder}, got {value!r}."
            )


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Puts the settings of the config beside the others, by their dotted names."""
    config = {f"config.{name}": value for name, value in settings["config"].items()}
    return {name: x for name, x in settings.items() if name != "config"} | config


def chunk_size(agent: Any, evaluate_every: int | None) -> int:
    """Returns how many updates to run at once."""
    if evaluate_every is None:
        return -(-agent.config.num_updates // NUM_CHUNKS)
    steps_per_update = agent.env_steps(2) - agent.env_steps(1)
    return max(1, -(-evaluate_every // steps_per_update))


def evaluate(
    agent: Any, state: Any, key: chex.PRNGKey, num_episodes: int, env: Any
) -> rollout.stats.CollectStats:
    """Evaluates `eval_policy`, with the statistics of the training fixed."""
    collector = make_collector(env, agent.eval_policy).freeze(state.carry)
    return rollout.evaluate(collector, key, state.params, num_episodes)


def save_policy(agent: Any, state: Any, path: Path, step: int) -> None:
    """Saves what `load` reads, unless a killed process has saved the same already."""
    normalizer = obs_normalizer(agent.freeze(state).env)
    statistics = None
    if normalizer is not None:
        statistics = normalizer.statistics
        statistics = statistics[0] if isinstance(statistics, tuple) else statistics
    if max(checkpoint.steps(path), default=-1) < step:
        tree = {"params": state.params, "statistics": statistics}
        checkpoint.save(path, tree, step=step)


def resumable(agent: Any, state: Any, best_return: float) -> dict[str, Any]:
    """Returns what `restore` needs, with the states of host environments."""
    collector = agent.collector
    host = collector.save(state.carry) if collector.is_host else []
    return {"state": state, "host": host, "best_return": np.float64(best_return)}


def restore(agent: Any, state: Any, path: Path) -> tuple[Any, float]:
    """Restores the state of a run, and its best return."""
    tree: Any = checkpoint.restore(path, resumable(agent, state, 0.0))
    state = tree["state"]
    if agent.collector.is_host:
        carry = agent.collector.restore(state.carry, tree["host"])
        state = state.replace(carry=carry)
    return state, float(tree["best_return"])


def trim_table(path: Path, max_steps: int, num_rows: int | None = None) -> None:
    """Checks a table, and removes the rows after a checkpoint.

    Args:
        path: table whose first column is the number of environment steps.
        max_steps: environment steps at the checkpoint.
        num_rows: how many rows there must be up to the checkpoint; None for any number.
    """
    if not path.exists() and not num_rows:
        return
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    valid = lines[:1]
    for line in lines[1:]:
        steps = line.partition(b",")[0]
        if steps.isdigit() and int(steps) <= max_steps and line.endswith(b"\n"):
            valid.append(line)
    is_header = bool(lines) and lines[0].startswith(b"steps,")
    has_rows = num_rows is None or len(valid) == num_rows + 1
    is_intact = lines[: len(valid)] == valid and b"\r" not in b"".join(valid)
    if (lines or num_rows) and not (is_header and has_rows and is_intact):
        raise ValueError(
            f"{path} must have the rows of the run up to {max_steps:,} steps, as `run` "
            "wrote them. Restore the file, or start in another folder."
        )
    path.write_bytes(b"".join(valid))


def append_rows(path: Path, columns: dict[str, Any]) -> None:
    """Appends rows to a CSV file, after a header if it is new."""
    is_new = not path.exists() or not path.stat().st_size
    rows = zip(*(np.atleast_1d(x).tolist() for x in columns.values()), strict=True)
    with path.open("a", newline="") as file:
        if is_new:
            file.write(",".join(columns) + "\n")
        for row in rows:
            file.write(
                ",".join(f"{x:.9g}" if type(x) is float else str(x) for x in row)
            )
            file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def evaluation_row(steps: int, stats: rollout.stats.CollectStats) -> dict[str, Any]:
    """Returns a row of the table of evaluations."""
    returns = stats.returns
    return {
        "steps": steps,
        "return_mean": float(returns.mean),
        "return_ci_low": float(returns.ci_low),
        "return_ci_high": float(returns.ci_high),
        "length_mean": float(stats.lengths.mean),
    }


def progress_line(
    steps: int, metrics: dict[str, Any], evaluation: Any, speed: float
) -> str:
    """Formats the line that is printed after each part of a training."""
    line = f"{steps:>12,} steps, return {metrics['return_mean'][-1]:.6g}"
    if evaluation is not None:
        line += f", evaluation {float(evaluation.returns.mean):.6g}"
    return f"{line}, {speed:,.0f} steps/s"


class TensorBoardWriter:
    """Writes scalars for TensorBoard, or nothing if the package is not installed."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            module = "tensorboard.summary.writer.event_file_writer"
            self._writer = importlib.import_module(module).EventFileWriter(str(folder))

    def write(self, steps: int, scalars: dict[str, Any]) -> None:
        """Writes one value of each scalar."""
        if self._writer is None:
            return
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        event = proto.Event(step=steps, wall_time=time.time())
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._writer.add_event(event)
        self._writer.flush()


def draw_curve(folder: Path) -> None:
    """Draws the mean return over the environment steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    for name, label in ((METRICS, "training"), (EVALUATIONS, "evaluation")):
        with (folder / name).open() as file:
            rows = list(csv.DictReader(file))
        steps = [int(row["steps"]) for row in rows]
        returns = [float(row["return_mean"]) for row in rows]
        style = "-" if name == METRICS else "o"
        axes.plot(steps, returns, style, label=label)
    axes.set(xlabel="environment steps", ylabel="mean return")
    axes.legend()
    figure.savefig(folder / "curve.png")
    plt.close(figure)


def draw_gif(agent: Any, state: Any, key: chex.PRNGKey, env: Any, path: Path) -> None:
    """Draws an episode of `eval_policy`, if the environment can be drawn."""
    collector = make_collector(env, agent.eval_policy).freeze(state.carry)
    try:
        rollout.record_gif(collector, key, state.params, path, max_episode_steps=200)
    except Exception as error:  # an environment may raise anything
        print(f"no GIF: {error}")
