"""`run` trains with logs, evaluations and checkpoints; `load` loads the agent.

agent = PPO(rollout.envs.make_vec("CartPole-v1", num_envs=64), Config())
run(agent, jax.random.key(0), folder="runs/cartpole", evaluate_every=50_000)
agent, state = load("runs/cartpole")
action = agent.predict(state.params, obs)
"""

import csv
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from jax.experimental import multihost_utils

import rollout
from rollout import checkpoint
from rollout.base import checks
from rollout.envs import spaces
from rollout.envs.spaces import EnvSpec
from rollout.envs.types import AnySpace, ArrayTree, wrapped_env

NUM_CHUNKS = 20  # parts of a training run without `evaluate_every`


class Folder(NamedTuple):
    """Paths of the files of a run."""

    folder: Path

    settings = property(lambda self: self.folder / "agent.json")
    metrics = property(lambda self: self.folder / "metrics.csv")
    evaluations = property(lambda self: self.folder / "evaluations.csv")
    best = property(lambda self: self.folder / "best")
    last = property(lambda self: self.folder / "last")
    resume = property(lambda self: self.folder / "resume")

    def any_exist(self) -> bool:
        """Returns whether the folder contains a run."""
        tables = self.settings, self.metrics, self.evaluations
        return any(x.exists() for x in (*tables, self.best, self.last, self.resume))


class Progress(NamedTuple):
    """Argument of the callback of `run`, which runs after each part of the training.

    Attributes:
        steps: environment steps so far.
        state: the training state of the agent.
        metrics: metrics of the n updates since the previous call, `[n]` by name. The
            steps after each of these updates are
            `agent.env_steps(int(state.num_updates) - n + np.arange(1, n + 1))`.
        evaluation: the evaluation after the last update, or None.
    """

    steps: int
    state: Any
    metrics: dict[str, np.ndarray]  # [n]
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
    """Trains an agent and writes logs, evaluations and checkpoints to a folder.

    The folder contains:

    - `agent.json`: class, config and spaces of the agent, for `load`;
    - `metrics.csv`: a row per update, and `evaluations.csv`: a row per evaluation;
    - `best` and `last`: parameters of the best evaluation and of the last update, for
      `load`;
    - `resume`: the whole training state, to continue the run;
    - `curve.png`, and `agent.gif` if the environment can be rendered;
    - event files for TensorBoard, if the package `tensorboard` is installed.

    Evaluations run `agent.eval_policy`, which takes the most likely action, so their
    returns differ from returns during training.

    A run that was killed and resumed writes the same files as an uninterrupted run, bit
    for bit in JAX environments and in host environments that can save their state. Each
    resume adds one event file. A run that the callback stopped can also be resumed. The
    files do not depend on the devices: a run can be resumed on another number of
    devices, with the same settings but another `mesh`.

    Every process of `jax.distributed` makes the same call, with the same `folder` on a
    shared file system. The first process writes the files.

    Args:
        agent: an agent of `rollout.recipes`, or an agent with the same methods.
        key: one typed key: the source of all randomness.
        folder: folder of this run; it must not contain another run.
        evaluate_every: environment steps between evaluations, rounded up to whole
            updates; None evaluates once, at the end.
        num_eval_episodes: episodes per evaluation, at least 1.
        target_return: mean return of an evaluation at which the training stops; None
            trains for `config.num_updates` updates.
        resume: whether to continue the run in `folder`. If there is none, a new run
            starts. `config.num_updates` is the total, including the updates before.
            Settings must be equal, except `num_updates` and `target_return`.
            Schedules are compared by name, not by value. If the learning rate is
            annealed, it follows the schedule of the new `num_updates`.
        callback: function called with a `Progress` after each evaluation, or 20 times
            without `evaluate_every`. The training stops if it returns False.
        eval_env: separate environments for evaluations during the training, required
            for host environments.

    Returns:
        The last `TrainState`, and the statistics of the last evaluation.

    Raises:
        ValueError: if `folder` contains a run and `resume` is False, or if `resume` is
            True and a setting or a file does not match the run.
    """
    if agent.collector.is_host:
        check_eval_env(agent.env, eval_env, evaluate_every)
    checks.check_key(key)
    num_eval_episodes = checks.check_int("num_eval_episodes", num_eval_episodes)
    if evaluate_every is not None:
        evaluate_every = checks.check_int("evaluate_every", evaluate_every, most=None)
    env = agent.env if eval_env is None else eval_env
    eval_collector = agent.make_collector(env, agent.eval_policy)
    files = Folder(Path(folder).expanduser())
    settings = describe(agent) | {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "evaluate_every": evaluate_every,
        "num_eval_episodes": num_eval_episodes,
    }
    check_folder(files, settings, resume)
    train_key, eval_key = jax.random.split(key)
    state, best_return, last_return = restore(
        agent, agent.init(train_key), files.resume
    )
    num_resumed, num_updates = int(state.num_updates), agent.config.num_updates
    num_done = num_resumed
    trim_tables(agent, num_done, files)

    def evaluate(state: Any) -> rollout.stats.CollectStats:
        eval_step_key = jax.random.fold_in(eval_key, state.num_updates)
        return rollout.evaluate(
            eval_collector, state.params, eval_step_key, num_eval_episodes
        )

    is_host, is_writer = agent.collector.is_host, jax.process_index() == 0
    train = agent.train if is_host else jax.jit(agent.train, static_argnums=1)
    writer = TensorBoardWriter(files.folder)
    evaluation = None
    is_stopped = target_return is not None and last_return >= target_return
    while num_done < num_updates and not is_stopped:
        size = chunk_size(agent, evaluate_every, num_done)
        state, steps, metrics, speed = train_chunk(agent, train, state, num_done, size)
        num_done, evaluation = num_done + size, None
        if is_writer:
            # Write the settings after an update, so that a failed first update leaves
            # no files.
            files.settings.write_text(json.dumps(settings, indent=1) + "\n")
            append_rows(files.metrics, {"steps": steps, **metrics})
        if evaluate_every is not None or num_done == num_updates:
            evaluation = evaluate(state)
            last_return = float(evaluation.returns.mean)
            if is_writer:
                append_rows(files.evaluations, evaluation_row(steps[-1], evaluation))
            is_first = not checkpoint.steps(files.best)
            if is_first or last_return > best_return:  # False for NaN
                save_policy(agent, state, files.best, num_done)
            best_return = float(np.fmax(best_return, last_return))
            is_stopped = target_return is not None and last_return >= target_return
        save_policy(agent, state, files.last, num_done)
        tree = resume_tree(agent, state, best_return, last_return)
        checkpoint.save(files.resume, tree, step=num_done)
        if is_writer:
            writer.write(steps, metrics, evaluation)
            print(progress_line(steps[-1], speed, metrics, evaluation), flush=True)
        progress = Progress(int(steps[-1]), state, metrics, evaluation)
        result = None if callback is None else callback(progress)
        # The callback may return `np.bool_`, which is not the object `False`.
        is_stopped |= result is not None and not result
    if evaluation is None:  # stopped by the callback, or resumed at the end
        evaluation = evaluate(state)
    if num_resumed >= num_updates:
        print(
            f"no training: the run in {files.folder} has {num_resumed} updates, and "
            f"`num_updates`, which includes them, is {num_updates}"
        )
    if is_writer:
        draw_curve(files, agent)
        draw_gif(agent, state, eval_key, eval_env, files.folder / "agent.gif")
    return state, evaluation


