"""`run` trains with logs, evaluations and checkpoints; `load` loads the agent.

agent = PPO(rollout.envs.make_vec("CartPole-v1", num_envs=64), Config())
run(agent, jax.random.key(0), folder="runs/cartpole", evaluate_every=50_000)
agent, state = load("runs/cartpole")
action = agent.predict(state.params, obs)
"""

import dataclasses
import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import chex
import jax
import numpy as np

import rollout
from rollout import checkpoint
from rollout.base import checks
from rollout.envs import spaces
from rollout.envs.spaces import EnvSpec
from rollout.envs.types import AnySpace, ArrayTree, wrapped_env
from rollout.recipes.run_files import (
    Folder,
    Logs,
    check_metrics,
    draw_curve,
    draw_gif,
    progress_line,
    trim_tables,
    write_settings,
)
from rollout.recipes.run_settings import (
    check_settings,
    describe,
    describe_fields,
    field_defaults,
)

NUM_CHUNKS = 20  # parts of a training run without `evaluate_every`


class Progress(NamedTuple):
    """Argument of the callback of `run`, which runs after each part of the training.

    Attributes:
        steps: environment steps so far.
        state: the training state of the agent.
        metrics: metrics of the n updates since the previous call, `[n]` by name, or
            `[n, S]` for S seeds. The steps after each of these updates are
            `agent.env_steps(int(state.num_updates) - n + np.arange(1, n + 1))`.
        evaluation: the evaluation after the last update, or None.
    """

    steps: int
    state: Any
    metrics: dict[str, np.ndarray]  # [n] or [n, S]
    evaluation: rollout.stats.CollectStats | None


class Position(NamedTuple):
    """State of a run between two parts of the training, `[S]` for several seeds.

    Attributes:
        state: the training state.
        best_return: best mean return of an evaluation so far.
        last_return: mean return of the last evaluation.
        best_update: number of updates before the best evaluation; -1 before the first.
        tables: `[2, 2]`, size in bytes and checksum of `metrics.csv` and of
            `evaluations.csv`.
    """

    state: Any
    best_return: np.ndarray  # () or [S] float64
    last_return: np.ndarray  # () or [S] float64
    best_update: np.ndarray  # () or [S] int64
    tables: np.ndarray  # [2, 2] int64

    @classmethod
    def init(cls, state: Any) -> Self:
        """Returns the position before the training."""
        shape = np.shape(state.num_updates)
        return cls(
            state=state,
            best_return=np.full(shape, -np.inf),
            last_return=np.full(shape, -np.inf),
            best_update=np.full(shape, -1, np.int64),
            tables=np.zeros((2, 2), np.int64),
        )

    @property
    def num_updates(self) -> int:
        """Number of updates so far."""
        return int(np.max(self.state.num_updates))

    def evaluated(self, mean_return: np.ndarray) -> Self:
        """Returns the position after an evaluation."""
        is_first = self.best_update < 0
        is_best = is_first | (mean_return > self.best_return)  # False for NaN
        return self._replace(
            best_return=np.fmax(self.best_return, mean_return),
            last_return=np.asarray(mean_return, np.float64),
            best_update=np.where(is_best, self.num_updates, self.best_update),
        )

    def has_reached(self, target_return: float | None) -> bool:
        """Returns whether the last evaluation reached the target."""
        return target_return is not None and self.last_return.mean() >= target_return


