"""How many steps of recommendation does EasyRL4Rec collect in a second?

Times `Collector.collect` on a `DummyVectorEnv` of `KuaiEnv` into a
`VectorReplayBuffer`. Feedback, leave rule and sizes match `recommendation_speed.py`. No
item is recommended twice: before every step, `RecPolicy` computes item masks for all
lanes from the episodes in the buffer (`remove_recommended_ids`). The policy samples a
valid item and ignores the state. A call collects one episode per lane into an empty
buffer, as the trainer does for PG; finished lanes wait.

EasyRL4Rec is not a package: pass the folder of a checkout. Importing `KuaiEnv` reads
recorded data; tables without rows suffice. The state tracker imports TensorFlow.

    pip install "torch==2.13.0" "gymnasium==1.4.0" "numpy==2.4.6" "pandas==3.1.1" \\
        "numba==0.68.1" "scipy==1.17.1" "scikit-learn==1.9.1" "pettingzoo==1.27.0" \\
        "tensorflow-cpu==2.21.0" h5py logzero packaging requests tensorboard tqdm
    git clone https://github.com/chongminggao/EasyRL4Rec
    git -C EasyRL4Rec checkout 8cecd00
    git clone https://github.com/yuyq18/tianshou EasyRL4Rec/src/tianshou
    git -C EasyRL4Rec/src/tianshou checkout d533736
    python easyrl4rec_speed.py EasyRL4Rec --items 1000 --lanes 64
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

NUM_USERS, NUM_CATEGORIES, WINDOW, THRESHOLD, MAX_TURN = 100, 31, 5, 2, 100
EMBEDDING_DIM, TRACKER_WINDOW = 32, 3


def import_checkout(checkout: Path) -> None:
    """Adds the folders of a checkout to `sys.path` and imports `KuaiEnv` once."""
    folders = ("", "src/DeepCTR-Torch", "src/tianshou")
    sys.path[:0] = [str(checkout.resolve() / folder) for folder in folders]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        raw = Path("data/KuaiRec/data_raw")
        raw.mkdir(parents=True)
        for name in ("big", "small"):
            (raw / f"{name}_matrix.csv").write_text("user_id\n")
        import src.core.envs.KuaiRec.KuaiEnv  # noqa: F401


def make_env(num_items: int, num_lanes: int) -> Any:
    """Makes a vector environment whose environments share the same tables."""
    from sklearn.preprocessing import LabelEncoder
    from src.core.envs.KuaiRec.KuaiEnv import KuaiEnv
    from src.tianshou.tianshou.env import DummyVectorEnv

    rng = np.random.default_rng(0)
    feedback = rng.random((NUM_USERS, num_items), np.float32)
    categories = rng.random((num_items, NUM_CATEGORIES)) < 2 / NUM_CATEGORIES
    tables = {
        "mat": feedback,
        "lbe_item": LabelEncoder().fit(np.arange(num_items)),
        "list_feat": [np.flatnonzero(row).tolist() for row in categories],
    }

    def make_one() -> KuaiEnv:
        return KuaiEnv(
            **tables,
            num_leave_compute=WINDOW,
            leave_threshold=THRESHOLD,
            max_turn=MAX_TURN,
        )

    return DummyVectorEnv([make_one] * num_lanes)


def make_tracker(num_items: int) -> torch.nn.Module:
    """Makes the encoder of the last items and rewards of an episode."""
    from src.core.state_tracker.Average import StateTrackerAvg
    from src.core.util.inputs import get_dataset_columns

    user, item, feedback, *_ = get_dataset_columns(
        EMBEDDING_DIM, EMBEDDING_DIM, NUM_USERS, num_items, envname="KuaiEnv-v0"
    )
    embedding = torch.nn.ModuleDict(
        {
            "feat_user": torch.nn.Embedding(NUM_USERS, EMBEDDING_DIM),
            "feat_item": torch.nn.Embedding(num_items, EMBEDDING_DIM),
        }
    )
    tracker = StateTrackerAvg(
        user,
        item,
        feedback,
        EMBEDDING_DIM,
        reward_handle="cat",
        saved_embedding=embedding,
        window_size=TRACKER_WINDOW,
    )
    tracker.set_need_normalization(False)
    return tracker


def make_policy(num_items: int) -> torch.nn.Module:
    """Makes a random policy and wraps it in `RecPolicy`, which masks items."""
    from gymnasium.spaces import Discrete
    from src.core.policy.RecPolicy import RecPolicy
    from src.tianshou.tianshou.data import Batch
    from src.tianshou.tianshou.policy import BasePolicy

    class Random(BasePolicy):
        def forward(self, batch: Batch, state: Any = None, **kwargs: Any) -> Batch:
            scores = torch.rand(batch.mask.shape).where(batch.mask, -1.0)
            return Batch(act=scores.argmax(1), state=None)

        def learn(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
            raise NotImplementedError

    tracker = make_tracker(num_items)
    policy = Random(action_space=Discrete(num_items))
    args = SimpleNamespace(device="cpu", remove_recommended_ids=True)
    return RecPolicy(args, policy, tracker)


def make_program(num_items: int, num_lanes: int) -> Callable[[], int]:
    """Makes a function that collects one episode per lane and returns the steps."""
    from src.core.collector.collector import Collector
    from src.tianshou.tianshou.data import VectorReplayBuffer

    collector = Collector(
        make_policy(num_items),
        make_env(num_items, num_lanes),
        # The masks are computed from whole episodes.
        VectorReplayBuffer(2 * MAX_TURN * num_lanes, num_lanes),
        remove_recommended_ids=True,
    )

    def collect() -> int:
        collector.reset_buffer()
        return collector.collect(n_episode=num_lanes)["n/st"]

    return collect


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, help="folder of EasyRL4Rec")
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)  # `KuaiEnv` samples users with `random`
    import_checkout(args.checkout)
    collect, rates = make_program(args.items, args.lanes), []
    collect()
    for _ in range(args.repeats):
        start = time.perf_counter()
        rates.append(collect() / (time.perf_counter() - start))
    print(json.dumps({"steps_per_second": round(statistics.median(rates))}))


if __name__ == "__main__":
    main()
