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
from rollout.envs.wrappers.wrapper import VectorWrapper
from rollout.inspection import devices

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


def assert_near(got, want):
    """Equal but for the last places of floats."""
    for x, y in zip(jax.tree.leaves(raw(got)), jax.tree.leaves(raw(want)), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(x, y)


def assert_same(got, want):
    got, want = jax.tree.leaves_with_path(raw(got)), jax.tree.leaves(raw(want))
    for (path, x), y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def collectives(program, *args):
    """Operations between devices in a compiled program."""
    text = jax.jit(program).lower(*args).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf" ({names})(?:-start)?\(", text)


@pytest.mark.slow
def test_steps_have_the_bits_of_one_device():
    collector = make_collector("count", B)
    sharded = shard(collector, 8)
    want = collector.collect_steps(collector.init(KEY), None, T)
    carry = sharded.init(KEY)
    assert_same(carry, collector.init(KEY))
    assert_same(sharded.collect_steps(carry, None, T), want)


CASES = {
    "recurrent": ("count", "recurrent"),  # that explores
    "select": ("count", "recurrent", "select"),
    "box": ("Pendulum-v1", "recurrent"),
    "image": ("Breakout-MinAtar", "net"),
    "division": ("CartPole-v1", "net"),  # by a number that divides several times
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("recurrent", (4,)),
        ("box", (1, 4)),
        ("image", (8,)),
        ("division", (2, 8)),
    ],
)
def test_every_field_has_the_bits_of_one_device(name, devices):
    collector = make_case(*CASES[name])
    want = collector.collect_steps(collector.init(KEY), PARAMS, T)
    for num_devices in devices:
        sharded = shard(collector, num_devices)
        got = sharded.collect_steps(sharded.init(KEY), PARAMS, T)
        assert_same(got, want)


def methods(collector, carry):
    """The results of the other methods."""
    buffer = buffers.ReplayBuffer(capacity=8 * B, num_envs=B)
    kinds = jax.eval_shape(collector.step, carry, PARAMS)[1]
    example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
    empty = buffer.init(example)
    steps = functools.partial(collector.fold_steps, num_steps=T)
    limit = {"max_steps": 15}
    return {
        "step": collector.step(carry, PARAMS),
        "fold": steps(carry, PARAMS, buffer.add, empty),
        "episodes": collector.collect_episodes(carry, PARAMS, 3 * B + 1, **limit),
        "per env": collector.collect_episodes_per_env(carry, PARAMS, 2, **limit),
        "padded": collector.collect_padded_episodes(
            carry, PARAMS, 2 * B + 3, max_length=15
        ),
    }


@pytest.mark.slow
def test_every_method_has_the_bits_of_one_device():
    collector = make_case(*CASES["select"])
    sharded = shard(collector, 2)
    got = methods(sharded, sharded.init(KEY))
    want = methods(collector, collector.init(KEY))
    for method in want:
        assert_same(got[method], want[method])
    # Each process can read them, where the devices are those of several.
    for method in ("episodes", "per env", "padded"):
        for leaf in jax.tree.leaves(got[method][1:]):
            assert leaf.sharding.is_fully_replicated


def make_stream(collector, **options):
    options = {"steps_per_batch": 2 * B, "total_steps": 7 * B, **options}
    return rollout.Stream(collector, key=KEY, params=PARAMS, **options)


@pytest.mark.slow
def test_stream_goes_on_over_another_number_of_devices(tmp_path):
    collector = make_case("count", "recurrent")
    with make_stream(collector, warmup_steps=3 * B) as stream:
        want = list(stream)
    with make_stream(shard(collector, 2), warmup_steps=3 * B) as first:
        got = [next(first), next(first)]
        rollout.checkpoint.save(tmp_path, first.state())
    with make_stream(shard(collector, 4), warmup_steps=3 * B) as second:
        state = rollout.checkpoint.restore(tmp_path, second.state())
        second.restore(state)
        got += list(second)
    for a, b in zip(got, want, strict=True):
        assert_same(a.trajectory, b.trajectory)
        assert (a.steps, a.warmup_steps) == (b.steps, b.warmup_steps)
    assert len(got[-1].trajectory.reward.sharding.device_set) == 4


