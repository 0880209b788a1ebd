import functools
import re

import bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector, make_env, raw
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rollout
from rollout import buffers, envs
from rollout.inspection import devices
from rollout.normalization import init_obs_stats, update_obs_stats

B = 16
T = 24
PARAMS = jnp.float32(0.3)
KEY = jax.random.key(5)


def make_mesh(num_devices, axis="lanes"):
    devices = jax.devices()[:num_devices]
    types = {"axis_types": (jax.sharding.AxisType.Auto,)}
    return jax.make_mesh((num_devices,), (axis,), devices=devices, **types)


ABSENT = [
    pytest.param("h100", 8, marks=pytest.mark.compiles_for("h100")),
    pytest.param("v5e", 4, marks=pytest.mark.compiles_for("v5e")),
]


def shard(collector, num_devices):
    return rollout.shard(collector, make_mesh(num_devices))


def make_case(env_id, policy, auto_reset="compact", num_envs=B):
    env = make_env(env_id)
    policy = bits.make_policy(policy, env.action_space)
    env = envs.vectorize(env, num_envs, auto_reset=auto_reset)
    return rollout.Collector(env=env, policy=policy)


def assert_close(got, want):
    """Compares floats up to rounding and all other leaves exactly."""
    for x, y in zip(jax.tree.leaves(raw(got)), jax.tree.leaves(raw(want)), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(x, y)


def assert_equal(got, want):
    got, want = jax.tree.leaves_with_path(raw(got)), jax.tree.leaves(raw(want))
    for (path, x), y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def collectives(program, *args):
    """Returns the collectives of a compiled program."""
    text = jax.jit(program).lower(*args).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf" ({names})(?:-start)?\(", text)


@struct.dataclass(kw_only=True)
class LevelEnv(CountEnv):
    """Adds the number of the episode to its first observation."""

    level: jax.Array = 0

    def at_episode(self, number):
        return self.replace(level=number)

    def reset(self, key):
        state, obs = super().reset(key)
        return state, obs + jnp.float32(self.level)


def make_limits():
    """Creates a collector whose lanes have different time limits."""
    env = jax.vmap(lambda limit: CountEnv(limit=limit))(3 + jnp.arange(B) % 5)
    return make_collector("count", B).replace(env=envs.vectorize_each(env))


def make_levels():
    return make_collector("count", B).replace(env=envs.vectorize(LevelEnv(), B))


