"""Tests of agents on several devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from recipe_cases import in_ci

import rollout
from rollout import checkpoint, envs
from rollout.recipes import dqn, load, ppo, pqn, recurrent_ppo, run, sac, td3

B = 64
SMALL = {"hidden_layer_sizes": (16,), "num_steps": 8}
OFF_POLICY = {"buffer_size": 16 * B, "learning_starts": B, "batch_size": 32}


def make_mesh(num_devices):
    if num_devices is None:
        return None
    return jax.make_mesh(
        (num_devices,), ("lanes",), devices=jax.devices()[:num_devices]
    )


def make_ppo(mesh, env_id="CartPole-v1", num_envs=B, **config):
    config = ppo.Config(**{"num_minibatches": 4, "num_epochs": 2, **SMALL, **config})
    return ppo.PPO(envs.make_vec(env_id, num_envs), config, mesh=mesh)


def make_recurrent_ppo(mesh, **config):
    options = {"num_minibatches": 4, "num_epochs": 2, "num_steps": 8, **config}
    env = envs.make_vec("CartPole-v1", B)
    config = recurrent_ppo.Config(**options)
    return recurrent_ppo.RecurrentPPO(env, config, mesh=mesh)


def make_pqn(mesh, **config):
    config = pqn.Config(**{"num_minibatches": 4, "num_epochs": 2, **SMALL, **config})
    return pqn.PQN(envs.make_vec("CartPole-v1", B), config, mesh=mesh)


def make_dqn(mesh, **config):
    options = {"prioritized": False, "gradient_steps": 2, **SMALL, **OFF_POLICY}
    config = dqn.Config(**{**options, **config})
    return dqn.DQN(envs.make_vec("CartPole-v1", B), config, mesh=mesh)


def make_sac(mesh, **config):
    config = sac.Config(**{**SMALL, **OFF_POLICY, **config})
    return sac.SAC(envs.make_vec("Pendulum-v1", B), config, mesh=mesh)


def make_td3(mesh, **config):
    config = td3.Config(**{**SMALL, **OFF_POLICY, **config})
    return td3.TD3(envs.make_vec("Pendulum-v1", B), config, mesh=mesh)


AGENTS = {
    "PPO": make_ppo,
    "recurrent PPO": make_recurrent_ppo,
    "PQN": make_pqn,
    "DQN": make_dqn,
    "SAC": make_sac,
    "TD3": make_td3,
}


def update_once(agent):
    """Returns the state after one update, and the metrics, as NumPy arrays."""
    state, metrics = quick_jit(agent.update)(agent.init(jax.random.key(0)))
    carry = rollout.base.trees.unwrap_keys(state.carry)
    return jax.device_get((state.params, state.opt_state, metrics, carry))


def check_close(got, expected, **tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


ONE_BATCH = {"num_minibatches": 1, "num_epochs": 1}
EXACT = {
    "PPO": functools.partial(make_ppo, **ONE_BATCH),
    "continuous PPO, normalized observations": functools.partial(
        make_ppo, env_id="Pendulum-v1", normalize_observations=True, **ONE_BATCH
    ),
    "adaptive learning rate, KL limit": functools.partial(
        make_ppo, num_minibatches=1, num_epochs=3, desired_kl=1e-3, target_kl=1e-2
    ),
    "recurrent PPO": functools.partial(make_recurrent_ppo, **ONE_BATCH),
    "images": functools.partial(
        make_ppo, env_id="Breakout-MinAtar", cnn=True, **ONE_BATCH
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", in_ci("PPO", of=EXACT))
def test_update_with_one_minibatch_equals_one_device(name):
    """A minibatch of all rows does not depend on the number of devices."""
    make = EXACT[name]
    got, expected = (update_once(make(make_mesh(x))) for x in (4, None))
    check_close(got[:3], expected[:3], rtol=1e-4, atol=1e-5)
    # Episodes have the same bits, unless a network outputs the actions themselves.
    exact = {} if "continuous" in name else {"rtol": 0, "atol": 0}
    check_close(got[3], expected[3], **{"rtol": 1e-4, "atol": 1e-5, **exact})


@pytest.mark.slow
def test_mesh_of_one_device_has_the_same_bits():
    got, expected = (update_once(make_ppo(make_mesh(x))) for x in (1, None))
    check_close(got, expected, rtol=0, atol=0)


def collectives(text):
    """Yields the name and the operands of each collective."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for shapes, name in re.findall(rf" = (.*) ({names})(?:-start)?\(", text):
        operands = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        yield name, [(x, [*map(int, filter(None, y.split(",")))]) for x, y in operands]


@pytest.mark.slow
@pytest.mark.parametrize("name", in_ci("PPO", of=AGENTS))
def test_gradient_step_has_one_all_reduce(name):
    flops = {}
    # Each device repeats the optimizer. Its cost is small if there are many rows.
    is_off_policy = name in ("DQN", "SAC", "TD3")
    # XLA would count a loop over microbatches once; 960 rows are a single one.
    options = {"batch_size": 960} if is_off_policy else {"num_steps": 120}
    if name != "recurrent PPO":
        options["hidden_layer_sizes"] = (64, 64)
    if name in ("PPO", "PQN"):
        options["num_minibatches"] = 8
    for num_devices in (None, 4):
        agent = AGENTS[name](make_mesh(num_devices), **options)
        state = agent.init(jax.random.key(0))
        program = quick_jit(agent.update).lower(state).compile()
        flops[num_devices] = program.cost_analysis()["flops"]
    assert flops[4] < 1.1 / 4 * flops[None]

    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    num_sums, moved_shapes = 0, []
    for operation, operands in collectives(program.as_text()):
        size = sum(math.prod(shape) for dtype, shape in operands if dtype == "f32")
        num_sums += operation == "all-reduce" and size > 0.3 * num_params
        moved_shapes += operands if operation != "all-reduce" else []
    # TD3 has a gradient step for the critics, and one for the actor.
    assert num_sums == (2 if name == "TD3" else 1)
    # No rows move. The window of episodes reads one flag per row.
    assert moved_shapes == [("pred", [agent.config.num_steps, B])]

    new_state, metrics = program(state)
    assert new_state.carry.obs.sharding.spec[0] == "lanes"
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new_state.params))
    for x in jax.tree.leaves((new_state.params, new_state.opt_state, metrics)):
        assert x.sharding.is_fully_replicated
    with pytest.raises(AssertionError):
        check_close(new_state.params, state.params)


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_compile")
def test_run_resumes_on_another_number_of_devices(tmp_path):
    for num_updates, num_devices in ((2, 4), (4, None), (6, 2)):
        agent = make_ppo(make_mesh(num_devices), num_updates=num_updates)
        state, stats = run(
            agent,
            jax.random.key(0),
            folder=tmp_path,
            resume=True,
            num_eval_episodes=B,
        )
        assert int(state.num_updates) == num_updates
        assert int(stats.num_episodes) == B
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) == 7
    assert checkpoint.steps(tmp_path / "resume") == [6]
    loaded, saved = load(tmp_path, name="last")
    assert loaded.mesh is None
    assert loaded.predict(saved.params, np.zeros(4)) in (0, 1)
    check_close(saved.params, state.params, rtol=0, atol=0)


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_compile")
def test_training_starts_from_parameters_on_other_devices():
    params = None
    for num_devices in (1, 4, 2, None):
        agent = make_sac(make_mesh(num_devices), normalize_observations=True)
        state = agent.init(jax.random.key(0), params=params)
        if params is not None:
            actors = jax.device_get((params["actor"], state.params["actor"]))
            jax.tree.map(np.testing.assert_array_equal, *actors)
        params = jax.jit(agent.update, donate_argnums=0)(state)[0].params