def load(
    folder: str | Path,
    *,
    name: str = "best",
    agent_class: Any = None,
    **fields: Any,
) -> tuple[Any, LoadedState]:
    """Loads an agent that `run` saved, to predict without an environment.

        agent, state = load("runs/cartpole")
        action = agent.predict(state.params, obs)

    The parameters include the statistics of normalized observations. No code in the
    folder is executed.

    Args:
        folder: folder of the run.
        name: checkpoint to load, "best" or "last".
        agent_class: class of the agent, if it is not part of `rollout.recipes`.
        **fields: values of all fields that differ from the defaults, such as `network`,
            except `env` and `config`.

    Returns:
        The agent, and a state with `params`.

    Raises:
        FileNotFoundError: if the folder contains no run, or no such checkpoint.
        ValueError: if the agent has a class or fields that must be passed.
    """
    folder = Path(folder).expanduser()
    if not Folder(folder).settings.exists():
        raise FileNotFoundError(f"`folder` must have a run of `run`, got {folder}.")
    settings = json.loads(Folder(folder).settings.read_text())
    agent_class = agent_class or class_of(settings["agent"])
    # `predict` needs no optimizer.
    if missing := sorted(settings["fields"].keys() - fields.keys() - {"optimizer"}):
        field = settings["fields"][missing[0]]
        raise ValueError(
            f"`{missing[0]}` must be passed to `load`: the agent in {folder} has a "
            f"{field}, and `run` does not save code."
        )
    config_class = type(agent_class.__dataclass_fields__["config"].default)
    # Skip dicts: they are the names of schedules, whose code is not saved.
    numbers = {x: y for x, y in settings["config"].items() if not isinstance(y, dict)}
    names = {field.name for field in dataclasses.fields(config_class)}
    if unknown := sorted(settings["config"].keys() - names):
        raise ValueError(
            f"`agent_class` must be a class whose default `config` has a field "
            f"`{unknown[0]}`, got {agent_class.__name__}: the agent in {folder} was "
            "trained with another `Config`. Pass a subclass with that default."
        )
    lists = {x: tuple(y) for x, y in numbers.items() if isinstance(y, list)}
    config = config_class(**numbers | lists)
    spec = EnvSpec(
        spaces.from_json(settings["observation_space"]),
        spaces.from_json(settings["action_space"]),
        settings["num_envs"],
    )
    agent = agent_class(env=spec, config=config, **fields)
    obs = shape_of_obs(spec.observation_space, spec.num_envs)
    init = lambda obs: agent.init_learner(jax.random.key(0), obs)  # noqa: E731
    params = jax.eval_shape(init, obs).params
    restored: Any = checkpoint.restore(folder / name, {"params": params})
    return agent, LoadedState(restored["params"])