# Collectors and numbers of devices.
CASES = {
    "recurrent": (functools.partial(make_case, "count", "recurrent"), (1, 4)),
    # CartPole divides by the same number several times.
    "division": (functools.partial(make_case, "CartPole-v1", "net"), (2, 8)),
    "parameters per lane": (make_limits, (4,)),
    "numbers of episodes": (make_levels, (4,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_collect_steps_has_the_bits_of_one_device(name):
    make, devices = CASES[name]
    collector = make()
    want = collector.collect_steps(collector.init(KEY), PARAMS, T)
    for num_devices in devices:
        sharded = shard(collector, num_devices)
        carry = sharded.init(KEY)
        assert_equal(carry, collector.init(KEY))
        assert_equal(sharded.collect_steps(carry, PARAMS, T), want)
    if name == "numbers of episodes":
        assert want[1].obs[0].ravel().tolist() == list(range(B))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("at_batch_end", ["reset", "truncate"])
def test_batch_ends_have_the_bits_of_one_device(at_batch_end):
    collector = make_case("count", "recurrent")
    options = {"max_episode_steps": 5, "at_batch_end": at_batch_end}
    results = []
    for shards in (collector, shard(collector, 4)):
        carry, _ = shards.collect_steps(shards.init(KEY), PARAMS, 3, **options)
        results.append(shards.collect_steps(carry, PARAMS, 7, **options))
    assert_equal(*results)


def run_methods(collector, carry):
    """Calls all methods except `collect_steps`."""
    buffer, limit = (
        buffers.ReplayBuffer(capacity=8 * B, num_envs=B),
        {"max_episode_steps": 15},
    )
    empty = buffer.init(jax.eval_shape(collector.step, carry, PARAMS)[1])
    args = carry, PARAMS
    return {
        "step": collector.step(*args),
        "fold": collector.fold_steps(*args, buffer.add, empty, num_steps=T),
        "episodes": collector.collect_episodes(*args, 3 * B + 1, **limit),
        "per env": collector.collect_episodes(*args, 2, **limit, per_env=True),
        "padded": collector.collect_episodes(
            *args, 2 * B + 3, max_episode_steps=15, return_trajectory=True
        ),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_every_method_has_the_bits_of_one_device():
    collector = make_case("count", "recurrent", "select")
    sharded = shard(collector, 2)
    got = run_methods(sharded, sharded.init(KEY))
    want = run_methods(collector, collector.init(KEY))
    for method in want:
        assert_equal(got[method], want[method])
    # Results without lanes are replicated, so every process can read them.
    for method in ("episodes", "per env", "padded"):
        for leaf in jax.tree.leaves(got[method][1:]):
            assert leaf.sharding.is_fully_replicated


def make_stream(collector, **options):
    options = {"steps_per_batch": 2 * B, "total_steps": 7 * B, **options}
    return rollout.Stream(collector, key=KEY, params=PARAMS, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("num_before", "num_after"), [(2, 4), (2, 0)])
def test_stream_resumes_on_another_number_of_devices(num_before, num_after, tmp_path):
    collector = make_case("count", "recurrent")  # a policy that explores
    policy = rollout.policies.RandomWarmup(
        collector.policy, collector.env.action_space, 3
    )
    collector = collector.replace(policy=policy)
    options = {"reuse_memory": not num_after}
    first, second, plain = (
        make_stream(shard(collector, num) if num else collector, **options)
        for num in (num_before, num_after, 0)
    )
    for _ in range(2):
        assert_equal(next(first).trajectory, next(plain).trajectory)
    rollout.checkpoint.save(tmp_path, first.state())
    second.restore(rollout.checkpoint.restore(tmp_path, second.state()))
    for got, want in zip(second, plain, strict=True):
        assert_equal(got.trajectory, want.trajectory)
        assert got.steps == want.steps
    assert len(got.trajectory.reward.sharding.device_set) == max(num_after, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_sharded_stream_reuses_memory_and_returns_host_batches():
    collector = make_case("count", "net")
    options = {"prefetch": 1, "steps_per_batch": 2 * B}
    with make_stream(collector, **options) as stream:
        want = [jax.device_get(raw(x.trajectory)) for x in stream]
    sharded = shard(collector, 4)
    for memory_options in ({"reuse_memory": True}, {"device": "host"}):
        with make_stream(sharded, **options, **memory_options) as stream:
            got = [jax.device_get(raw(x.trajectory)) for x in stream]
        assert_equal(got, want)


@pytest.mark.slow
def test_collect_steps_needs_no_collectives():
    def run(collector, carry):
        return collector.collect_steps(carry, PARAMS, 4)

    # Two devices share a block of random numbers if there are 1,024 lanes.
    for policy, num_envs in (("random", 1024), ("recurrent", B)):
        sharded = shard(make_case("count", policy, num_envs=num_envs), 2)
        assert collectives(run, sharded, sharded.init(KEY)) == []
    collector = make_collector("CartPole-v1", B)
    collector = collector.replace(env=envs.NormalizeObs(collector.env))
    sharded = shard(collector, 2)
    assert set(collectives(run, sharded, sharded.init(KEY))) == {"all-reduce"}
    want = collector.collect_steps(collector.init(KEY), PARAMS, 4)
    assert_close(sharded.collect_steps(sharded.init(KEY), PARAMS, 4), want)


@pytest.mark.slow
def test_obs_statistics_need_only_all_reduce():
    """Devices exchange only sums over rows."""
    stats = init_obs_stats(CountEnv().observation_space)

    @jax.jit
    def run(collector, carry):
        _, trajectory = collector.collect_steps(carry, PARAMS, T)
        return update_obs_stats(stats, trajectory.obs, trajectory.mask)

    collector = make_collector("count", B)
    sharded = shard(collector, 2)
    carry = sharded.init(KEY)
    assert set(collectives(run, sharded, carry)) == {"all-reduce"}
    assert_close(run(sharded, carry), run(collector, collector.init(KEY)))


@pytest.mark.slow
def test_collect_episodes_exchanges_two_counts_per_step():
    def run(collector, carry):
        return collector.collect_episodes(carry, None, 2 * B, max_episode_steps=9)[1]

    sharded = shard(make_collector("count", B), 2)
    names = collectives(run, sharded, sharded.init(KEY))
    # The tables of the results are summed after the loop.
    assert sorted(names) == ["all-gather", "all-reduce", "all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(("accelerator", "num_devices"), ABSENT)
def test_sharded_step_needs_no_additional_launches(accelerator, num_devices):
    mesh = Mesh(np.asarray(devices(accelerator, num_devices)), ("lanes",))
    options = {"accelerator": accelerator, "num_steps": T}

    def make(num_envs):
        return make_case("CartPole-v1", "random", "auto", num_envs)

    single = rollout.inspect_program(make(128), PARAMS, KEY, **options)
    sharded = rollout.shard(make(128 * num_devices), mesh)
    sharded_report = rollout.inspect_program(sharded, PARAMS, KEY, **options)
    assert sharded_report.waits == ()
    assert sharded_report.collectives_per_round == ()
    # Each round has one more launch, which computes the lane numbers of the device.
    assert sharded_report.per_step("launches") <= single.per_step("launches") + 1
    assert sharded_report.per_step("loose_launches") <= single.per_step(
        "loose_launches"
    )
    assert sharded_report.per_step("cycles") <= 1.05 * single.per_step("cycles")


def loss(params, batch):
    """Policy-gradient loss of a network with two layers, with scaled advantages."""
    obs, action, advantage = batch
    scaled = (advantage - advantage.mean()) / advantage.std()
    log_probs = jax.nn.log_softmax(jnp.tanh(obs @ params[0]) @ params[1])
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    return -jnp.mean(log_prob * scaled)


def make_update(mesh):
    """Returns the update of docs/devices.md: each device shuffles its rows."""

    def update(params, batch):
        grads = lax.pmean(jax.grad(loss)(params, batch), "lanes")
        return jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads), ()

    def local(params, data, key):
        key = jax.random.fold_in(key, lax.axis_index("lanes"))
        counts = {"num_minibatches": 4, "num_epochs": 2}
        return rollout.scan_minibatches(update, params, key, data, **counts)[0]

    options = {"in_specs": (P(), P(None, "lanes"), P()), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh, check_vma=False, **options)


def describe_batch(mesh, num_envs):
    """Returns the shapes of parameters, rows and a key."""

    def make(spec, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    row = functools.partial(make, P(None, "lanes"))
    rows = row((T, num_envs, 4)), row((T, num_envs), jnp.int32), row((T, num_envs))
    key = make(P(), (), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    return [make(P(), (4, 64)), make(P(), (64, 2))], rows, key


@pytest.mark.slow
@pytest.mark.parametrize(("accelerator", "num_devices"), ABSENT)
def test_update_exchanges_only_gradients(accelerator, num_devices):
    mesh = Mesh(np.asarray(devices(accelerator, num_devices)), ("lanes",))
    args = describe_batch(mesh, 128 * num_devices)
    report = rollout.inspect_program(make_update(mesh), *args, accelerator=accelerator)
    (updates,) = [x for x in report.program.walk() if x.trips == 8]
    assert updates.collectives == ("all-reduce",)
    assert not report.program.collectives
    assert report.waits == ()


def test_lanes_are_divided_among_devices():
    num_devices, num_envs = 8, 512
    collector = make_collector("CartPole-v1", num_envs)
    sharded = shard(collector, num_devices)
    init_fn = jax.jit(lambda collector: collector.init(KEY))
    init, plain = (init_fn.lower(x).compile() for x in (sharded, collector))
    sharded_memory, full_memory = init.memory_analysis(), plain.memory_analysis()
    assert sharded_memory.output_size_in_bytes < full_memory.output_size_in_bytes / 6
    assert sharded_memory.temp_size_in_bytes < full_memory.temp_size_in_bytes / 2
    carry = init(sharded)
    for leaf in jax.tree.leaves(raw(carry)):
        if leaf.shape[:1] == (num_envs,):
            shapes = {shard.data.shape for shard in leaf.addressable_shards}
            assert shapes == {(num_envs // num_devices, *leaf.shape[1:])}


def make_linear_collector():
    def act(params, obs, key):
        return (obs[:, 0] * params).astype(jnp.int32) % 3

    return make_collector("count", B).replace(policy=rollout.stateless_policy(act))


@pytest.mark.parametrize("check_vma", [False, True])
def test_collector_runs_inside_shard_map(check_vma):
    """docs/devices.md replaces `pmap` with this program."""
    collector, keys = (
        make_linear_collector(),
        jax.random.split(jax.random.key(check_vma), 4),
    )

    def collect(keys):
        carry = collector.init(keys[0])
        rows = collector.collect_steps(carry, PARAMS, 5)[1]
        return jax.tree.map(lambda x: x[None], rows)

    mapped = jax.shard_map(
        collect,
        mesh=make_mesh(4),
        in_specs=P("lanes"),
        out_specs=P("lanes"),
        check_vma=check_vma,
    )
    if check_vma:
        with pytest.raises(ValueError, match=r"`check_vma=False`, got .* over 'lanes'"):
            jax.eval_shape(mapped, keys)
        return
    loop = jax.jit(lambda keys: jax.lax.map(lambda key: collect(key[None]), keys))
    want = jax.tree.map(lambda x: x[:, 0], loop(keys))
    assert_equal(jax.jit(mapped)(keys), want)


def test_params_may_be_on_another_device():
    collector, params = (
        make_linear_collector(),
        jax.device_put(PARAMS, jax.devices()[3]),
    )
    carry, trajectory = collector.collect_steps(collector.init(KEY), params, 4)
    assert trajectory.reward.devices() == {jax.devices()[3]}
    want = collector.collect_steps(collector.init(KEY), PARAMS, 4)
    assert_equal((carry, trajectory), want)


CALLS = {
    "steps": lambda x, *args: x.collect_steps(*args, 2),
    "padded": lambda x, *args: x.collect_episodes(
        *args, 2, max_episode_steps=3, return_trajectory=True
    ),
    "evaluate": lambda x, carry, params: rollout.evaluate(x, params, carry.key, 2),
    "Stream": lambda x, carry, params: next(
        rollout.Stream(x, key=carry.key, params=params, steps_per_batch=B)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_on_different_devices_raise(name):
    collector, devices = make_linear_collector(), jax.devices()
    carry = jax.device_put(collector.init(KEY), devices[1])
    params = jax.device_put(PARAMS, devices[2])
    with pytest.raises(ValueError, match=r"incompatible devices.*params"):
        CALLS[name](collector, carry, params)
    if name not in ("evaluate", "Stream"):  # these calls take only the key of the carry
        with pytest.raises(Exception, match=r"(?i)mesh|devices"):
            CALLS[name](shard(collector, 4), shard(collector, 2).init(KEY), PARAMS)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_normalized_stream_equals_one_device():
    # The number of entries of an observation is the number of lanes.
    num_envs = 4
    env = envs.TransformObs(CountEnv(), lambda obs: jnp.broadcast_to(obs, (4,)))
    env = envs.NormalizeObs(envs.vectorize(env, num_envs))
    plain = make_collector("count", num_envs).replace(env=env)
    options = {"steps_per_batch": 6 * num_envs, "total_steps": 15 * num_envs}
    got, want = (list(make_stream(x, **options)) for x in (shard(plain, 2), plain))
    assert [batch.trajectory.reward.shape[0] for batch in got] == [6, 6, 3]
    # Means over devices have other roundings.
    assert_close([batch.trajectory for batch in got], [x.trajectory for x in want])