@pytest.mark.slow
def test_stream_goes_on_with_lanes_that_are_sharded_or_not(tmp_path):
    env = envs.make_vec("CartPole-v1", B)  # with parameters that float32 rounds
    plain = rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))
    collectors = plain, shard(plain, 2)
    streams = [rollout.Stream(x, key=KEY, steps_per_batch=T * B) for x in collectors]
    for first, second in (streams, streams[::-1]):
        next(first)
        rollout.checkpoint.save(tmp_path, first.state())
        second.restore(rollout.checkpoint.restore(tmp_path, second.state()))
        assert_same(*(next(stream).trajectory for stream in streams))


@pytest.mark.slow
def test_state_of_sharded_lanes_goes_on_without_devices_and_a_checkpoint():
    collector = make_case("count", "recurrent")
    options = {"steps_per_batch": 2 * B, "recycle": True}
    with (
        make_stream(shard(collector, 2), **options) as first,
        make_stream(collector, **options) as second,
    ):
        next(first)
        second.restore(first.state())
        for _ in range(2):
            assert_same(*(next(x).trajectory for x in (first, second)))


@pytest.mark.slow
def test_batches_land_where_they_are_wanted_and_memory_is_used_again():
    collector = make_case("count", "net")
    options = {"prefetch": 1, "steps_per_batch": 2 * B}
    with make_stream(collector, **options) as stream:
        want = [jax.device_get(raw(x.trajectory)) for x in stream]
    sharded = shard(collector, 4)
    for more in ({"recycle": True}, {"placement": "host"}):
        with make_stream(sharded, **options, **more) as stream:
            got = [jax.device_get(raw(x.trajectory)) for x in stream]
        assert_same(got, want)


@pytest.mark.slow
def test_evaluation_inside_jit_beside_replicated_parameters():
    collector = make_case("count", "net")
    mesh = make_mesh(4)
    everywhere = jax.NamedSharding(mesh, jax.P())
    params = jax.device_put(PARAMS, everywhere)

    def run(collector, params):
        return rollout.evaluate(collector, KEY, params, 2 * B, max_steps=20)

    got = jax.jit(run)(shard(collector, 4), params)
    want = jax.jit(run)(collector, PARAMS)
    assert_near(got, want)


@pytest.mark.slow
def test_devices_tell_each_other_nothing_in_the_loop_over_time():
    def run(collector, carry):
        return collector.collect_steps(carry, PARAMS, 4)

    # At 1,024 a block of draws lies on both devices.
    for policy, num_envs in (("random", 1024), ("recurrent", B)):
        sharded = shard(make_case("count", policy, num_envs=num_envs), 2)
        assert collectives(run, sharded, sharded.init(KEY)) == []
    collector = make_collector("CartPole-v1", B)
    collector = collector.replace(env=envs.NormalizeObs(collector.env))
    sharded = shard(collector, 2)
    assert set(collectives(run, sharded, sharded.init(KEY))) == {"all-reduce"}
    want = collector.collect_steps(collector.init(KEY), PARAMS, 4)
    assert_near(sharded.collect_steps(sharded.init(KEY), PARAMS, 4), want)


