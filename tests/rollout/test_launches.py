"""Tests of upper bounds on kernel launches and waits of programs on an H100.

The numbers come from `benchmarks/accelerators.py`. The programs are compiled for an
absent GPU. This needs the extra `accelerators`; without it the tests are skipped.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rollout
from rollout import buffers, envs, inspection
from rollout.agents import team_transitions
from rollout.base.platform import BLOCK
from rollout.recipes import ppo

T, B, HIDDEN = 16, 2048, 64

slow = pytest.mark.slow
inspect = functools.partial(rollout.inspect_program, accelerator="h100")


def gpu(test):
    return slow(pytest.mark.compiles_for("h100")(test))


def make_collector(env_id="CartPole-v1", policy=None, **options):
    env = envs.make_vec(env_id, B, **options)
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy)


def carry_shapes(collector):
    return jax.eval_shape(lambda: collector.init(jax.random.key(0)))


def trajectory_shapes(collector, params):
    def steps(carry, params):
        return collector.collect_steps(carry, params, num_steps=T)[1]

    return jax.eval_shape(steps, carry_shapes(collector), params)


def param_shapes(num_inputs, num_actions):
    """Returns the shapes of an actor and a critic with two layers."""

    def mlp(num_outputs):
        sizes = (num_inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, num_outputs)
        return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    return {"actor": mlp(num_actions), "critic": mlp(1)}


def evaluate(params, obs):
    """Computes log-probabilities of actions, and values."""

    def mlp(first, second, last):
        return jnp.tanh(jnp.tanh(obs @ first) @ second) @ last

    log_probs = jax.nn.log_softmax(mlp(*params["actor"]))
    return log_probs, mlp(*params["critic"])[..., 0]


def action_log_prob(log_probs, action):
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


@rollout.stateless_policy
def learner(params, obs, key):
    log_probs, value = evaluate(params, obs.reshape(B, -1))
    action = jax.random.categorical(key, log_probs)
    return action, {"value": value, "log_prob": action_log_prob(log_probs, action)}


@gpu
@pytest.mark.parametrize(
    ("env_id", "policy", "params", "limit"),
    [
        ("CartPole-v1", None, None, 14),
        ("Breakout-MinAtar", learner, param_shapes(400, 3), 38),
    ],
)
def test_steps_need_few_launches(env_id, policy, params, limit):
    report = inspect(
        make_collector(env_id, policy), params, jax.random.key(0), num_steps=T
    )
    assert report.waits == ()
    assert report.per_step("launches") <= limit
    assert report.per_step("loose_launches") <= 2


@gpu
def test_collect_episodes_waits_once_per_eight_steps():
    collector = make_collector()

    def play(carry):
        counts = {"num_episodes": 2 * B, "max_episode_steps": 500}
        return collector.collect_episodes(carry, None, **counts)

    report = inspect(play, carry_shapes(collector))
    (wait,) = report.waits
    assert (wait.count, wait.per, wait.per_round) == (1, "round", False)
    (steps,) = (block for block in report.loop.blocks if block.kind == "loop")
    assert steps.trips == BLOCK == 8
    assert steps.total("launches") <= 29
    assert report.per_step("loose_launches") <= 2  # the predicate


@gpu
def test_replay_buffer_add_does_not_wait():
    collector = make_collector()
    buffer = buffers.ReplayBuffer(capacity=32 * B, num_envs=B)
    row = jax.eval_shape(collector.step, carry_shapes(collector), None)[1]
    state = jax.eval_shape(buffer.init, row)
    add = jax.jit(lambda state, row: buffer.add(state, row), donate_argnums=0)
    report = inspect(add, state, row)
    assert report.waits == ()
    assert report.program.total("launches") <= 20


@gpu
def test_gae_needs_few_launches():
    t = trajectory_shapes(make_collector(policy=learner), param_shapes(4, 2))
    value, fn = (
        t.extras["value"],
        functools.partial(rollout.gae, gamma=0.99, lambda_=0.95),
    )
    report = inspect(fn, t.reward, value, value, t.terminated, t.truncated)
    assert report.waits == ()
    assert report.program.total("launches") <= 4 * T


@gpu
def test_ppo_update_needs_few_launches():
    """16 gradient steps have 69 launches each, and 128 time steps have 20.5."""
    env = envs.make_vec("CartPole-v1", num_envs=B)
    agent = ppo.PPO(env, ppo.Config(num_updates=1, num_minibatches=4))
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    report = inspect(agent.update, state)
    assert report.waits == ()
    assert report.program.total("loose_launches") == 0
    assert report.program.total("graph_launches") <= 4_000
    assert report.program.total("seconds") <= 0.0097


@gpu
def test_ppo_update_on_eight_devices_needs_few_launches():
    """A gradient step has 78 launches, of which 13 are not in a graph."""
    mesh = jax.sharding.Mesh(np.array(inspection.devices("h100", 8)), ("lanes",))
    env = envs.make_vec("CartPole-v1", num_envs=B)
    config = ppo.Config(num_updates=1, num_minibatches=4)
    agent = ppo.PPO(env, config, mesh=mesh)
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    sharding = agent.collector.env.sharding

    def with_sharding(tree, shardings):
        return jax.tree.map(
            lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y),
            tree,
            shardings,
        )

    carry = with_sharding(state.carry, sharding.shardings(state.carry))
    state = state.replace(carry=())
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    state = with_sharding(state, jax.tree.map(lambda _: replicated, state))
    report = inspect(agent.update, state.replace(carry=carry))
    assert report.num_devices == 8
    assert report.waits == ()
    assert report.program.total("launches") <= 4_200
    assert report.program.total("loose_launches") <= 230
    assert report.program.total("seconds") <= 0.0097 / 3.5


@gpu
def test_permutations_need_few_launches():
    def orders(key):
        permute = jax.vmap(lambda key: rollout.permutation(key, 128 * B))
        return permute(jax.random.split(key, 4))

    report = inspect(orders, jax.eval_shape(lambda: jax.random.key(0)))
    assert report.waits == ()
    assert report.program.total("launches") <= 3
    assert report.program.total("seconds") <= 15e-6


@gpu
@pytest.mark.usefixtures("rank_promotion")  # MPE promotes ranks
def test_team_transitions_need_no_launches():
    pytest.importorskip("jaxmarl")
    env = envs.make("jaxmarl:MPE_simple_spread_v3")
    env = envs.vectorize(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    def steps(carry):
        return collector.collect_steps(carry, None, num_steps=T)

    def rows(carry):
        carry, trajectory = steps(carry)
        return carry, team_transitions((), trajectory)[1]

    plain, by_agent = (inspect(fn, carry_shapes(collector)) for fn in (steps, rows))
    assert by_agent.waits == plain.waits == ()
    assert by_agent.per_step("launches") <= plain.per_step("launches")
    assert by_agent.program.total("launches") <= plain.program.total("launches")


def lower(collector, *platforms):
    def steps(carry):
        return collector.collect_steps(carry, None, num_steps=T)

    traced = jax.jit(steps).trace(carry_shapes(collector))
    return traced.lower(lowering_platforms=platforms).as_text()


@slow
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_auto_reset_depends_on_the_lowering_platform(platform):
    """Programs are lowered for platforms without their devices."""
    loops = {
        auto_reset: lower(make_collector(auto_reset=auto_reset), platform).count(
            "while"
        )
        for auto_reset in ("auto", "compact", "select")
    }
    assert loops["select"] < loops["compact"]
    assert loops["auto"] == loops["compact" if platform == "cpu" else "select"]


@pytest.mark.parametrize(
    ("limit", "call"),
    [
        (30, lambda c, key: c.collect_steps(c.init(key), None, 16)),
        (
            42,
            lambda c, key: c.collect_episodes(
                c.init(key), None, 16, max_episode_steps=50
            ),
        ),
        (38, lambda c, key: rollout.evaluate(c, None, key, 16, max_episode_steps=50)),
    ],
)
def test_call_has_few_operations_outside_its_loop(limit, call):
    """Each operation is a launch on a GPU. The test counts them for the CPU."""
    call = jax.jit(functools.partial(call, make_collector(auto_reset="select")))
    # Fusions precede the optimizations that this option disables.
    options = {"xla_backend_optimization_level": 0}
    text = call.lower(jax.random.key(0)).compile(options).as_text()
    outside = text[text.index("\nENTRY") :].partition("\n}")[0]
    assert outside.count(" while(") == 1
    assert 0 < outside.count(" fusion(") <= limit
