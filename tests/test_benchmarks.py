"""The benchmark of the kernel runs."""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["random", "mlp"])
def test_every_loop_of_the_kernel_benchmark_runs(policy, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rollout_speed

    case = rollout_speed.Case("CartPole-v1", 4, policy, "threefry2x32", num_steps=8)
    row = rollout_speed.measure(case, repeats=1)

    assert all(row["steps_per_s"][loop] > 0 for loop in ("a", "b", "c", "full"))