class Trainer:
    """The methods of an agent that `run` calls, mapped over seeds if there are several.

    Args:
        agent: the agent.
        collector: environments and policy of the evaluations.
        num_eval_episodes: episodes per evaluation.
        num_seeds: S, or None for one seed.
    """

    def __init__(
        self, agent: Any, collector: Any, num_eval_episodes: int, num_seeds: int | None
    ) -> None:
        self._num_seeds = num_seeds

        def init(key: chex.PRNGKey) -> tuple[Any, chex.PRNGKey]:
            train_key, eval_key = jax.random.split(key)
            return agent.init(train_key), eval_key

        def train(states: Any, size: int) -> Any:
            return jax.vmap(lambda state: agent.train(state, size))(states)

        def evaluate(params: Any, key: chex.PRNGKey, num_updates: Any) -> Any:
            key = jax.random.fold_in(key, num_updates)
            return rollout.evaluate(collector, params, key, num_eval_episodes)

        self._init, self._train, self._evaluate = init, agent.train, evaluate
        if num_seeds is not None:
            self._init, self._evaluate = (
                jax.jit(jax.vmap(fn)) for fn in (init, evaluate)
            )
            self._train = train
        if not agent.collector.is_host:
            self._train = jax.jit(self._train, static_argnums=1)

    def init(self, key: chex.PRNGKey) -> tuple[Any, chex.PRNGKey]:
        """Returns the initial training state, and the key of the evaluations."""
        return self._init(key)

    def train(self, state: Any, size: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Runs updates; returns the next state, and metrics `[n]` or `[n, S]`."""
        state, metrics = self._train(state, size)
        metrics = {name: np.asarray(x) for name, x in sorted(metrics.items())}
        shape: tuple[int, ...] = (size,)
        if self._num_seeds is not None:
            metrics = {name: np.swapaxes(x, 0, 1) for name, x in metrics.items()}
            shape = size, self._num_seeds
        check_metrics(metrics, shape)
        return state, metrics

    def evaluate(self, state: Any, key: chex.PRNGKey) -> rollout.stats.CollectStats:
        """Evaluates the policy of a training state."""
        return self._evaluate(state.params, key, state.num_updates)


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
    log: Callable[..., object] | None = None,
    eval_env: Any = None,
) -> tuple[Any, rollout.stats.CollectStats]:
    """Trains an agent and writes logs, evaluations and checkpoints to a folder.

    The folder contains:

    - `agent.json`: class, config, fields, environments and spaces of the agent;
    - `metrics.csv`: a row per update, and `evaluations.csv`: a row per evaluation;
    - `best` and `last`: parameters of the best evaluation and of the last update, for
      `load`;
    - `resume`: the whole training state, to continue the run;
    - `curve.png`, and `agent.gif` if the environment can be rendered;
    - event files for TensorBoard, if the package `tensorboard` is installed;
    - `.lock`: an empty file, locked during the run.

    Evaluations run `agent.eval_policy`, which takes the most likely action, so their
    returns differ from returns during training. Every evaluation plays new episodes,
    which depend only on `key` and the number of updates.

    A run that was killed and resumed writes the same files as an uninterrupted run, bit
    for bit in JAX environments and in host environments that can save their state. Each
    resume adds one event file. A run that the callback stopped can also be resumed. The
    files do not depend on the devices: a run can be resumed on another number of
    devices, with the same settings but another `mesh`.

    **Several seeds**: for keys `[S]`, such as `jax.random.split(key, 8)`, one program
    trains S agents, mapped by `jax.vmap`. The tables have a column `seed`, the curve
    shows the mean over seeds with its 95 % interval, `best` has the parameters of the
    best evaluation of each seed, and `agent.gif` shows the first seed. The program
    needs the memory of S agents.

    Every process of `jax.distributed` makes the same call, with the same `folder` on a
    shared file system. The first process writes the files.

    Args:
        agent: an agent of `rollout.recipes`, or an agent with the same methods.
        key: one typed key, the source of all randomness; or `[S]` keys, one per seed.
        folder: folder of this run; it must not contain another run.
        evaluate_every: environment steps between evaluations, rounded up to whole
            updates; None evaluates once, at the end. Steps are counted per seed, and
            steps before the first update (`learning_starts`) are not counted. The
            run saves its state and calls `callback` at the same times, and 20 times
            during the run if None: a killed run loses the updates since then.
        num_eval_episodes: episodes per evaluation and seed, at least 1. Under
            `vectorize_each`, a multiple of the number of lanes.
        target_return: mean return of an evaluation at which the training stops, for
            several seeds the mean over the seeds; None trains for `config.num_updates`
            updates.
        resume: whether to continue the run in `folder`. If there is none, a new run
            starts. `config.num_updates` is the total, including the updates before.
            Settings must be equal, except `num_updates` and `target_return`: also the
            attributes of the networks and environments. Functions, such as schedules,
            and classes are compared by name: changes of their code, such as another
            reward or another class attribute, are not found. If the learning rate is
            annealed, it follows the schedule of the new `num_updates`.
        callback: function called with a `Progress` after each evaluation and its
            checkpoint. The training stops if it returns False.
        log: function called as `log(metrics, step=steps)` for every update, with a flat
            dict of floats and the environment steps, for example `wandb.log`,
            `mlflow.log_metrics` or a `rollout.logs.CSVWriter`. Names of evaluations
            begin with `evaluation/`. For several seeds, values are means over the
            seeds, and the suffixes `_ci_low` and `_ci_high` mark the 95 % interval. A
            resumed run repeats the calls after the last checkpoint.
        eval_env: separate environments for evaluations during the training, required
            for host environments.

    Returns:
        The last `TrainState`, and the statistics of the last evaluation. For several
        seeds, every array has a leading axis S.

    Raises:
        ValueError: if `folder` contains a run and `resume` is False, if `resume` is
            True and a setting or a file does not match the run, if `folder` cannot be
            written to, if another process trains in it, or if there are several keys
            for host environments or for a `mesh`.
    """
    for name, fn in {"callback": callback, "log": log}.items():
        if fn is not None and not callable(fn):
            raise ValueError(
                f"`{name}` must be a function, got {checks.describe(fn)}. To use "
                "several, pass a function that calls them."
            )
    if agent.collector.is_host:
        check_eval_env(agent.env, eval_env, evaluate_every)
    num_seeds = check_keys(agent, key)
    evaluated = agent if eval_env is None else agent.replace(env=eval_env)
    checks.check_num_episodes("num_eval_episodes", num_eval_episodes, evaluated.env)
    if evaluate_every is not None:
        evaluate_every = checks.check_int("evaluate_every", evaluate_every, most=None)
    trainer = Trainer(agent, evaluated.eval_collector, num_eval_episodes, num_seeds)
    files = Folder(Path(folder).expanduser())
    settings = describe(agent) | {
        "num_seeds": num_seeds,
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "evaluate_every": evaluate_every,
        "num_eval_episodes": num_eval_episodes,
    }
    with files.lock():
        check_folder(files, settings, resume)
        state, eval_key = trainer.init(key)
        position = restore(files, agent, Position.init(state))
        num_resumed, num_updates = position.num_updates, agent.config.num_updates
        trim_tables(files, position.tables)
        save_policies(files, position)
        logs = Logs(files, num_seeds, log)
        is_writer = jax.process_index() == 0
        evaluation = None
        is_stopped = position.has_reached(target_return)
        while position.num_updates < num_updates and not is_stopped:
            size = chunk_size(agent, evaluate_every, position.num_updates)
            position, steps, metrics, speed = train_chunk(
                agent, trainer, position, size
            )
            evaluation = None
            if evaluate_every is not None or position.num_updates == num_updates:
                evaluation = trainer.evaluate(position.state, eval_key)
                position = position.evaluated(np.asarray(evaluation.returns.mean))
            if is_writer:
                # Write the settings after an update, so that a failed first update
                # leaves no files.
                write_settings(files.settings, settings)
                tables = logs.write(steps, metrics, evaluation, position.tables)
                position = position._replace(tables=tables)
            # Tables are on disk before the checkpoint, and policies follow it: a
            # resumed run trims the tables and saves the missing policies.
            tree = resume_tree(agent, position)
            checkpoint.save(files.resume, tree, step=position.num_updates)
            save_policies(files, position)
            if is_writer:  # a printed update is saved
                print(progress_line(steps[-1], speed, metrics, evaluation), flush=True)
            progress = Progress(int(steps[-1]), position.state, metrics, evaluation)
            result = None if callback is None else callback(progress)
            is_stopped = position.has_reached(target_return)
            # The callback may return `np.bool_`, which is not the object `False`.
            is_stopped |= result is not None and not result
        if evaluation is None:  # stopped by the callback, or resumed at the end
            evaluation = trainer.evaluate(position.state, eval_key)
        if num_resumed >= num_updates:
            print(
                f"no training: the run in {files.folder} has {num_resumed} updates, "
                f"and `num_updates`, which includes them, is {num_updates}"
            )
        if is_writer:
            draw_curve(files, agent)
            params = position.state.params
            if num_seeds is not None:
                params, eval_key = jax.tree.map(lambda x: x[0], (params, eval_key))
            path = files.folder / "agent.gif"
            draw_gif(evaluated, params, eval_key, path)
    return position.state, evaluation


def load(
    folder: str | Path,
    *,
    name: str = "best",
    seed: int | None = None,
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
        seed: index of the seed in a run of several seeds, from 0.
        agent_class: class of the agent, if it is not part of `rollout.recipes`.
        **fields: values of all fields that differ from the defaults, such as `network`,
            except `env` and `config`.

    Returns:
        The agent, and a state with `params`.

    Raises:
        FileNotFoundError: if the folder contains no run, or no such checkpoint.
        ValueError: if `name` is neither "best" nor "last", if the agent has a class or
            fields that must be passed, if a field differs from the field of the run, if
            a class has changed since, or if `seed` is not one of the seeds.
    """
    folder = Path(folder).expanduser()
    if name not in ("best", "last"):
        raise ValueError(
            f"`name` must be 'best' or 'last', got {name!r}. `run(..., resume=True)` "
            "restores the training state."
        )
    settings = read_settings(folder)
    agent_class = agent_class or class_of(settings["agent"])
    num_seeds = check_seed(seed, settings.get("num_seeds"), folder)
    check_fields(agent_class, fields, settings["fields"], folder)
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
    if num_seeds is not None:
        init = jax.vmap(init, axis_size=num_seeds, in_axes=None)
    params = jax.eval_shape(init, obs).params
    purpose = f"to load the agent in {folder}"
    params = restore_tree(folder / name, {"params": params}, purpose)["params"]
    if seed is not None:
        params = jax.tree.map(lambda x: x[seed], params)
    return agent, LoadedState(params)


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a run, as `describe` returned them.

    Raises:
        FileNotFoundError: if the folder contains no run.
    """
    if not Folder(folder).settings.exists():
        hint = ""
        if Folder(folder.parent).settings.exists():
            hint = f" Pass the folder of the run: {str(folder.parent)!r}."
        raise FileNotFoundError(
            f"`folder` must have a run of `run`, got {folder}.{hint}"
        )
    return json.loads(Folder(folder).settings.read_text())


def check_seed(seed: int | None, num_seeds: int | None, folder: Path) -> int | None:
    """Checks the seed to load; returns the number of seeds, or None for a single one.

    Raises:
        ValueError: if the run has several seeds and `seed` is not one of them, or has
            one seed and `seed` is given.
    """
    if num_seeds is None and seed is not None:
        raise ValueError(
            f"`seed` must be omitted, got {seed}: the run in {folder} has one seed."
        )
    if num_seeds is not None and seed not in range(num_seeds):
        raise ValueError(
            f"`seed` must be from 0 to {num_seeds - 1} for the run in {folder}, got "
            f"{seed}. Pass, for example, `load(folder, seed=0)`."
        )
    return num_seeds


def check_fields(
    agent_class: Any, fields: dict[str, Any], saved: dict[str, Any], folder: Path
) -> None:
    """Raises unless fields of an agent, such as networks, equal the saved ones."""
    defaults = field_defaults(agent_class)
    for name, default in defaults.items():
        is_default = saved.get(name) == describe_fields({name: default})[name]
        is_needed = name != "optimizer"  # `predict` does not need it
        if is_needed and name not in fields and not is_default:
            raise ValueError(
                f"`{name}` must be passed to `load`: the agent in {folder} has "
                f"the value {saved.get(name)}, and `run` does not save code."
            )
    values = {name: x for name, x in fields.items() if name in defaults}
    settings, saved = {"fields": describe_fields(values)}, {"fields": saved}
    check_settings(settings, saved, f"to load the agent in {folder}")


def shape_of_obs(space: AnySpace, num_envs: int) -> Any:
    """Returns the shapes and dtypes of observations, `[num_envs, ...]`."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    return jax.eval_shape(jax.vmap(space.sample), keys)


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


def check_keys(agent: Any, key: Any) -> int | None:
    """Checks the key or keys of a run; returns the number of seeds, None for one key.

    Raises:
        ValueError: if `key` is neither one key nor `[S]` keys, or if there are several
            keys for host environments or for a mesh.
    """
    if not checks.has_dtype(key, jax.dtypes.prng_key) or key.shape == ():
        checks.check_key(key)
        return None
    if key.ndim != 1 or not key.size:
        raise ValueError(
            "`key` must be one typed key, or `[S]` keys for S seeds, got shape "
            f"{key.shape}."
        )
    if agent.collector.is_host or agent.mesh is not None:
        reason = "host environments" if agent.mesh is None else "a `mesh`"
        raise ValueError(
            f"`key` must be one typed key for {reason}, got {key.size} keys. Call "
            "`run` once per seed, each with another folder."
        )
    return key.size


def check_folder(files: Folder, settings: dict[str, Any], resume: bool) -> None:
    """Raises if the folder has a run, unless it can be resumed with these settings."""
    folder = files.folder
    if not files.any_exist():
        if resume and jax.process_index() == 0:
            print(f"no run in {folder}: a new run starts")
        return
    if not resume:
        raise ValueError(
            f"`folder` must not contain a run, got {folder}. Pass `resume=True`, or "
            "--resume, to continue the run, or pass another folder."
        )
    if not files.settings.exists():
        raise ValueError(f"`folder` must have agent.json to resume, got {folder}.")
    saved = json.loads(files.settings.read_text())
    check_settings(settings, saved, f"to resume the run in {folder}")


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
    agent: Any, trainer: Trainer, position: Position, size: int
) -> tuple[Position, np.ndarray, dict[str, np.ndarray], float]:
    """Runs `size` updates.

    Returns:
        The next position, the environment steps after each update, `[size]`, the
        metrics by name, and the environment steps per second, of all seeds.
    """
    start, num_done = time.monotonic(), position.num_updates
    state, metrics = trainer.train(position.state, size)
    seconds = time.monotonic() - start
    steps = agent.env_steps(num_done + np.arange(1, size + 1))
    num_steps = (steps[-1] - agent.env_steps(num_done)) * position.best_return.size
    return position._replace(state=state), steps, metrics, num_steps / seconds


