"""The progress bar of a stream."""

from typing import Any

from rollout.stream.stats import StreamStats


class Bar:
    """A tqdm bar in environment steps, made when it is first shown."""

    def __init__(self, total: int | None) -> None:
        self._total, self._bar = total, None

    def show(self, done: int, stats: StreamStats) -> None:
        """Shows that `done` steps are collected, and what the stream counted."""
        bar = self._open(done)
        bar.set_postfix_str(
            f"{stats.collect_episodes:,} episodes, mean return {stats.return_mean:.4g}",
            refresh=False,
        )
        bar.update(done - bar.n)

    def close(self) -> None:
        """Leaves the cursor on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _open(self, done: int) -> Any:
        if self._bar is None:
            from tqdm import tqdm  # takes long to import

            options = {"unit": "step", "unit_scale": True, "dynamic_ncols": True}
            self._bar = tqdm(total=self._total, initial=0, **options)
        return self._bar