def test_invalid_meshes_raise():
    mesh, env = make_mesh(4), envs.make_vec("CartPole-v1", B)
    agent = ppo.PPO(env)
    sharded = rollout.shard(agent.collector, mesh)
    mesh_2d = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    host = envs.from_gymnasium("CartPole-v1", 4)
    calls = {
        "`num_envs` must be a multiple of the 4 devices.*66.*64 or 68": lambda: (
            make_ppo(mesh, num_envs=66)
        ),
        "`mesh` must be a `jax.sharding.Mesh`": lambda: make_ppo(4),
        '`mesh` must have one axis, or an axis "lanes".*a, b': lambda: make_ppo(
            mesh_2d
        ),
        "`mesh` must be None for host environments.*4 devices": lambda: ppo.PPO(
            host, mesh=mesh
        ),
        "`network` must not be a mesh.*`mesh=mesh`": lambda: ppo.PPO(
            env, ppo.Config(), mesh
        ),
        "`config.prioritized` must be False with a `mesh`": lambda: make_dqn(
            mesh, prioritized=True
        ),
        r"`PPO\(env, config, mesh=mesh\)`": lambda: rollout.shard(agent, mesh),
        "`mesh` must be given to train with sharded lanes": lambda: ppo.PPO(
            sharded.env
        ).init(jax.random.key(0)),
        "not be sharded already": lambda: ppo.PPO(sharded.env, mesh=mesh).init(
            jax.random.key(0)
        ),
        "`batch_size` must be a multiple of the 4 devices.*30.*28 or 32": lambda: (
            update_once(make_dqn(mesh, batch_size=30))
        ),
        "`num_minibatches` must divide the 128 items of each device, got 5; the "
        "nearest are 4 and 8": lambda: update_once(make_ppo(mesh, num_minibatches=5)),
        "`num_minibatches` must divide the 16 items of each device, got 64; the "
        "nearest is 16": lambda: update_once(
            make_recurrent_ppo(mesh, num_minibatches=64)
        ),
    }
    host.close()
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_custom_vector_environment_raises():
    class Custom(envs.types.VectorEnv):
        num_envs = 4
        observation_space = action_space = envs.Discrete(2)

    agent = pqn.PQN(Custom(), mesh=make_mesh(4))
    with pytest.raises(ValueError, match=r"must be made by `rollout\.envs\.vectorize`"):
        agent.init(jax.random.key(0))


@pytest.mark.very_slow
def test_sharded_training_may_be_mapped_over_seeds():
    agent = make_ppo(make_mesh(2), **ONE_BATCH)
    keys = jax.random.split(jax.random.key(0), 2)
    train = lambda key: agent.train(agent.init(key), 2)[0].params  # noqa: E731
    got = jax.device_get(quick_jit(jax.vmap(train))(keys))
    for i, key in enumerate(keys):
        single = jax.device_get(quick_jit(train)(key))
        of_seed = jax.tree.map(lambda x, i=i: x[i], got)
        check_close(of_seed, single, rtol=1e-3, atol=1e-4)


def test_minibatch_step_receives_the_global_minibatch():
    """A mean over a minibatch in a custom method is the mean over all devices."""

    class MyPPO(ppo.PPO):
        def minibatch_step(self, learner, batch):
            learner, metrics = super().minibatch_step(learner, batch)
            return learner, {**metrics, "mean_target": batch.target.mean()}

    means = []
    for num_devices in (None, 4):
        agent = make_ppo(make_mesh(num_devices), **ONE_BATCH)
        agent = MyPPO(agent.env, agent.config, mesh=agent.mesh)
        means.append(float(update_once(agent)[2]["mean_target"]))
    assert means[0] == pytest.approx(means[1], rel=1e-5)
    assert jnp.isfinite(means[0])