def resume_tree(agent: Any, position: Position) -> dict[str, Any]:
    """Returns the tree that `restore` reads, with the states of host environments."""
    state, host = position.state, []
    if agent.collector.is_host:
        host = agent.collector.save(state.carry)
        # The number of a carry counts the calls in one process.
        number, shared = state.carry.env_state
        carry = state.carry.replace(env_state=(np.zeros_like(number), shared))
        state = state.replace(carry=carry)
    return {**position._replace(state=state)._asdict(), "host": host}


def restore(files: Folder, agent: Any, position: Position) -> Position:
    """Returns the position of the checkpoint, or `position` without a checkpoint."""
    if not checkpoint.steps(files.resume):
        return position
    purpose = f"to resume the run in {files.folder}"
    tree = restore_tree(files.resume, resume_tree(agent, position), purpose)
    host, position = tree.pop("host"), Position(**tree)
    if agent.collector.is_host:
        carry = agent.collector.restore(position.state.carry, host)
        position = position._replace(state=position.state.replace(carry=carry))
    return position


def restore_tree(path: Path, like: ArrayTree, purpose: str) -> Any:
    """Restores a checkpoint; the message says that the classes have changed.

    Args:
        path: folder of the checkpoint.
        like: tree of the same structure, shapes and dtypes.
        purpose: end of the condition, as in `check_settings`.
    """
    try:
        return checkpoint.restore(path, like)
    except checkpoint.StructureError as error:
        raise ValueError(
            "The classes of the agent, networks and environments must have the code of "
            f"the run {purpose}, got other arrays: {error}"
        ) from error


def save_policies(files: Folder, position: Position) -> None:
    """Saves the policies of `load` at a position, unless they are on disk."""
    num_updates, params = position.num_updates, position.state.params
    if num_updates and max(checkpoint.steps(files.last), default=0) < num_updates:
        checkpoint.save(files.last, {"params": params}, step=num_updates)
    is_best = position.best_update == num_updates
    steps = checkpoint.steps(files.best)
    if is_best.any() and max(steps, default=0) < num_updates:
        if not is_best.all():  # keep the parameters of the other seeds
            best: Any = checkpoint.restore(files.best, {"params": params})["params"]
            params = jax.tree.map(
                lambda old, new: np.where(
                    is_best.reshape(-1, *[1] * (new.ndim - 1)), new, old
                ),
                *jax.device_get((best, params)),
            )
        checkpoint.save(files.best, {"params": params}, step=num_updates)
