"""The progress bar of a stream."""

from typing import Any

from rollout.stream.stream_stats import StreamStats


class Bar:
    """A tqdm bar with steps, speed and remaining time; created by the first `show`."""

    def __init__(self, total: int | None, *, is_on: bool) -> None:
        self._total, self._is_on, self._bar = total, is_on, None

    def show(self, steps: int, stats: StreamStats) -> None:
        """Displays the number of steps and the mean return of recent episodes."""
        if not self._is_on:
            return
        if self._bar is None:
            from tqdm import tqdm  # slow to import

            self._bar: Any = tqdm(
                total=self._total, unit="step", unit_scale=True, dynamic_ncols=True
            )
        self._bar.set_postfix_str(str(stats.window), refresh=False)
        self._bar.update(steps - self._bar.n)

    def close(self) -> None:
        """Closes the bar and its line; the next `show` creates a new bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
