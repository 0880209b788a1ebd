"""The progress bar of a stream."""

from rollout.stream.stream_stats import StreamStats


class Bar:
    """A tqdm bar of steps, their speed and the time left, made when first shown."""

    def __init__(self, total: int | None) -> None:
        self._total, self._bar = total, None

    def show(self, steps: int, stats: StreamStats) -> None:
        """Shows the number of steps so far, and the window's mean return."""
        if self._bar is None:
            from tqdm import tqdm  # takes long to import

            self._bar = tqdm(
                total=self._total, unit="step", unit_scale=True, dynamic_ncols=True
            )
        self._bar.set_postfix_str(str(stats.window), refresh=False)
        self._bar.update(steps - self._bar.n)

    def close(self) -> None:
        """Ends the bar and its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