@pytest.mark.slow
def test_parameters_per_lane_and_numbers_of_episodes_follow_their_lanes():
    env = jax.vmap(lambda limit: CountEnv(limit=limit))(3 + jnp.arange(B) % 5)
    env = envs.vectorize_each(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    sharded = shard(collector, 4)
    want = collector.collect_steps(collector.init(KEY), None, T)
    assert_same(sharded.collect_steps(sharded.init(KEY), None, T), want)

    env = envs.vectorize(LevelEnv(), B)
    collector = rollout.Collector(env=env, policy=policy)
    sharded = shard(collector, 4)
    want = collector.collect_steps(collector.init(KEY), None, T)
    assert want[1].obs[0].ravel().tolist() == list(range(B))
    assert_same(sharded.collect_steps(sharded.init(KEY), None, T), want)


@struct.dataclass(kw_only=True)
class LevelEnv(CountEnv):
    """Shows at reset which episode it plays."""

    level: jax.Array = 0

    def at_episode(self, number):
        return self.replace(level=number)

    def reset(self, key):
        state, obs = super().reset(key)
        return state, obs + jnp.float32(self.level)


@pytest.mark.slow
def test_devices_tell_each_other_two_counts_per_step_of_whole_episodes():
    def run(collector, carry):
        return collector.collect_episodes(carry, None, 2 * B, max_steps=9)[1]

    sharded = shard(make_collector("count", B), 2)
    found = collectives(run, sharded, sharded.init(KEY))
    # The tables of the results are summed after the loop.
    assert sorted(found) == ["all-gather", "all-reduce", "all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(("accelerator", "num_devices"), ABSENT)
def test_step_of_an_accelerator_is_that_of_one_with_as_many_lanes(
    accelerator, num_devices
):
    mesh = Mesh(np.asarray(devices(accelerator, num_devices)), ("lanes",))
    options = {"accelerator": accelerator, "num_steps": T}

    def make(num_envs):
        return make_case("CartPole-v1", "random", "auto", num_envs)

    one = rollout.inspect(make(128), PARAMS, **options)
    sharded = rollout.shard(make(128 * num_devices), mesh)
    every = rollout.inspect(sharded, PARAMS, **options)
    assert every.waits == ()
    assert every.collectives_per_round == ()
    # Once a round of the loop, each asks which lanes are its own.
    assert every.launches_per_step <= one.launches_per_step + 1
    assert every.loose_per_step <= one.loose_per_step
    assert every.cycles_per_step <= 1.05 * one.cycles_per_step


def loss(params, batch):
    """Of a network in two layers, with advantages that are made alike."""
    obs, action, advantage = batch
    scaled = (advantage - advantage.mean()) / advantage.std()
    chances = jax.nn.log_softmax(jnp.tanh(obs @ params[0]) @ params[1])
    chosen = jnp.take_along_axis(chances, action[..., None], axis=-1)[..., 0]
    return -jnp.mean(chosen * scaled)


def learn(params, batches, mean_fn):
    def update(params, batch):
        grads = mean_fn(jax.grad(loss)(params, batch))
        return jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads), ()

    return lax.scan(update, params, batches)[0]


def learn_locally(mesh):
    """Each device shuffles its own rows, as docs/devices.md does."""

    def local(params, data, key):
        key = jax.random.fold_in(key, lax.axis_index("lanes"))
        batches = rollout.minibatches(key, data, 4, epochs=2)
        return learn(params, batches, lambda grads: lax.pmean(grads, "lanes"))

    options = {"in_specs": (P(), P(None, "lanes"), P()), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh, check_vma=False, **options)


def learn_everywhere(mesh):
    """The rows of all devices are shuffled, and each has a part of a minibatch."""

    def learn_placed(params, data, key):
        where = NamedSharding(mesh, P(None, "lanes"))
        batches = rollout.minibatches(key, data, 4, epochs=2)
        batches = lax.with_sharding_constraint(batches, where)
        return learn(params, batches, lambda grads: grads)

    return learn_placed


def describe_batch(mesh, num_envs):
    """Parameters, rows and a key, as shapes."""

    def make(spec, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    row = functools.partial(make, P(None, "lanes"))
    rows = row((T, num_envs, 4)), row((T, num_envs), jnp.int32), row((T, num_envs))
    key = make(P(), (), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    return [make(P(), (4, 64)), make(P(), (64, 2))], rows, key


# The mean, the deviation and the gradient; where rows stay, the gradient alone.
@pytest.mark.slow
@pytest.mark.parametrize(("accelerator", "num_devices"), ABSENT)
@pytest.mark.parametrize(
    ("make_learn", "most", "is_gathered"),
    [(learn_locally, 1, False), (learn_everywhere, 3, True)],
)
def test_updates_of_an_accelerator_exchange_only_means(
    accelerator, num_devices, make_learn, most, is_gathered
):
    mesh = Mesh(np.asarray(devices(accelerator, num_devices)), ("lanes",))
    args = describe_batch(mesh, 128 * num_devices)
    report = rollout.inspect(make_learn(mesh), *args, accelerator=accelerator)
    (updates,) = [x for x in report.program.walk() if x.trips == 8]
    assert set(updates.collectives) == {"all-reduce"}
    assert len(updates.collectives) <= most
    assert bool(report.program.collectives) == is_gathered
    assert report.waits == ()


def test_no_device_holds_all_lanes():
    num_devices, num_envs = 8, 512
    sharded = shard(make_collector("CartPole-v1", num_envs), num_devices)
    init = jax.jit(lambda collector: collector.init(KEY)).lower(sharded).compile()
    whole = make_collector("CartPole-v1", num_envs)
    plain = jax.jit(lambda collector: collector.init(KEY)).lower(whole).compile()
    mine, all_of_it = init.memory_analysis(), plain.memory_analysis()
    assert mine.output_size_in_bytes < all_of_it.output_size_in_bytes / 6
    assert mine.temp_size_in_bytes < all_of_it.temp_size_in_bytes / 2
    carry = init(sharded)
    for leaf in jax.tree.leaves(raw(carry)):
        if leaf.shape[:1] == (num_envs,):
            shapes = {shard.data.shape for shard in leaf.addressable_shards}
            assert shapes == {(num_envs // num_devices, *leaf.shape[1:])}


def test_lanes_that_do_not_divide_are_refused_with_the_nearest_that_do():
    with pytest.raises(ValueError, match=r"of the 4 devices .* got 6; .* are 4 or 8"):
        shard(make_collector("count", 6), 4)
    with pytest.raises(ValueError, match="got 2; the nearest are 4"):
        shard(make_collector("count", 2), 4)


def test_other_axes_and_environments_are_refused():
    collector = make_collector("count", 8)
    with pytest.raises(ValueError, match="`axis` must be one of the mesh, x, got 'la"):
        rollout.shard(collector, make_mesh(2, "x"))
    with pytest.raises(ValueError, match="and not be sharded already, got _Sha"):
        shard(shard(collector, 2), 2)


def test_carry_on_other_devices_is_refused():
    collector = make_collector("count", 8)
    carry = shard(collector, 2).init(KEY)
    other = shard(collector, 4)
    fold = functools.partial(other.fold_steps, num_steps=2)
    for call in (
        lambda: other.step(carry, None),
        lambda: other.collect_steps(carry, None, 2),
        lambda: other.collect_episodes(carry, None, 2, max_steps=3),
        lambda: other.collect_padded_episodes(carry, None, 2, max_length=3),
        lambda: fold(carry, None, lambda acc, _: acc, 0),
    ):
        with pytest.raises(Exception, match=r"(?i)mesh|devices"):
            call()


def linear(num_envs=B):
    def act(params, obs, key):
        return (obs[:, 0] * params).astype(jnp.int32) % 3

    env = envs.vectorize(CountEnv(), num_envs)
    return rollout.Collector(env=env, policy=rollout.stateless_policy(act))


def test_parameters_may_lie_on_another_device():
    collector, params = linear(), jax.device_put(PARAMS, jax.devices()[3])
    carry, trajectory = collector.collect_steps(collector.init(KEY), params, 4)
    assert trajectory.reward.devices() == {jax.devices()[3]}
    want = collector.collect_steps(collector.init(KEY), PARAMS, 4)
    assert_same((carry, trajectory), want)


APART = {
    "collect_steps": lambda x, carry, params: x.collect_steps(carry, params, 2),
    "step": lambda x, carry, params: x.step(carry, params),
    "collect_episodes": lambda x, carry, params: x.collect_episodes(
        carry, params, 2, max_steps=3
    ),
    "evaluate": lambda x, carry, params: rollout.evaluate(x, carry.key, params, 2),
    "Stream": lambda x, carry, params: next(
        rollout.Stream(x, key=carry.key, params=params, steps_per_batch=B)
    ),
}


@pytest.mark.parametrize("name", APART)
def test_arguments_on_different_devices_raise(name):
    collector, devices = linear(), jax.devices()
    carry = jax.device_put(collector.init(KEY), devices[1])
    params = jax.device_put(PARAMS, devices[2])
    with pytest.raises(ValueError, match=r"incompatible devices.*params"):
        APART[name](collector, carry, params)


def test_parameters_outside_of_the_mesh_raise():
    spread = shard(linear(), 2)
    params = jax.device_put(PARAMS, jax.devices()[3])
    with pytest.raises(ValueError, match="incompatible devices"):
        spread.collect_steps(spread.init(KEY), params, 2)


def test_rows_on_another_device_than_the_buffer_raise():
    rows = {"id": jnp.arange(6).reshape(3, 2)}
    buffer, devices = buffers.ReplayBuffer(8, 2), jax.devices()
    state = jax.device_put(buffer.init({"id": rows["id"][0]}), devices[1])
    assert_same(
        buffer.add(state, rows), buffer.add(buffer.init({"id": rows["id"][0]}), rows)
    )
    with pytest.raises(ValueError, match="incompatible devices"):
        buffer.add(state, jax.device_put(rows, devices[2]))


class Mean(VectorWrapper):
    """Subtracts the running mean of all lanes, which its own reset copies."""

    def reset(self, keys):
        state, obs = self.env.reset(keys)
        return (state, envs.Shared((jnp.zeros(4), jnp.zeros(())))), obs

    def step(self, keys, state, action):
        result = self.env.step(keys, state[0], action)
        total, count = state[1].value
        total, count = total + result.obs.sum(axis=0), count + len(result.obs)
        return result.replace(
            state=(result.state, envs.Shared((total, count))),
            obs=result.obs - (total / count)[None],
        )

    def reset_done(self, key_fn, done, lanes):
        inner = self.env.reset_done(key_fn, done, lanes._replace(state=lanes.state[0]))
        shared = jax.tree.map(jnp.copy, lanes.state[1])
        return inner._replace(state=(inner.state, shared))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "compare"),  # means of floats may round differently on each device
    [(Mean, assert_same), (envs.NormalizeObs, assert_near)],
)
@pytest.mark.parametrize("num_envs", [4, 8])
def test_statistics_of_all_lanes_are_those_of_one_device(wrapper, compare, num_envs):
    # Four entries in an observation, and for 4 lanes as many lanes. They are small
    # integers, so that sums over lanes are exact in any order.
    wide = envs.TransformObs(CountEnv(), lambda obs: jnp.broadcast_to(obs, (4,)))
    env = wrapper(envs.vectorize(wide, num_envs))
    policy = rollout.random_policy(env.action_space)
    plain = rollout.Collector(env=env, policy=policy)
    options = {
        "key": KEY,
        "steps_per_batch": 6 * num_envs,
        "total_steps": 15 * num_envs,
    }
    got, want = (list(rollout.Stream(x, **options)) for x in (shard(plain, 2), plain))
    assert [batch.trajectory.reward.shape[0] for batch in got] == [6, 6, 3]
    compare([batch.trajectory for batch in got], [x.trajectory for x in want])
