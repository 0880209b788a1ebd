"""Files of a run: paths, tables, loggers, the curve and the animation."""

import contextlib
import csv
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from jax.experimental import multihost_utils

import rollout
from rollout.base.files import lock, replace_file
from rollout.logs import CSVWriter, TensorBoardWriter
from rollout.stats import mean_interval


class Folder(NamedTuple):
    """Paths of the files of a run."""

    folder: Path

    settings = property(lambda self: self.folder / "agent.json")
    metrics = property(lambda self: self.folder / "metrics.csv")
    evaluations = property(lambda self: self.folder / "evaluations.csv")
    best = property(lambda self: self.folder / "best")
    last = property(lambda self: self.folder / "last")
    resume = property(lambda self: self.folder / "resume")
    tables = property(lambda self: (self.metrics, self.evaluations))

    def any_exist(self) -> bool:
        """Returns whether the folder contains a run."""
        paths = self.settings, *self.tables, self.best, self.last, self.resume
        return any(path.exists() for path in paths)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Creates the folder, and locks it for one run until the block ends."""
        error = ValueError(
            f"`folder` must not be in use, got {self.folder}, in which another process "
            "or thread trains. Wait until it ends, or pass another folder."
        )
        is_writer = jax.process_index() == 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if is_writer:
                (self.folder / ".lock").touch()
        except OSError as cause:
            raise ValueError(
                f"`folder` must be a folder to write files to, got {self.folder}: "
                f"{cause.strerror}. Pass another folder."
            ) from cause
        no_lock = contextlib.nullcontext()
        with lock(self.folder / ".lock", error) if is_writer else no_lock:
            yield


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    """Writes the settings, unless the file already has them."""
    content = json.dumps(settings, indent=1).encode() + b"\n"
    if not path.exists() or path.read_bytes() != content:
        with replace_file(path) as file:
            file.write(content)


def mark_table(path: Path, mark: np.ndarray) -> np.ndarray:
    """Returns the size and checksum of a table, given the mark of its first rows."""
    size, checksum = mark.tolist()
    with path.open("rb") as file:
        file.seek(size)
        content = file.read()
    return np.array([size + len(content), zlib.crc32(content, checksum)], np.int64)


def trim_tables(files: Folder, marks: np.ndarray) -> None:
    """Validates the tables and removes the rows after the checkpoint.

    Args:
        files: paths of the tables.
        marks: `[2, 2]`, size and checksum of each table at the checkpoint.
    """
    for path, (size, checksum) in zip(files.tables, marks.tolist(), strict=True):
        content = path.read_bytes() if path.exists() else b""
        if len(content) < size or zlib.crc32(content[:size]) != checksum:
            raise ValueError(
                f"{path} must have the rows that `run` wrote up to the checkpoint, got "
                "other rows. Restore the file, or start in another folder."
            )
        # All processes of `jax.distributed` read the table before the first writes it.
        multihost_utils.sync_global_devices(f"all have read {path.name}")
        if len(content) > size and jax.process_index() == 0:
            os.truncate(path, size)


def check_metrics(metrics: dict[str, np.ndarray], shape: tuple[int, ...]) -> None:
    """Raises unless each metric has a shape, and a name that fits a table.

    Args:
        metrics: metrics by name.
        shape: `(n,)` for n updates, or `(n, S)` for S seeds.
    """
    for name, values in metrics.items():
        if (
            name in ("steps", "seed")
            or not name.isprintable()
            or any(x in name for x in ',"')
        ):
            raise ValueError(
                "The name of a metric must not be `steps` or `seed` and must not have "
                f"commas, quotes or line breaks, got {name!r}. Rename the metric in "
                "`update`."
            )
        if values.shape != shape:
            raise ValueError(
                f"Metric {name!r} must be one number per update, got shape "
                f"{values.shape[len(shape) :]} per update. Return its mean from "
                "`update`."
            )


class Logs:
    """Writes the tables and calls the loggers.

    Args:
        files: paths of the tables.
        num_seeds: S, or None for one seed.
        log: the logger of the user, or None.
    """

    def __init__(
        self, files: Folder, num_seeds: int | None, log: Callable[..., object] | None
    ) -> None:
        self._files, self._num_seeds = files, num_seeds
        self._loggers = [] if log is None else [log]
        with contextlib.suppress(ModuleNotFoundError):  # TensorBoard is optional
            self._loggers.append(TensorBoardWriter(files.folder))

    def write(
        self,
        steps: np.ndarray,
        metrics: dict[str, np.ndarray],
        evaluation: rollout.stats.CollectStats | None,
        marks: np.ndarray,
    ) -> np.ndarray:
        """Writes n updates, and the evaluation after the last one.

        Args:
            steps: `[n]` environment steps after each update.
            metrics: `[n]` or `[n, S]` by name.
            evaluation: the evaluation, or None.
            marks: `[2, 2]`, size and checksum of each table before the call.

        Returns:
            Size and checksum of each table after the call.
        """
        self._append(self._files.metrics, steps, metrics)
        if evaluation is not None:
            row = {x: y[None] for x, y in evaluation_row(evaluation).items()}
            self._append(self._files.evaluations, steps[-1:], row)
        if self._loggers:
            for i, step in enumerate(steps.tolist()):
                values = self._flatten({name: x[i] for name, x in metrics.items()})
                if evaluation is not None and i == len(steps) - 1:
                    values |= self._flatten(evaluation, "evaluation")
                for log in self._loggers:
                    log(values, step=step)
        tables = zip(self._files.tables, marks, strict=True)
        return np.stack([mark_table(*x) if x[0].exists() else x[1] for x in tables])

    def _append(self, path: Path, steps: np.ndarray, values: dict[str, Any]) -> None:
        columns: dict[str, Any] = {"steps": steps}
        if self._num_seeds is not None:
            columns = {
                "steps": np.repeat(steps, self._num_seeds),
                "seed": np.tile(np.arange(self._num_seeds), len(steps)),
            }
        columns |= {name: np.ravel(x) for name, x in values.items()}
        writer = CSVWriter(path)
        if writer.columns not in ([], [*columns]):
            raise ValueError(
                f"The metrics of `update` must be those of {path}, "
                f"{', '.join(writer.columns)}, got {', '.join(columns)}."
            )
        writer.append(columns)

    def _flatten(self, stats: Any, prefix: str = "") -> dict[str, float]:
        return rollout.log_stats(stats, prefix=prefix, num_seeds=self._num_seeds)


def evaluation_row(stats: rollout.stats.CollectStats) -> dict[str, np.ndarray]:
    """Returns the columns of the table of evaluations, `()` or `[S]` each."""
    returns = stats.returns
    columns = {
        "return_mean": returns.mean,
        "return_ci_low": returns.ci_low,
        "return_ci_high": returns.ci_high,
        "length_mean": stats.lengths.mean,
    }
    return {name: np.asarray(x) for name, x in columns.items()}


def progress_line(
    steps: Any, speed: Any, metrics: dict[str, Any], evaluation: Any
) -> str:
    """Formats the line of output after each part of the training."""
    text = f"{steps:>12,} steps, return {metrics['return_mean'][-1].mean():.6g}"
    if evaluation is not None:
        text += f", evaluation {float(np.mean(evaluation.returns.mean)):.6g}"
    return f"{text}, {speed:,.0f} steps/s"


def draw_curve(files: Folder, agent: Any) -> None:
    """Plots the mean return over the environment steps, if matplotlib is installed.

    Shows the mean over several seeds with its 95 % interval.
    """
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
        steps, returns = read_returns(path)
        (line,) = axes.plot(steps, returns.mean(0), style, label=label)
        if len(returns) > 1:
            _, low, high = mean_interval(returns)
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="environment steps", ylabel="mean return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
    axes.legend()
    with replace_file(files.folder / "curve.png") as file:
        figure.savefig(file, format="png")
    plt.close(figure)


def read_returns(path: Path) -> tuple[np.ndarray, Any]:
    """Reads the steps, `[n]`, and mean returns, `[S, n]`, of a table."""
    if not path.exists():
        return np.zeros(0), np.zeros((1, 0))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    num_seeds = len({row.get("seed") for row in rows})
    steps = np.array([int(row["steps"]) for row in rows])[::num_seeds]
    returns = np.array([float(row["return_mean"]) for row in rows], np.float32)
    return steps, returns.reshape(len(steps), num_seeds).T


def draw_gif(agent: Any, params: Any, key: chex.PRNGKey, path: Path) -> None:
    """Renders an episode of `eval_policy`, if the environment can be rendered."""
    if agent.mesh is not None:  # one device renders
        agent, params = agent.replace(mesh=None), jax.device_get(params)
    try:
        rollout.record_gif(
            agent.eval_collector, params, key, path, max_episode_steps=200
        )
    except Exception as error:  # an environment may raise anything
        print(f"no GIF: {str(error) or repr(error)}")