def shape_of_obs(space: AnySpace, num_envs: int) -> Any:
    """Returns the shapes and dtypes of observations, `[num_envs, ...]`."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    return jax.eval_shape(jax.vmap(space.sample), keys)


def describe(agent: Any) -> dict[str, Any]:
    """Returns the settings from which `load` builds the agent, as JSON."""
    fields = {
        x.name: type(vars(agent)[x.name]).__qualname__
        for x in dataclasses.fields(agent)
        if x.name not in ("env", "config", "mesh") and vars(agent)[x.name] != x.default
    }
    settings = {
        "agent": name_of(type(agent)),
        "rollout": rollout.__version__,
        "config": {
            name: config_value(value) for name, value in vars(agent.config).items()
        },
        "fields": fields,
        "observation_space": spaces.to_json(agent.spec.observation_space),
        "action_space": spaces.to_json(agent.spec.action_space),
        "num_envs": agent.spec.num_envs,
    }
    return json.loads(json.dumps(settings))


def check_eval_env(env: Any, eval_env: Any, evaluate_every: int | None) -> None:
    """Checks that evaluations do not step the host environments of the training."""
    if eval_env is None and evaluate_every is not None:
        raise ValueError(
            "`eval_env` must be given with `evaluate_every` for host environments: an "
            "evaluation would end the episodes of the training. Create it like `env`."
        )
    if unwrap_env(eval_env) is unwrap_env(env):
        raise ValueError(
            "`eval_env` must be separate from `agent.env`: an evaluation would end the "
            "episodes of the training. Create it like `env`."
        )


def unwrap_env(env: Any) -> Any:
    """Returns the environment inside all wrappers."""
    while (inner := wrapped_env(env)) is not None:
        env = inner
    return env


def config_value(value: Any) -> Any:
    """Returns a hyperparameter as JSON; functions are replaced by their names."""
    while isinstance(value, functools.partial):
        value = value.func
    if callable(value):
        # A callable object has the name of its class.
        named = value if hasattr(value, "__qualname__") else type(value)
        return {"function": f"{named.__module__}.{named.__qualname__}"}
    if isinstance(value, tuple | list):
        return [config_value(x) for x in value]
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return np.asarray(value).tolist() if is_array else value


def config_text(value: Any) -> str:
    """Formats a result of `config_value` for a message."""
    if isinstance(value, dict) and "function" in value:
        return f"the function {value['function'].replace('.<locals>', '')}"
    return repr(value)


def name_of(agent_class: type) -> str:
    """Returns the module and the name of a class, even if the module is `__main__`."""
    module = agent_class.__module__
    spec = getattr(sys.modules[module], "__spec__", None)
    return f"{spec.name if spec else module}:{agent_class.__qualname__}"


def class_of(name: str) -> Any:
    """Returns the class of an agent of this package."""
    module, _, class_name = name.partition(":")
    # A file must not decide which module is imported.
    if not re.fullmatch(r"rollout\.recipes\.[a-z0-9_]+", module):
        raise ValueError(
            f"`agent_class` must be passed to `load`: the agent is a {name}, which is "
            "not part of `rollout.recipes`."
        )
    return getattr(importlib.import_module(module), class_name)


def check_folder(files: Folder, settings: dict[str, Any], resume: bool) -> None:
    """Raises if the folder has a run, unless it can be resumed with these settings."""
    folder = files.folder
    if not files.any_exist():
        if resume and jax.process_index() == 0:
            print(f"no run in {folder}: a new run starts")
        folder.mkdir(parents=True, exist_ok=True)
        return
    if not resume:
        raise ValueError(
            f"`folder` must not contain a run, got {folder}. Pass `resume=True`, or "
            "--resume, to continue the run, or pass another folder."
        )
    if not files.settings.exists():
        raise ValueError(f"`folder` must have agent.json to resume, got {folder}.")
    saved = flatten_config(json.loads(files.settings.read_text()))
    for name, value in flatten_config(settings).items():
        if name not in ("config.num_updates", "rollout") and value != saved.get(name):
            option = name.removeprefix("config.")
            raise ValueError(
                f"`{option}` must be {config_text(saved.get(name))} to resume the run "
                f"in {folder}, got {config_text(value)}."
            )


def flatten_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Moves hyperparameters to the top level, with dotted names, `config.name`."""
    config = {f"config.{name}": value for name, value in settings["config"].items()}
    return {name: x for name, x in settings.items() if name != "config"} | config


