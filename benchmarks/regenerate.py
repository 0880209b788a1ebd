"""Regenerates the results in the README, the pages and the notebooks.

    python benchmarks/regenerate.py --list     # steps with their commands
    python benchmarks/regenerate.py --pages    # pages, tables and charts, in minutes
    python benchmarks/regenerate.py            # all steps, in days
    python benchmarks/regenerate.py sac teams  # some steps

Every command runs in a new process. After a failure the other steps continue. The
docstring of a script lists the packages to install. Steps that compare with PureJaxRL
need a clone of it in the folder `purejaxrl`. A command with `--repeat` that was
interrupted resumes if you run it without `--repeat`.

Each result has a record of the machine, the versions, the date and the commit: in
`docs/regenerated.json` for pages and notebooks, and inside all other JSON files.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("pages", "tables", "charts")
# With more cores, CPU time includes waiting threads.
ONE_CORE = "taskset -c 0 python benchmarks/"
CLONE = "--purejaxrl purejaxrl/purejaxrl"


def steps() -> dict[str, list[str]]:
    """Returns the commands of every step."""
    curves = [x for x in sorted(DOCS.glob("recipes/*.json")) if x.stem != "ppo"]
    learning = f"{ONE_CORE}learning_compared.py docs/learning"
    more_seeds = f"{learning}_more_seeds.json --repeat {CLONE}"
    ppo = f"{ONE_CORE}ppo_results.py docs/recipes/ppo.json --repeat"

    def speed(script: str) -> list[str]:
        return [f"python benchmarks/{script}.py --json docs/speed.json"]

    return {
        "pages": ["env JAX_PLATFORMS=cpu python benchmarks/pages.py"],
        "notebooks": [
            f"python benchmarks/pages.py notebooks/{x.name}"
            for x in sorted(ROOT.glob("notebooks/*.ipynb"))
        ],
        "agent": [
            "python -m rollout train ppo CartPole-v1 --folder runs/agent",
            "cp runs/agent/curve.png docs/agent.png",
        ],
        "gallery": gallery_commands(),
        **{
            x.stem: [f"python benchmarks/curves.py docs/recipes/{x.name}"]
            for x in curves
        },
        "ppo": [
            f"{ppo} {CLONE}",
            f"{ppo} --details --tasks Pendulum-v1 Breakout-MinAtar",
        ],
        "pixels": [f"{ONE_CORE}pixels.py docs/pixels.json --repeat --seeds 2"],
        "atari": [f"{ONE_CORE}atari.py docs/atari.json --repeat --seeds 2"],
        "normalization": [
            f"{ONE_CORE}normalization.py docs/normalization.json --repeat "
            "--programs SAC"
        ],
        "devices_learning": [
            f"{ONE_CORE}devices_learning.py docs/devices_learning.json --repeat"
        ],
        "playground_ppo": [
            f"{ONE_CORE}playground_ppo.py docs/playground_ppo.json --repeat"
        ],
        "teams": ["python benchmarks/teams.py docs/teams.json --repeat --seeds 5"],
        "learning": [f"{learning}.json --repeat {CLONE}"],
        "learning_more_seeds": [
            f"{more_seeds} --seeds 25 --tasks 'PPO CartPole' 'DQN CartPole' "
            "--makers ours limit_is_failure purejaxrl",
            f"{more_seeds} --seeds 15 --tasks 'PPO Breakout' --makers ours purejaxrl",
        ],
        "learning_problems": ["python benchmarks/learning_problems.py"],
        "accelerators": [
            "env JAX_PLATFORMS=cpu python benchmarks/accelerators.py "
            "--json docs/accelerators.json"
        ],
        "rollout_speed": speed("rollout_speed"),
        "episodes_speed": speed("episodes_speed"),
        "training_speed": [
            f"{ONE_CORE}training_speed.py --json docs/speed.json {CLONE}"
        ],
        "overhead": [f"{ONE_CORE}overhead.py --json docs/speed.json"],
        "agents_speed": speed("agents_speed"),
        "host_speed": speed("host_speed"),
        "pettingzoo_speed": speed("pettingzoo_speed"),
        "buffer_speed": speed("buffer_speed"),
        "convolution_speed": [
            f"{ONE_CORE}convolution_speed.py --json docs/speed.json",
            *speed("convolution_speed"),
        ],
        "stream_speed": speed("stream_speed"),
        "devices_speed": speed("devices_speed"),
        "start_speed": speed("start_speed"),
        "peer_trainings": [f"{ONE_CORE}peer_trainings.py --json docs/speed.json"],
        # Tests that train for long. Requires the extras test and suites, mctx, optuna.
        "tests": ["python -m pytest -q -m very_slow"],
        "tables": ["python benchmarks/tables.py"],
        "charts": ["python benchmarks/charts.py"],
    }


def gallery_commands() -> list[str]:
    """Returns the commands of the gallery; their GIFs are written to `docs`."""
    page = (DOCS / "gallery.md").read_text()
    lines = re.findall(r"^rollout (?:.*\\\n)*.*", page, re.MULTILINE)
    commands = [" ".join(x.replace("\\\n", " ").split()) for x in lines]
    return [re.sub(r"(\w+\.gif)", r"docs/\1", f"python -m {x}") for x in commands]


def run(command: str) -> bool:
    """Runs a command; returns whether it succeeded."""
    print(f"+ {command}", flush=True)
    words = [sys.executable if x == "python" else x for x in shlex.split(command)]
    return subprocess.run(words, cwd=ROOT, check=False).returncode == 0


def main() -> None:
    """Runs the given steps, or all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--pages", action="store_true", help="pages, tables, charts")
    parser.add_argument("--list", action="store_true", help="print the commands")
    args = parser.parse_args()
    commands = steps()
    os.environ.setdefault("MUJOCO_GL", "egl")  # brax renders without a display
    if unknown := set(args.steps) - commands.keys():
        parser.error(f"unknown steps {sorted(unknown)}; the steps are {[*commands]}")
    failures = []
    for name in PAGES if args.pages else args.steps or commands:
        if args.list:
            print(name, *commands[name], sep="\n    ")
            continue
        start = time.perf_counter()
        if not all(run(x) for x in commands[name]):
            failures.append(name)
        print(f"{name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
    if failures:
        sys.exit(f"steps that failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
