"""The README tells the truth: its example runs and its commands are the ones tested."""

import pathlib
import re

import envs

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_examples_run_one_after_the_other(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    first, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 25
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    num_episodes, mean, longest = capsys.readouterr().out.split()
    assert int(num_episodes) > 100
    assert 10 < float(mean) < float(longest) <= 200
    assert others
    for code in others:
        exec(compile(code, "README.md", "exec"), names)
    evaluated, replayed = capsys.readouterr().out.splitlines()
    mean, low, high = (float(x) for x in evaluated.split())
    assert low < mean < high
    assert replayed == f"{64 * 128} (256, 4)"
    assert names["trajectory"].obs.shape == (200, 64, 4)
    assert (names["episodes"].episode_length <= 200).all()
    assert names["data"].size(names["offline"]) == 3
    # The training step learns.
    training = names["training"]
    for _ in range(10):
        *training, stats = names["ppo_step"](*training)
    assert stats.return_mean > 100


def test_continuous_integration_runs_the_command_of_the_readme():
    assert README.count("<!-- ci: test -->\n```bash\n") == 1
    assert "<!-- ci: test -->" in (ROOT / ".ci" / "run").read_text()


def test_picture_and_notebooks_that_are_named_exist():
    for name in re.findall(r"\]\((docs/[^)]+)\)|`(notebooks/[^`]+)`", README):
        assert (ROOT / "".join(name)).is_file(), name


def test_number_of_environments_is_that_of_gymnax():
    count = len(envs.env_ids())
    assert f"{count - 1} of the {count} work as they are" in README