def chunk_size(agent: Any, evaluate_every: int | None, num_done: int) -> int:
    """Returns how many updates to run at once after `num_done` updates."""
    num_updates = agent.config.num_updates
    size = -(-num_updates // NUM_CHUNKS)
    if evaluate_every is not None:
        steps_per_update = agent.env_steps(2) - agent.env_steps(1)
        size = max(1, -(-evaluate_every // steps_per_update))
    # Chunks end at the same updates in a resumed run.
    return min(size - num_done % size, num_updates - num_done)


def train_chunk(
    agent: Any, train_fn: Callable[..., Any], state: Any, num_done: int, size: int
) -> tuple[Any, np.ndarray, dict[str, np.ndarray], float]:
    """Runs `size` updates after `num_done` updates.

    Returns:
        The next state, the environment steps after each update, `[size]`, the metrics,
        `[size]` by name, and the environment steps per second.
    """
    start = time.monotonic()
    state, metrics = train_fn(state, size)
    metrics = {name: np.asarray(x) for name, x in sorted(metrics.items())}
    check_metrics(metrics, size)
    seconds = time.monotonic() - start
    steps = agent.env_steps(num_done + np.arange(1, size + 1))
    return state, steps, metrics, (steps[-1] - agent.env_steps(num_done)) / seconds


def save_policy(agent: Any, state: Any, path: Path, step: int) -> None:
    """Saves the checkpoint for `load`, unless a killed process already saved it."""
    if max(checkpoint.steps(path), default=-1) < step:
        checkpoint.save(path, {"params": state.params}, step=step)


def resume_tree(
    agent: Any, state: Any, best_return: float, last_return: float
) -> dict[str, Any]:
    """Returns the tree that `restore` reads, with the states of host environments."""
    collector = agent.collector
    host = collector.save(state.carry) if collector.is_host else []
    returns = np.array([best_return, last_return], np.float64)
    return {"state": state, "host": host, "returns": returns}


def restore(agent: Any, state: Any, path: Path) -> tuple[Any, float, float]:
    """Restores the state of a run, and the best and the last evaluation return."""
    if not checkpoint.steps(path):
        return state, -np.inf, -np.inf
    tree: Any = checkpoint.restore(path, resume_tree(agent, state, 0.0, 0.0))
    state = tree["state"]
    if agent.collector.is_host:
        carry = agent.collector.restore(state.carry, tree["host"])
        state = state.replace(carry=carry)
    best_return, last_return = tree["returns"].tolist()
    return state, best_return, last_return


def trim_tables(agent: Any, num_done: int, files: Folder) -> None:
    """Validates the tables and removes the rows after the checkpoint."""
    steps = agent.env_steps(np.arange(1, num_done + 1)).tolist()
    for path in (files.metrics, files.evaluations):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        last = steps[-1] if steps else -1
        counts = []
        for line in lines[1:]:
            count = line.partition(b",")[0]
            if not count.isdigit() or int(count) > last:
                break
            counts.append(int(count))
        is_metrics = path == files.metrics
        is_whole = counts == steps if is_metrics else set(counts) <= set(steps)
        has_header = lines[:1] == [] or lines[0].startswith(b"steps,")
        if not (is_whole and has_header) or b"\r" in b"".join(lines):
            raise ValueError(
                f"{path} must have the rows that `run` wrote up to {last:,} steps, got "
                "other rows. Restore the file, or start in another folder."
            )
        # All processes of `jax.distributed` read the table before the first writes it.
        multihost_utils.sync_global_devices(f"all have read {path.name}")
        if lines and jax.process_index() == 0:
            path.write_bytes(b"".join(lines[: len(counts) + 1] if counts else []))


def check_metrics(metrics: dict[str, np.ndarray], num_updates: int) -> None:
    """Raises unless each metric is one number per update, and its name fits a table."""
    for name, values in metrics.items():
        if name == "steps" or not name.isprintable() or any(x in name for x in ',"'):
            raise ValueError(
                "The name of a metric must not be `steps` and must not contain commas, "
                f"quotes or line breaks, got {name!r}. Rename the metric in `update`."
            )
        if values.shape != (num_updates,):
            raise ValueError(
                f"Metric {name!r} must be one number per update, got shape "
                f"{values.shape[1:]} per update. Return its mean from `update`."
            )


def append_rows(path: Path, columns: dict[str, Any]) -> None:
    """Appends rows to a CSV file; a new file begins with a header."""
    is_new = not path.exists() or not path.stat().st_size
    rows = zip(*(np.atleast_1d(x).tolist() for x in columns.values()), strict=True)
    with path.open("a", newline="") as file:
        if is_new:
            file.write(",".join(columns) + "\n")
        for row in rows:
            cells = (f"{x:.9g}" if type(x) is float else str(x) for x in row)
            file.write(",".join(cells) + "\n")
        file.flush()
        os.fsync(file.fileno())


def evaluation_row(steps: Any, stats: rollout.stats.CollectStats) -> dict[str, Any]:
    """Returns a row of the table of evaluations."""
    returns = stats.returns
    return {
        "steps": int(steps),
        "return_mean": float(returns.mean),
        "return_ci_low": float(returns.ci_low),
        "return_ci_high": float(returns.ci_high),
        "length_mean": float(stats.lengths.mean),
    }


def progress_line(
    steps: Any, speed: Any, metrics: dict[str, Any], evaluation: Any
) -> str:
    """Formats the line of output after each part of the training."""
    text = f"{steps:>12,} steps, return {metrics['return_mean'][-1]:.6g}"
    if evaluation is not None:
        text += f", evaluation {float(evaluation.returns.mean):.6g}"
    return f"{text}, {speed:,.0f} steps/s"


class TensorBoardWriter:
    """Writes scalars for TensorBoard, or nothing if the package is not installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, steps: Any, metrics: dict[str, Any], evaluation: Any) -> None:
        """Writes the metrics of some updates, and the evaluation after the last one."""
        if importlib.util.find_spec("tensorboard") is None:
            return
        if self._writer is None:  # the first call creates the file
            name = "tensorboard.summary.writer.event_file_writer"
            module = importlib.import_module(name)
            self._writer = module.EventFileWriter(str(self._folder))
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        for i, count in enumerate(steps):
            event = proto.Event(step=int(count), wall_time=time.time())
            scalars = {name: x[i] for name, x in metrics.items()}
            if evaluation is not None and i == len(steps) - 1:
                scalars["evaluation/return_mean"] = evaluation.returns.mean
            for name, value in scalars.items():
                event.summary.value.add(tag=name, simple_value=float(value))
            self._writer.add_event(event)
        self._writer.flush()


def draw_curve(files: Folder, agent: Any) -> None:
    """Plots the mean return over the environment steps, if matplotlib is installed."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.ticker import EngFormatter
    except ModuleNotFoundError:
        print("no curve: install matplotlib")
        return
    figure, axes = plt.subplots()
    window_size = vars(agent.config).get("stats_window_size")
    training = f"training, last {window_size} episodes" if window_size else "training"
    lines = (files.metrics, "-", training), (files.evaluations, "o", "evaluation")
    for path, style, label in lines:
        rows = []
        if path.exists():
            with path.open() as file:
                rows = list(csv.DictReader(file))
        steps = [int(row["steps"]) for row in rows]
        returns = [float(row["return_mean"]) for row in rows]
        axes.plot(steps, returns, style, label=label)
    axes.set(xlabel="environment steps", ylabel="mean return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
    axes.legend()
    figure.savefig(files.folder / "curve.png")
    plt.close(figure)


def draw_gif(agent: Any, state: Any, key: chex.PRNGKey, env: Any, path: Path) -> None:
    """Renders an episode of `eval_policy`, if the environment can be rendered."""
    env = agent.env if env is None else env
    # One device renders, also if the parameters are on several devices.
    collector = agent.replace(mesh=None).make_collector(env, agent.eval_policy)
    params = state.params if agent.mesh is None else jax.device_get(state.params)
    try:
        rollout.record_gif(collector, params, key, path, max_episode_steps=200)
    except Exception as error:  # an environment may raise anything
        print(f"no GIF: {error}")
