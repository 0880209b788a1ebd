"""Pages for those who come from another library: code runs, tables tell the truth."""

import pathlib
import re

import numpy as np
import pytest
from pages import blocks, run

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "coming_from"
TEXTS = {page.stem: page.read_text() for page in sorted(FOLDER.glob("*.md"))}


def check_purejaxrl(names, out):
    assert float(names["stats"].num_steps) == 64 * 128
    num_episodes, mean = (float(x) for x in out.split())
    assert num_episodes > 100
    assert 10 < mean < 40


def check_tianshou(names, out):
    stored, evaluated = out.splitlines()
    assert int(stored) == 8 * (100 + 20 * 7)
    assert evaluated.split()[0] == "20"
    assert 8 < float(evaluated.split()[1]) <= 500
    rows, mask = names["buffer"].dump(names["state"])
    assert mask[:240].all()
    assert not mask[240:].any()
    share = np.asarray(rows.action)[:100].mean()  # the random ones
    assert 0.4 < share < 0.6
    np.testing.assert_array_equal(  # the buffer has the successors, also at endings
        np.asarray(rows.obs)[1:240][~np.asarray(rows.done)[:239]],
        np.asarray(rows.next_obs)[:239][~np.asarray(rows.done)[:239]],
    )


def check_torchrl(names, out):
    assert out.splitlines() == [
        f"{[102] * 9 + [84]} 1002 1002 (128, 4)",
        f"{[102, 102, 48] + [0] * 7} 252",
    ]
    rows, mask = names["buffer"].dump(names["state"])
    assert mask.sum(axis=0).tolist() == [167] * 6
    assert (np.asarray(rows.episode_length)[np.asarray(mask)] <= 200).all()


def check_jaxmarl(names, out):
    num_episodes, mean = out.split()
    assert num_episodes == "256"  # 64 lanes of 4 episodes of 26 steps, and 24 steps
    assert -40 < float(mean) < -20
    stats = names["stats"]
    assert set(stats.agents) == {"agent_0", "agent_1", "agent_2"}
    (code,) = blocks(TEXTS["jaxmarl"], "text")
    exec(code, names)
    assert names["win_rate"] == 0  # nothing to win in simple spread


def check_rllib(names, out):
    counts, learner, rival = (line.split() for line in out.splitlines())
    assert counts == ["96", "1000", "1000"]  # 8 lanes of 12.5 episodes of ten rounds
    assert learner[0] == "learner"
    assert rival[0] == "rival"
    assert float(learner[1]) == -float(rival[1])  # what one wins, the other loses
    assert learner[2] == rival[2] == "10.0"
    mine = names["mine"]
    assert mine.truncated[mine.mask].sum() == 96
    assert not mine.terminated.any()
    sides = np.asarray(mine.mask).reshape(125, 8, 2)
    assert (sides.sum(axis=-1) == 1).all()  # it sits on one side of every game
    assert sides.any(axis=(0, 1)).all()  # and on either side of some


def check_easyrl4rec(names, out):
    first, *settings = out.splitlines()
    assert first == "[10 10 10 10 10 10 10 10] 80"
    rows, mask = names["buffer"].dump(names["state"])
    assert mask.sum() == 80
    for lane in range(8):  # one episode each, in which no item comes twice
        assert len(set(np.asarray(rows.action)[np.asarray(mask)[:, lane], lane])) == 10
    assert rows.truncated.sum() == 8
    assert not rows.terminated.any()
    assert [line.split()[0] for line in settings] == ["FB", "NX_0", "NX_10"]
    assert settings[2].split()[1] == "10.0"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "rank_promotion")  # as JaxMARL's MPE does
@pytest.mark.parametrize("name", TEXTS)
def test_code_here_runs_and_does_what_is_said(name, capsys):
    (code,) = blocks(TEXTS[name])
    names = run(f"docs/coming_from/{name}.md", code)
    check = globals()[f"check_{name}"]  # of the same name
    check(names, capsys.readouterr().out)


@pytest.mark.parametrize("name", TEXTS)
def test_programs_and_pages_are_short(name):
    (there,), (here,) = blocks(TEXTS[name], "py"), blocks(TEXTS[name])
    compile(there, name, "exec")
    lengths = [len(re.findall(r"^.*\S", code, re.MULTILINE)) for code in (there, here)]
    assert 20 <= min(lengths) <= max(lengths) <= 50
    assert 100 <= len(TEXTS[name].splitlines()) <= 205
