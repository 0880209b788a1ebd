"""The contract of all suite adapters, parametrized by environment."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import plain_suites
import pytest
import suite_checks

import rollout
from rollout import envs

# Fixtures that allow key reuse or rank promotion within a suite.
FIXTURES = {
    "gymnax": (),
    "brax": ("rank_promotion",),
    "craftax": ("key_reuse", "rank_promotion"),
    "jaxmarl": ("key_reuse", "rank_promotion"),
    # `vmap` executes both branches of a condition with the same key.
    "jumanji": ("key_reuse", "rank_promotion"),
    "navix": ("key_reuse", "rank_promotion"),
    "pgx": ("key_reuse",),
    "physics": (),  # a suite in the style of brax and Playground
    "playground": ("rank_promotion",),
    "xminigrid": ("key_reuse",),
}
MODULES = {
    "brax": "brax.envs",
    "physics": "rollout.envs.suites.physics",
    "playground": "mujoco_playground",
}
QUICK_CASES = ("physics:custom",)
QUICK_GAMES = ("pgx:tic_tac_toe",)
# Craftax compiles for minutes. The other suites here have a second environment.
VERY_SLOW = ("craftax:", "navix:Navix-Dynamic-", "xminigrid:MiniGrid-MemoryS8")


def parametrize_envs(names, quick=()):
    """Parametrizes a test; importing most suites takes seconds."""
    marks = {
        name: [pytest.mark.slow] * (name not in quick)
        + [pytest.mark.very_slow] * name.startswith(VERY_SLOW)
        for name in names
    }
    return pytest.mark.parametrize(
        "env_id", [pytest.param(name, marks=marks[name]) for name in names]
    )


@pytest.fixture(autouse=True)
def suite(request):
    """Skips missing suites, and applies the fixtures of the suite."""
    name = request.getfixturevalue("env_id").partition(":")[0]
    plain_suites.import_quietly(MODULES.get(name, name))
    for fixture in ("quick_compile", *FIXTURES[name]):
        request.getfixturevalue(fixture)
    return name


class Case(NamedTuple):
    """An environment and the settings of its comparison with a plain loop.

    Attributes:
        plain: function that makes the plain loop from the id within the suite.
        options: keyword arguments of `plain`.
        endings: names of the flags that occur.
        action_mask_fn: action mask of the random policy.
        limit: number of steps of a `TimeLimit`; 0 adds no limit.
        num_steps: steps per lane.
        atol: absolute tolerance of floats, if programs round differently.
    """

    plain: Callable[..., plain_suites.Plain]
    options: dict[str, Any] = {}  # noqa: RUF012
    endings: tuple[str, ...] = ("terminated", "truncated")
    action_mask_fn: Callable | None = None
    limit: int = 0
    num_steps: int = 250
    atol: float = 0.0


def get_mask(obs):
    return obs["action_mask"] if isinstance(obs, dict) else obs.action_mask


SNAKE = {"num_rows": 4, "num_cols": 4, "time_limit": 12}
OPPONENT = {"opponent": plain_suites.first_valid_action, "params": 1}
TERMINATED, TRUNCATED = ("terminated",), ("truncated",)
CRAFTAX = "craftax:Craftax-Classic-Symbolic-v1"
CASES = {
    "gymnax:CartPole-v1": Case(
        plain_suites.gymnax, {"max_steps_in_episode": 20}, atol=1e-6
    ),
    # This limit truncates about half of the episodes.
    "brax:inverted_pendulum": Case(plain_suites.brax, limit=5, atol=1e-5),
    CRAFTAX: Case(plain_suites.craftax, {"limit": 60}, atol=1e-5),
    "jumanji:Snake-v1": Case(plain_suites.jumanji, SNAKE, TERMINATED, get_mask),
    "navix:Navix-Empty-Random-5x5-v0": Case(plain_suites.navix),
    # Obstacles move randomly.
    "navix:Navix-Dynamic-Obstacles-5x5-v0": Case(plain_suites.navix),
    "physics:custom": Case(plain_suites.custom_physics, {}, TERMINATED, num_steps=9),
    "pgx:tic_tac_toe": Case(plain_suites.pgx_seat, {}, TERMINATED, get_mask),
    "pgx:kuhn_poker": Case(
        plain_suites.pgx_seat, OPPONENT, TERMINATED, get_mask, num_steps=50
    ),
    "pgx:2048": Case(plain_suites.pgx_seat, {}, (), get_mask, num_steps=50),
    # jax 0.10 rounds some entries of the rotations differently within its loop. All
    # values are at most 10, and most are below 1.
    "playground:CartpoleBalance": Case(
        plain_suites.playground, {}, TRUNCATED, limit=40, atol=1e-5
    ),
    # The reward is a product of floats.
    "xminigrid:MiniGrid-EmptyRandom-5x5": Case(plain_suites.xminigrid, atol=1e-6),
    "xminigrid:MiniGrid-MemoryS8": Case(plain_suites.xminigrid, atol=1e-6),
}
AGENT_CASES = {
    "jaxmarl:switch_riddle": Case(plain_suites.jaxmarl),
    "jaxmarl:MPE_simple_spread_v3": Case(
        plain_suites.jaxmarl, {"max_steps": 3}, TRUNCATED
    ),
    "jumanji:LevelBasedForaging-v0": Case(plain_suites.jumanji_team, {}, ()),
    "pgx:tic_tac_toe": Case(plain_suites.pgx_game, {}, TERMINATED, get_mask),
    "pgx:connect_four": Case(plain_suites.pgx_game, {}, TERMINATED, get_mask),
}


def make_plain_env(cases, env_id):
    case = cases[env_id]
    return case.plain(env_id.partition(":")[2], **case.options)


@functools.cache
def collect_case(env_id):
    """Returns the environment and the rows of four lanes."""
    case, env = CASES[env_id], make_plain_env(CASES, env_id).adapt()
    env = envs.TimeLimit(env, case.limit) if case.limit else env
    vector = envs.vectorize(env, 4)
    return env, suite_checks.collect(
        vector, case.action_mask_fn, num_steps=case.num_steps
    )


@parametrize_envs(CASES, quick=QUICK_CASES)
def test_rows_equal_plain_loop(env_id):
    case, (_, rows) = CASES[env_id], collect_case(env_id)
    plain = make_plain_env(CASES, env_id)
    suite_checks.check_plain_loop_parity(rows, plain, limit=case.limit, atol=case.atol)


@parametrize_envs(CASES, quick=QUICK_CASES)
def test_flags_and_successors_at_endings(env_id):
    _, rows = collect_case(env_id)
    endings = {"terminated": rows.terminated.any(), "truncated": rows.truncated.any()}
    assert {name for name, occurs in endings.items() if occurs} == set(
        CASES[env_id].endings
    )
    suite_checks.check_successors(rows)


def check_adapter(adapt, is_hashed=True):
    """Checks that adapters of one object share a program and reject other objects."""
    structure, other_structure = (jax.tree.structure(adapt()) for _ in range(2))
    assert (structure == other_structure) == is_hashed
    assert hash(structure) == hash(other_structure) or not is_hashed
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        adapt.func(object(), *adapt.args[1:], **adapt.keywords)


@parametrize_envs(CASES, quick=QUICK_CASES)
def test_adapters_of_equal_objects_share_structure(env_id, suite):
    # Grids of navix cannot be compared.
    check_adapter(make_plain_env(CASES, env_id).adapt, is_hashed=suite != "navix")


@parametrize_envs(AGENT_CASES, quick=QUICK_GAMES)
def test_agent_steps_equal_plain_loop(env_id):
    case, plain = AGENT_CASES[env_id], make_plain_env(AGENT_CASES, env_id)
    step = suite_checks.check_steps_of_agents(plain, case.action_mask_fn, num_steps=42)
    assert step.episode_terminated | step.episode_truncated | (case.endings == ())
    check_adapter(plain.adapt)


# Issues of the suites.
KNOWN_ISSUES = {
    CRAFTAX: {"key"},  # a reset uses a key twice
    "physics:custom": {"ending"},  # every episode terminates at step 2
    "jumanji:Snake-v1": {"obs"},  # the bound of the step count is too small
}


# One environment per suite: all environments of a suite sample and end alike.
CHECKED = {x.partition(":")[0]: x for x in (*AGENT_CASES, *CASES)}


@pytest.mark.very_slow  # the checker compiles many programs
@parametrize_envs(sorted({"jumanji:LevelBasedForaging-v0", *CHECKED.values()}))
def test_check_env_reports_known_issues_only(env_id):
    for cases in (CASES, AGENT_CASES):
        if env_id in cases:
            case, env = cases[env_id], make_plain_env(cases, env_id).adapt()
            env = envs.TimeLimit(env, case.limit or 60)
            issues = rollout.check_env(env, num_steps=100)
            assert {x.name for x in issues} == KNOWN_ISSUES.get(env_id, set()), issues


# Action spaces of the environments that `make` returns.
ACTION_SPACES = {
    "brax:inverted_pendulum": envs.Box(-1.0, 1.0, (1,)),
    "craftax:Craftax-Symbolic-v1": envs.Discrete(43),
    "jumanji:FlatPack-v0": envs.spaces.MultiDiscrete((25, 4, 9, 9)),
    "jumanji:MultiCVRP-v0": envs.spaces.MultiDiscrete((22, 22), np.dtype("int16")),
    "navix:Navix-DoorKey-5x5-v0": envs.Discrete(7),
    "pgx:2048": envs.Discrete(4),
    "playground:PendulumSwingup": envs.Box(-1.0, 1.0, (1,)),
    "xminigrid:XLand-MiniGrid-R1-9x9": envs.Discrete(6),
}


@parametrize_envs(ACTION_SPACES)
def test_made_environment_satisfies_contract(env_id):
    env = envs.make(env_id)
    suite_checks.check_contract(env)
    assert env.action_space == ACTION_SPACES[env_id]
    assert envs.make(env_id) is env  # equal objects share a program


@parametrize_envs([*ACTION_SPACES, "jaxmarl:switch_riddle"])
def test_ids_are_listed_and_unknown_options_raise(env_id, suite):
    assert env_id in envs.env_ids(suite)
    with pytest.raises(ValueError, match="nonsense"):
        envs.make(env_id, nonsense=3)


RENDERED = [x for x in CASES if not x.startswith(("gymnax", "pgx", "physics"))]


@parametrize_envs(RENDERED)
def test_states_are_rendered(env_id, suite):
    if suite in ("brax", "playground"):
        suite_checks.check_render_with_egl(env_id)
    else:
        suite_checks.check_render(make_plain_env(CASES, env_id).adapt())
