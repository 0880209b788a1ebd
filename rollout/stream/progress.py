"""The progress bar of a stream."""

from typing import Any

from rollout.stream.stream_stats import StreamStats


class Bar:
    """A tqdm bar of steps, their speed and the time left, made when first shown."""

    def __init__(self, total: int | None, *, is_on: bool) -> None:
        self._total, self._is_on, self._bar = total, is_on, None

    def show(self, steps: int, stats: StreamStats) -> None:
        """Shows the number of steps so far, and the window's mean return."""
        if not self._is_on:
            return
        if self._bar is None:
            from tqdm import tqdm  # takes long to import

            self._bar: Any = tqdm(
                total=self._total, unit="step", unit_scale=True, dynamic_ncols=True
            )
        self._bar.set_postfix_str(str(stats.window), refresh=False)
        self._bar.update(steps - self._bar.n)

    def close(self) -> None:
        """Ends the bar and its line; the next batch begins another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
