"""What the scripts share: options, repeats, and the line of JSON that they print."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata

import torch


def report(
    make_program: Callable[..., Callable[[], int]],
    package: str,
    kinds: Sequence[str] = (),
) -> None:
    """Prints one line of JSON.

    Args:
        make_program: makes a call that collects a batch and says how many steps it has;
            of a kind of environments, if there are several.
        package: whose version is told.
        kinds: of environments, the first one by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warmup", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    if kinds:
        parser.add_argument("--env", default=kinds[0], choices=tuple(kinds))
    args = parser.parse_args()
    # More threads are slower: the network is tiny.
    torch.set_num_threads(args.threads)
    collect = make_program(args.env) if kinds else make_program()
    run(collect, args.warmup)
    seconds, num_steps = [], 0
    for _ in range(args.repeats):
        start = time.perf_counter()
        num_steps = run(collect, args.steps)
        seconds.append(time.perf_counter() - start)
    result = {
        "version": metadata.version(package),
        "gymnasium": metadata.version("gymnasium"),
        "torch": torch.__version__,
        "steps": num_steps,
        "seconds": [round(x, 4) for x in seconds],
        "steps_per_second": round(num_steps / statistics.median(seconds)),
    }
    print(json.dumps(result))


def run(collect: Callable[[], int], num_steps: int) -> int:
    """Collects batches until there are so many steps."""
    collected = 0
    while collected < num_steps:
        collected += collect()
    return collected
