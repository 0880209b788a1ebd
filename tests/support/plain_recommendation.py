"""Recommendation as a plain loop in NumPy: the model that the library agrees with."""

from typing import NamedTuple

import numpy as np


class Setting(NamedTuple):
    """Which items are allowed, and when an episode ends."""

    no_repeats: bool
    force_length: int = 0  # 0: when the user leaves


class Played(NamedTuple):
    """An episode, one entry for each turn."""

    user: int
    last: list[int]  # the item of `obs`
    mask: list[np.ndarray]  # the mask of `obs`
    item: list[int]
    reward: list[np.float32]
    left: list[bool]  # whether the user has left, now or before
    no_valid_action: list[bool]


class Model(NamedTuple):
    """Users who leave if a category was on too many of the last items."""

    feedback: np.ndarray  # [U, I]
    categories: np.ndarray  # [I, C]
    window: int
    threshold: int
    max_turn: int

    def leaves(self, items: list[int], item: int) -> bool:
        """Whether the user leaves after `item`, which follows `items`."""
        last = items[max(0, len(items) - self.window) :]
        for category in np.flatnonzero(self.categories[item]):
            if sum(self.categories[x, category] for x in last) > self.threshold:
                return True
        return False

    def play(self, scores: np.ndarray, user: int, setting: Setting) -> Played:
        """Plays an episode: the item of the highest score that is allowed.

        Args:
            scores: `[U, I + 1, I]`, of the user and the last item.
            user: the user's number.
            setting: which items are allowed, and when the episode ends.
        """
        num_items = self.feedback.shape[1]
        played = Played(user, [], [], [], [], [], [])
        shown, last, has_left = [], num_items, False
        while True:
            mask = np.ones(num_items, bool)
            if setting.no_repeats:
                mask[shown] = False
            allowed = np.flatnonzero(mask) if mask.any() else np.arange(num_items)
            item = int(max(allowed, key=lambda x: (scores[user, last, x], -x)))
            num_turns = len(shown) + 1
            left = self.leaves(shown, item)
            has_left = has_left or left or num_turns >= self.max_turn
            played.last.append(last)
            played.mask.append(mask)
            played.item.append(item)
            played.reward.append(self.feedback[user, item])
            played.left.append(has_left)
            played.no_valid_action.append(not mask.any())
            shown, last = [*shown, item], item
            if setting.force_length == num_turns:
                return played
            if not setting.force_length and has_left:
                return played


def metrics(
    episodes: list[Played],
    num_items: int,
    features: np.ndarray,
    popularity: np.ndarray,
    dominated: np.ndarray,
) -> dict[str, float]:
    """The metrics of all episodes, in double precision."""
    items = [item for played in episodes for item in played.item]
    flags = [flag for played in episodes for flag in played.no_valid_action]
    rewards = [reward for played in episodes for reward in played.reward]
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
    for at, one in enumerate(items):
        for other in items[:at]:
            a, b = features[one].astype(float), features[other].astype(float)
            values.append(1.0 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    return np.mean(values) if values else 1.0
