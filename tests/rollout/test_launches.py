"""Launches of programs on an H100, and the places where they wait: upper bounds.

The numbers come from `benchmarks/accelerators.py`. The programs are compiled for
a GPU that is absent, with the extra `accelerators`, and skipped without it.
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


def make(env_id="CartPole-v1", policy=None, **options):
    env = envs.make_vec(env_id, B, **options)
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy)


def start(collector):
    return jax.eval_shape(lambda: collector.init(jax.random.key(0)))


def stacked(collector, params):
    def steps(carry, params):
        return collector.collect_steps(carry, params, num_steps=T)[1]

    return jax.eval_shape(steps, start(collector), params)


def weights(num_inputs, num_actions):
    """Shapes of an actor and a critic of two layers."""

    def mlp(num_outputs):
        sizes = (num_inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, num_outputs)
        return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    return {"actor": mlp(num_actions), "critic": mlp(1)}


def read(params, obs):
    """Log-probabilities of the actions, and values."""

    def mlp(first, second, last):
        return jnp.tanh(jnp.tanh(obs @ first) @ second) @ last

    log_probs = jax.nn.log_softmax(mlp(*params["actor"]))
    return log_probs, mlp(*params["critic"])[..., 0]


def choose(log_probs, action):
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


@rollout.stateless_policy
def learner(params, obs, key):
    log_probs, value = read(params, obs.reshape(B, -1))
    action = jax.random.categorical(key, log_probs)
    return action, {"value": value, "log_prob": choose(log_probs, action)}


@gpu
@pytest.mark.parametrize(
    ("env_id", "policy", "params", "most"),
    [
        ("CartPole-v1", None, None, 14),
        ("Breakout-MinAtar", learner, weights(400, 3), 38),
    ],
)
def test_steps_are_few_launches_in_graphs_without_a_wait(env_id, policy, params, most):
    report = inspect(make(env_id, policy), params, jax.random.key(0), num_steps=T)
    assert report.waits == ()
    assert report.per_step("launches") <= most
    assert report.per_step("loose_launches") <= 2


@gpu
def test_whole_episodes_wait_once_in_eight_steps_at_most():
    collector = make()

    def play(carry):
        counts = {"num_episodes": 2 * B, "max_episode_steps": 500}
        return collector.collect_episodes(carry, None, **counts)

    report = inspect(play, start(collector))
    (wait,) = report.waits
    assert (wait.count, wait.per, wait.per_round) == (1, "round", False)
    (steps,) = (block for block in report.loop.blocks if block.kind == "loop")
    assert steps.trips == BLOCK == 8
    assert steps.total("launches") <= 29
    assert report.per_step("loose_launches") <= 2  # the predicate's


@gpu
def test_adding_to_a_replay_buffer_does_not_wait():
    collector = make()
    buffer = buffers.ReplayBuffer(capacity=32 * B, num_envs=B)
    row = jax.eval_shape(collector.step, start(collector), None)[1]
    state = jax.eval_shape(buffer.init, row)
    add = jax.jit(lambda state, row: buffer.add(state, row), donate_argnums=0)
    report = inspect(add, state, row)
    assert report.waits == ()
    assert report.program.total("launches") <= 20


@gpu
def test_advantages_are_few_launches_without_a_wait():
    t = stacked(make(policy=learner), weights(4, 2))
    value, fn = (
        t.extras["value"],
        functools.partial(rollout.gae, gamma=0.99, lambda_=0.95),
    )
    report = inspect(fn, t.reward, value, value, t.terminated, t.truncated)
    assert report.waits == ()
    assert report.program.total("launches") <= 4 * T


@gpu
def test_update_of_ppo_is_one_graph_after_another():
    """Few launches, nearly all in graphs: 16 gradient steps of 69, 128 of 20.5."""
    env = envs.make_vec("CartPole-v1", num_envs=B)
    agent = ppo.PPO(env, ppo.Config(num_updates=1, num_minibatches=4))
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    report = inspect(agent.update, state)
    assert report.waits == ()
    assert report.program.total("loose_launches") == 0
    assert report.program.total("graph_launches") <= 4_000
    assert report.program.total("seconds") <= 0.0097


@gpu
def test_update_of_ppo_on_eight_devices_waits_for_nothing_but_its_sums():
    """A gradient step has 78 launches, 69 on one device; 13 are not in a graph."""
    mesh = jax.sharding.Mesh(np.array(inspection.devices("h100", 8)), ("lanes",))
    env = envs.make_vec("CartPole-v1", num_envs=B)
    config = ppo.Config(num_updates=1, num_minibatches=4)
    agent = ppo.PPO(env, config, mesh=mesh)
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    sharding = agent.collector.env.sharding

    def place(tree, shardings):
        return jax.tree.map(
            lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y),
            tree,
            shardings,
        )

    carry = place(state.carry, sharding.shardings(state.carry))
    state = state.replace(carry=())
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    state = place(state, jax.tree.map(lambda _: everywhere, state))
    report = inspect(agent.update, state.replace(carry=carry))
    assert report.num_devices == 8
    assert report.waits == ()
    assert report.program.total("launches") <= 4_200
    assert report.program.total("loose_launches") <= 230
    assert report.program.total("seconds") <= 0.0097 / 3.5


@gpu
def test_order_of_minibatches_is_few_launches():
    def orders(key):
        draw = jax.vmap(lambda key: rollout.permutation(key, 128 * B))
        return draw(jax.random.split(key, 4))

    report = inspect(orders, jax.eval_shape(lambda: jax.random.key(0)))
    assert report.waits == ()
    assert report.program.total("launches") <= 3
    assert report.program.total("seconds") <= 15e-6


@gpu
@pytest.mark.usefixtures("rank_promotion")  # as MPE does
def test_rows_of_a_team_are_no_launch_more_than_the_trajectory():
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

    plain, by_agent = (inspect(fn, start(collector)) for fn in (steps, rows))
    assert by_agent.waits == plain.waits == ()
    assert by_agent.per_step("launches") <= plain.per_step("launches")
    assert by_agent.program.total("launches") <= plain.program.total("launches")


def lower(collector, *platforms):
    def steps(carry):
        return collector.collect_steps(carry, None, num_steps=T)

    traced = jax.jit(steps).trace(start(collector))
    return traced.lower(lowering_platforms=platforms).as_text()


@slow
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_auto_reset_is_that_of_the_platform_that_is_lowered_for(platform):
    """The machine need not have the accelerator: here it has a CPU."""
    loops = {
        auto_reset: lower(make(auto_reset=auto_reset), platform).count("while")
        for auto_reset in ("auto", "compact", "select")
    }
    assert loops["select"] < loops["compact"]
    assert loops["auto"] == loops["compact" if platform == "cpu" else "select"]


@pytest.mark.parametrize(
    ("most", "call"),
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
def test_call_runs_few_operations_outside_its_loop(most, call):
    """Each is a launch on a GPU; counted in a program for the CPU, which is here."""
    call = jax.jit(functools.partial(call, make(auto_reset="select")))
    # Fusions are made before the optimizations that this leaves out.
    options = {"xla_backend_optimization_level": 0}
    text = call.lower(jax.random.key(0)).compile(options).as_text()
    outside = text[text.index("\nENTRY") :].partition("\n}")[0]
    assert outside.count(" while(") == 1
    assert 0 < outside.count(" fusion(") <= most
