"""Recommendation as a plain loop in NumPy, the reference for tests."""

from typing import NamedTuple

import numpy as np


class Setting(NamedTuple):
    """Rules for valid items and for the end of an episode."""

    no_repeats: bool
    force_length: int = 0  # 0: the episode ends when the user leaves


class Episode(NamedTuple):
    """An episode, one entry for each turn."""

    user: int
    last: list[int]  # the item of `obs`
    mask: list[np.ndarray]  # the mask of `obs`
    item: list[int]
    reward: list[np.float32]
    has_left: list[bool]  # the user left in this turn or earlier
    no_valid_action: list[bool]


class Model(NamedTuple):
    """Users who leave if too many of the last items share a category."""

    feedback: np.ndarray  # [U, I]
    categories: np.ndarray  # [I, C]
    window: int
    threshold: int
    max_turn: int

    def leaves(self, items: list[int], item: int) -> bool:
        """Returns whether the user leaves after `item`, which follows `items`."""
        last = items[max(0, len(items) - self.window) :]
        for category in np.flatnonzero(self.categories[item]):
            if sum(self.categories[x, category] for x in last) > self.threshold:
                return True
        return False

    def play(self, scores: np.ndarray, user: int, setting: Setting) -> Episode:
        """Recommends the valid item with the highest score until the episode ends.

        Args:
            scores: `[U, I + 1, I]`, scores of items by user and last item.
            user: number of the user.
            setting: rules for valid items and for the end of the episode.
        """
        num_items = self.feedback.shape[1]
        episode = Episode(user, [], [], [], [], [], [])
        items, last, has_left = [], num_items, False
        while True:
            mask = np.ones(num_items, bool)
            if setting.no_repeats:
                mask[items] = False
            choices = np.flatnonzero(mask) if mask.any() else np.arange(num_items)
            item = int(max(choices, key=lambda x: (scores[user, last, x], -x)))
            num_turns = len(items) + 1
            leaves = self.leaves(items, item)
            has_left = has_left or leaves or num_turns >= self.max_turn
            episode.last.append(last)
            episode.mask.append(mask)
            episode.item.append(item)
            episode.reward.append(self.feedback[user, item])
            episode.has_left.append(has_left)
            episode.no_valid_action.append(not mask.any())
            items, last = [*items, item], item
            if setting.force_length == num_turns:
                return episode
            if not setting.force_length and has_left:
                return episode


def metrics(
    episodes: list[Episode],
    num_items: int,
    features: np.ndarray,
    popularity: np.ndarray,
    dominated: np.ndarray,
) -> dict[str, float | np.floating]:
    """Computes the metrics of all episodes in double precision."""
    items = [item for episode in episodes for item in episode.item]
    flags = [flag for episode in episodes for flag in episode.no_valid_action]
    rewards = [reward for episode in episodes for reward in episode.reward]
    return {
        "click_through_rate": np.mean(rewards, dtype=np.float64),
        "coverage": len(set(items)) / num_items,
        "coverage_per_turn": len(set(items)) / len(items),
        "diversity": np.mean([_diversity(x.item, features) for x in episodes]),
        "novelty": np.mean([-np.log(popularity[item]) for item in items]),
        "dominated_share": np.mean([dominated[item] for item in items]),
        "no_valid_action_share": np.mean(flags),
    }


def _diversity(items: list[int], features: np.ndarray) -> float:
    values = []
    for number, item in enumerate(items):
        for earlier_item in items[:number]:
            a, b = (features[x].astype(float) for x in (item, earlier_item))
            values.append(1.0 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    return float(np.mean(values)) if values else 1.0
