"""What the adapter of every suite keeps, by suite and environment."""

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

# What the suites do with keys and ranks, and tests are not allowed otherwise.
FIXTURES = {
    "gymnax": (),
    "brax": ("rank_promotion",),
    "craftax": ("key_reuse", "rank_promotion"),
    "jaxmarl": ("key_reuse", "rank_promotion"),
    # `vmap` computes both of two branches that draw from one key.
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
OWN = ("physics:own",)
QUICK = ("pgx:tic_tac_toe",)


def each(names, quick=()):
    """Parametrizes a test; importing most suites takes seconds."""
    slow = functools.partial(pytest.param, marks=pytest.mark.slow)
    return pytest.mark.parametrize(
        "env_id", [x if x in quick else slow(x) for x in names]
    )


@pytest.fixture(autouse=True)
def suite(request):
    """Skips what is not installed, and allows what the suite does."""
    name = request.getfixturevalue("env_id").partition(":")[0]
    plain_suites.import_quietly(MODULES.get(name, name))
    for fixture in ("quick_compile", *FIXTURES[name]):
        request.getfixturevalue(fixture)
    return name


class Case(NamedTuple):
    """An environment, and how its rows are compared.

    Attributes:
        plain: makes the plain loop of the suite's own id.
        options: of `plain`.
        endings: those that occur.
        action_mask_fn: of the random policy.
        limit: of a `TimeLimit`.
        num_steps: steps per lane.
        atol: how far floats may be off, where another program rounds otherwise.
    """

    plain: Callable[..., plain_suites.Plain]
    options: dict[str, Any] = {}  # noqa: RUF012
    endings: tuple[str, ...] = ("terminated", "truncated")
    action_mask_fn: Callable | None = None
    limit: int = 0
    num_steps: int = 250
    atol: float = 0.0


def mask_of(obs):
    return obs["action_mask"] if isinstance(obs, dict) else obs.action_mask


SNAKE = {"num_rows": 4, "num_cols": 4, "time_limit": 12}
ANSWERS = {"opponent": plain_suites.first_valid_action, "params": 1}
TERMINATED, TRUNCATED = ("terminated",), ("truncated",)
CRAFTAX = "craftax:Craftax-Classic-Symbolic-v1"
CASES = {
    "gymnax:CartPole-v1": Case(
        plain_suites.gymnax, {"max_steps_in_episode": 20}, atol=1e-6
    ),
    # With this limit, about half of the episodes are truncated.
    "brax:inverted_pendulum": Case(plain_suites.brax, limit=5, atol=1e-5),
    CRAFTAX: Case(plain_suites.craftax, {"limit": 60}, atol=1e-5),
    "jumanji:Snake-v1": Case(plain_suites.jumanji, SNAKE, TERMINATED, mask_of),
    "navix:Navix-Empty-Random-5x5-v0": Case(plain_suites.navix),
    # Obstacles move by chance.
    "navix:Navix-Dynamic-Obstacles-5x5-v0": Case(plain_suites.navix),
    "physics:own": Case(plain_suites.custom_physics, {}, TERMINATED, num_steps=9),
    "pgx:tic_tac_toe": Case(plain_suites.pgx_seat, {}, TERMINATED, mask_of),
    "pgx:kuhn_poker": Case(
        plain_suites.pgx_seat, ANSWERS, TERMINATED, mask_of, num_steps=50
    ),
    "pgx:2048": Case(plain_suites.pgx_seat, {}, (), mask_of, num_steps=50),
    # jax 0.10 rounds some entries of the rotations otherwise within its loop; nothing
    # here is greater than 10, and most is below 1.
    "playground:CartpoleBalance": Case(
        plain_suites.playground, {}, TRUNCATED, limit=40, atol=1e-5
    ),
    # The reward is a product of floats.
    "xminigrid:MiniGrid-EmptyRandom-5x5": Case(plain_suites.xminigrid, atol=1e-6),
    "xminigrid:MiniGrid-MemoryS8": Case(plain_suites.xminigrid, atol=1e-6),
}
AGENTS = {
    "jaxmarl:switch_riddle": Case(plain_suites.jaxmarl),
    "jaxmarl:MPE_simple_spread_v3": Case(
        plain_suites.jaxmarl, {"max_steps": 3}, TRUNCATED
    ),
    "jumanji:LevelBasedForaging-v0": Case(plain_suites.jumanji_team, {}, ()),
    "pgx:tic_tac_toe": Case(plain_suites.pgx_game, {}, TERMINATED, mask_of),
    "pgx:connect_four": Case(plain_suites.pgx_game, {}, TERMINATED, mask_of),
}


def plain_of(cases, env_id):
    case = cases[env_id]
    return case.plain(env_id.partition(":")[2], **case.options)


@functools.cache
def rows_of(env_id):
    """The rows of four lanes."""
    case, env = CASES[env_id], plain_of(CASES, env_id).adapt()
    env = envs.TimeLimit(env, case.limit) if case.limit else env
    vector = envs.vectorize(env, 4)
    return env, suite_checks.collect(
        vector, case.action_mask_fn, num_steps=case.num_steps
    )


@each(CASES, quick=OWN)
def test_rows_are_those_of_a_plain_loop(env_id):
    case, (_, rows) = CASES[env_id], rows_of(env_id)
    plain = plain_of(CASES, env_id)
    suite_checks.check_plain_loop_parity(rows, plain, limit=case.limit, atol=case.atol)


@each(CASES, quick=OWN)
def test_episodes_end_by_both_flags_with_true_successors(env_id):
    _, rows = rows_of(env_id)
    endings = {"terminated": rows.terminated.any(), "truncated": rows.truncated.any()}
    assert {name for name, occurs in endings.items() if occurs} == set(
        CASES[env_id].endings
    )
    suite_checks.check_successors(rows)


def check_adapter(adapt, is_hashed=True):
    """Checks that adapters of one object are one program, and what they refuse."""
    one, other = (jax.tree.structure(adapt()) for _ in range(2))
    assert (one == other) == is_hashed
    assert hash(one) == hash(other) or not is_hashed
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        adapt.func(object(), *adapt.args[1:], **adapt.keywords)


@each(CASES, quick=OWN)
def test_adapter_is_one_program_and_refuses_other_objects(env_id, suite):
    # Grids of navix cannot be compared.
    check_adapter(plain_of(CASES, env_id).adapt, is_hashed=suite != "navix")


@each(AGENTS, quick=QUICK)
def test_steps_of_agents_are_those_of_a_plain_loop(env_id):
    case, plain = AGENTS[env_id], plain_of(AGENTS, env_id)
    step = suite_checks.check_steps_of_agents(plain, case.action_mask_fn, num_steps=42)
    assert step.episode_terminated | step.episode_truncated | (case.endings == ())
    check_adapter(plain.adapt)


# What the suites do themselves.
MISTAKEN = {
    CRAFTAX: {"key"},  # a reset uses one twice
    "jumanji:Snake-v1": {"obs"},  # one step too few for the last successor
}


# One environment of a suite, which draws and ends as its others do.
PROBED = {x.partition(":")[0]: x for x in (*AGENTS, *CASES)}


@each(sorted({"jumanji:LevelBasedForaging-v0", *PROBED.values()}))
def test_probe_finds_only_the_mistakes_of_the_suite(env_id):
    for cases in (CASES, AGENTS):
        if env_id in cases:
            case, env = cases[env_id], plain_of(cases, env_id).adapt()
            env = envs.TimeLimit(env, case.limit or 60)
            issues = rollout.check_env(env, num_steps=100)
            assert {x.name for x in issues} == MISTAKEN.get(env_id, set()), issues


# The actions of what `make` returns.
SPACES = {
    "brax:inverted_pendulum": envs.Box(-1.0, 1.0, (1,)),
    "craftax:Craftax-Symbolic-v1": envs.Discrete(43),
    "jumanji:FlatPack-v0": envs.spaces.MultiDiscrete((25, 4, 9, 9)),
    "jumanji:MultiCVRP-v0": envs.spaces.MultiDiscrete((22, 22), np.dtype("int16")),
    "navix:Navix-DoorKey-5x5-v0": envs.Discrete(7),
    "pgx:2048": envs.Discrete(4),
    "playground:PendulumSwingup": envs.Box(-1.0, 1.0, (1,)),
    "xminigrid:XLand-MiniGrid-R1-9x9": envs.Discrete(6),
}


@each(SPACES)
def test_environment_made_by_its_id_keeps_the_contract(env_id):
    env = envs.make(env_id)
    suite_checks.check_contract(env)
    assert env.action_space == SPACES[env_id]
    assert envs.make(env_id) is env  # so it is one program


@each([*SPACES, "jaxmarl:switch_riddle"])
def test_ids_are_listed_and_unknown_options_refused(env_id, suite):
    assert env_id in envs.env_ids(suite)
    with pytest.raises(ValueError, match="nonsense"):
        envs.make(env_id, nonsense=3)


DRAWN = [x for x in CASES if not x.startswith(("gymnax", "pgx", "physics"))]


@each(DRAWN)
def test_states_are_drawn(env_id, suite):
    if suite in ("brax", "playground"):
        suite_checks.check_render_with_egl(env_id)
    else:
        suite_checks.check_render(plain_of(CASES, env_id).adapt())
