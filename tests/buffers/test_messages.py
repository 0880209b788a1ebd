"""Bad input to `rollout.buffers`: each error message, and the calls that raise it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector, quick_jit
from refusals import check_refused, pairs

import rollout
from rollout import buffers

B = 4
KEY = jax.random.key(0)
FLAGS = jnp.zeros((B,), bool)


@functools.cache
def zero_trajectory():
    """Returns five rows of zeros: checks depend on shapes and dtypes only."""
    collector = make_collector("count", B)
    shapes = jax.eval_shape(
        lambda key: collector.collect_steps(collector.init(key), None, 5)[1], KEY
    )
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return zeros.replace(mask=np.ones((5, B), bool))


def zero_rows(**changes):
    return zero_trajectory().replace(**changes)


@functools.cache
def make_state(buffer_type=buffers.ReplayBuffer, capacity=32):
    """Returns a buffer and a state with five rows per lane."""
    buffer, first = (
        buffer_type(capacity, B),
        jax.tree.map(lambda x: x[0], zero_trajectory()),
    )
    return buffer, quick_jit(lambda row, rows: buffer.add(buffer.init(row), rows))(
        first, zero_trajectory()
    )


def init_shared(**dtypes):
    """Initializes a buffer with observations of two dtypes."""
    rows = {name: {"x": jnp.zeros((B, 2), dtype)} for name, dtype in dtypes.items()}
    flags = {"terminated": FLAGS, "truncated": FLAGS}
    return buffers.ReplayBuffer(8, B, next_obs="shared").init({**rows, **flags})


def default_buffer():
    return make_state()[0]


def sample(*args, **options):
    buffer, state = make_state()
    return buffer.replace(**options).sample(state, *(args or (KEY, 2)))


def prioritized_sample(beta):
    buffer, state = make_state(buffers.PrioritizedReplayBuffer)
    return buffer.sample(state, KEY, 2, beta=beta)


def update(priorities, indices=(0, 1)):
    buffer, state = make_state(buffers.PrioritizedReplayBuffer)
    return buffer.update_priorities(state, jnp.asarray(indices), priorities)


def add(rows):
    buffer, state = make_state()
    return buffer.add(state, rows)


def init(**rows):
    return default_buffer().init(rows)


def shard(buffer=None):
    mesh = jax.make_mesh((4,), ("lanes",))
    return buffers.shard(buffer or buffers.ReplayBuffer(32, 8), mesh)


def from_data(buffer_type=buffers.ReplayBuffer, capacity=8, num_envs=1, **changes):
    """Builds a state from two episodes with five rows, with some arrays replaced."""
    data = {
        "obs": {"pair": np.zeros((5, 2)), "short": np.zeros(5, np.int16)},
        "next_obs": {"pair": np.zeros((5, 2)), "short": np.zeros(5, np.int16)},
        "action": np.zeros(5, int),
        "reward": np.arange(5.0),
        "terminated": np.array([0, 0, 1, 0, 1]),
        "truncated": np.zeros(5, bool),
    }
    return buffers.from_data(buffer_type(capacity, num_envs), **{**data, **changes})


def make_learned_collector():
    act = lambda params, obs, key: (obs @ params["w"]).astype(jnp.int32)[:, 0]  # noqa: E731
    return make_collector("count", B).replace(policy=rollout.stateless_policy(act))


COUNTS = {
    "capacity": [lambda n: buffers.ReplayBuffer(n, 1)],
    "max_length": [lambda n: buffers.EpisodeBuffer(8, 1, max_length=n)],
    "batch_size": [lambda n: sample(KEY, n)],
    "n_step": [lambda n: sample(n_step=n, gamma=1)],
    "length": [lambda n: default_buffer().sample_sequences(make_state()[1], KEY, 2, n)],
}
FRACTIONS = {
    "alpha": [lambda x: buffers.PrioritizedReplayBuffer(8, 4, alpha=x)],
    "beta": [lambda x: prioritized_sample(2 if x is None else x)],
}
shared = functools.partial(buffers.ReplayBuffer, next_obs="shared")
MESSAGES = {
    # Options.
    "`capacity` ... 4": [lambda: buffers.ReplayBuffer(3, 4)],
    f"must be at most {2**30}, got": [lambda: buffers.ReplayBuffer(2**30 + 1, 1)],
    "must be at most 10, got 11": [lambda: buffers.EpisodeBuffer(40, 4, max_length=11)],
    "needs next_obs=": [lambda: buffers.ReplayBuffer(8, 4, final_obs_capacity=9)],
    "`final_obs_capacity` ... 4": [lambda: shared(40, 4, final_obs_capacity=3)],
    # Rows.
    "`transition` ... (4,)": [lambda: init(obs=jnp.zeros(3))],
    "`transition`": [init],
    "`next_obs` ... ['x'], got float32": [
        lambda: init_shared(obs="uint8", next_obs="float32")
    ],
    "`terminated` must be": [lambda: init(terminated=jnp.zeros(B), truncated=FLAGS)],
    "`params`": [lambda: default_buffer().init(make_learned_collector())],
    "`trajectory` ... `init`": [
        lambda: add(zero_rows(reward=jnp.zeros((5, B, 1)))),
        lambda: add(zero_rows(reward=jnp.zeros((5, B), int))),
    ],
    "at .reward": [lambda: add(zero_rows(reward=()))],
    "must have at least one row": [
        lambda: add(jax.tree.map(lambda x: x[:0], zero_rows()))
    ],
    "`mask` ... (5, 4)": [
        lambda: add(zero_rows(mask=jnp.ones((B, 5), bool))),
        lambda: add(zero_rows(mask=jnp.ones((5, B)))),
    ],
    # Samples.
    "`n_step` and `gamma` go together, got only `n_step`": [lambda: sample(n_step=3)],
    "`n_step` and `gamma` go together, got only `gamma`": [lambda: sample(gamma=0.9)],
    "`gamma` ... [0, 1]": [lambda: sample(n_step=2, gamma=1.5)],
    "must not be given with": [lambda: sample(n_step=2, gamma=1, relabel_fn=max)],
    "must keep structure, shapes": [lambda: sample(relabel_fn=lambda key, x, y: x.obs)],
    "`key`": [
        lambda: sample(0, 2),
        lambda: default_buffer().sample_episodes(
            make_state()[1], jax.random.split(KEY), 2, 5
        ),
    ],
    # States and row numbers.
    "`state` must be a buffer state": [
        lambda: default_buffer().add(zero_trajectory(), make_state()[1])
    ],
    "`state` must come from a buffer": [
        lambda: buffers.ReplayBuffer(64, B).sample(make_state()[1], KEY, 2),
        lambda: default_buffer().add(
            jax.tree.map(lambda x: jnp.stack([x, x]), make_state()[1]),
            zero_trajectory(),
        ),
    ],
    "`indices` ... `priorities` ... `[S]`": [
        lambda: update(jnp.ones(2, bool)),
        lambda: update(jnp.ones(1)),
    ],
    "`indices`": [
        lambda: default_buffer().gather(make_state()[1], jnp.zeros(2)),
        # A mask would be read as rows 0 and 1.
        lambda: update(jnp.ones(2), (True, False)),
    ],
    # Required fields.
    "needs the field `terminated`": [
        lambda: buffers.EpisodeBuffer(8, 2).init({"reward": jnp.zeros(2)})
    ],
    # Devices.
    '`ReplayBuffer` ... "stored"': [
        lambda: shard(shared(32, 8)),
        lambda: shard(buffers.EpisodeBuffer(32, 8, max_length=2)),
    ],
    "multiple of the 4": [lambda: shard(buffers.ReplayBuffer(60, 6))],
    "`batch_size`": [lambda: shard().sample(shard().init({"a": jnp.zeros(8)}), KEY, 6)],
    # Recorded data.
    "`reward` must be one number per row": [lambda: from_data(reward=np.ones((5, 1)))],
    "`terminated` ... 2": [lambda: from_data(terminated=np.arange(5))],
    "`reward` must fit into float32": [lambda: from_data(reward=np.full(5, 1e40))],
    "`action`": [lambda: from_data(action=np.full(5, 2**40))],
    "`next_obs` ... `obs`": [lambda: from_data(next_obs=np.zeros((5, 2)))],
    "`next_obs['pair']`": [
        lambda: from_data(
            shared, obs={"pair": np.ones(5)}, next_obs={"pair": np.zeros(5)}
        )
    ],
    "must be at least 6 for 5 rows": [lambda: from_data(capacity=5, num_envs=2)],
    "must be at least 2": [
        lambda: from_data(functools.partial(shared, final_obs_capacity=1))
    ],
}


@pytest.mark.parametrize(("message", "call"), pairs(MESSAGES, COUNTS, FRACTIONS))
def test_error_names_the_argument(message, call):
    check_refused(message, call)


@pytest.mark.parametrize("value", [np.float32(0.5), jnp.float32(0.5), 1, np.int32(0)])
def test_alpha_accepts_any_number_type(value):
    buffer = buffers.PrioritizedReplayBuffer(16, 2, alpha=value)
    assert isinstance(hash(buffer), int)  # static, in `jit`
