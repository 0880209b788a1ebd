"""The progress bar of a stream."""

from rollout.stream.stream_stats import StreamStats


class Bar:
    """A tqdm bar in environment steps, made when it is first shown."""

    def __init__(self, total: int | None) -> None:
        self._total, self._bar = total, None

    def show(self, done: int, stats: StreamStats) -> None:
        """Shows the number of steps that are done, and the stream's statistics."""
        if self._bar is None:
            from tqdm import tqdm  # takes long to import

            self._bar = tqdm(
                total=self._total, unit="step", unit_scale=True, dynamic_ncols=True
            )
        episodes, mean = stats.collect_episodes, stats.return_mean
        text = f"{episodes:,} episodes, mean return {mean:.4g}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Ends the bar and its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
