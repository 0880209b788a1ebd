"""Trains PPO over several processes: the same script, started once for each of them.

    python processes.py PORT PROCESS_ID FOLDER NUM_UPDATES [DIES]

Goes on from the newest checkpoint in FOLDER/checkpoint. After every update each process
writes its arrays to FOLDER/<update>-<process>.npz, of arrays with lanes only its own
lanes, and before the first update a batch of parameters per lane to
FOLDER/each-<process>.npz. With DIES the second one kills itself before it saves the
checkpoint of that update. A run from the beginning first makes calls that must raise,
and writes the messages to FOLDER/refused-<process>.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import make_env, raw
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rollout
from rollout import envs

B, T, WIDTH = 16, 8, 8
NUM_DEVICES, NUM_PROCESSES = 4, 2
SHORT = 10  # s, after which a process that sends no sign of life is taken for dead
OPTIMIZER = optax.adam(1e-2)


def act(params, obs, key):
    """Draws an action; the log-probability and the value are recorded with it."""
    logits, value = network(params, obs)
    action = jax.random.categorical(key, logits)
    return action, {"log_prob": log_prob(logits, action), "value": value}


def network(params, obs):
    """One hidden layer, with a head for the actions and one for the value."""
    out = jnp.tanh(obs / 8 @ params["hidden"]) @ params["heads"]
    return out[..., :3], out[..., 3]


def log_prob(logits, action):
    """The log-probability of the actions taken."""
    chances = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(chances, action[..., None], axis=-1)[..., 0]


def loss(params, trajectory):
    """That of PPO, a mean over all steps and lanes."""
    extras = trajectory.extras
    next_value = jax.lax.stop_gradient(network(params, trajectory.next_obs)[1])
    advantage = rollout.gae(trajectory, next_value, gamma=0.9, lam=0.9)
    logits, value = network(params, trajectory.obs)
    ratio = jnp.exp(log_prob(logits, trajectory.action) - extras["log_prob"])
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return jnp.mean((value - advantage - extras["value"]) ** 2 - gain)


def gradient(params, trajectory):
    """The gradient of the loss, summed in one order wherever the devices are."""

    def local(params, trajectory):
        grads = jax.lax.all_gather(jax.grad(loss)(params, trajectory), "lanes")
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), grads)

    return jax.shard_map(
        local,
        mesh=make_mesh(),
        in_specs=(PartitionSpec(), PartitionSpec(None, "lanes")),
        out_specs=PartitionSpec(),
        check_vma=False,  # all devices have the same mean
    )(params, trajectory)


@jax.jit
def update(training, trajectory):
    """A step of the optimizer; also returns the gradient as XLA partitions it."""
    params, state = training
    changes, state = OPTIMIZER.update(gradient(params, trajectory), state)
    plain = jax.grad(loss)(params, trajectory)
    return (optax.apply_updates(params, changes), state), plain


def make_collector(num_envs=B, act=act, **params):
    """Counting environments and the network."""
    env = envs.vectorize(make_env("count", **params), num_envs, auto_reset="select")
    return rollout.Collector(env=env, policy=rollout.stateless_policy(act))


def make_lengths():
    """A batch of environments whose parameters differ from lane to lane."""
    env = jax.vmap(lambda limit: make_env("count", limit=limit))(2 + jnp.arange(B) % 5)
    env = envs.vectorize_each(env, B, auto_reset="select")
    policy = rollout.random_policy(env.action_space)
    collector = rollout.shard(rollout.Collector(env=env, policy=policy), make_mesh())
    return {"trajectory": next(make_stream(collector, None)).trajectory}


def make_mesh():
    """Four devices, whoever holds them."""
    devices = jax.devices()[:NUM_DEVICES]
    types = {"axis_types": (AxisType.Auto,)}
    return jax.make_mesh((NUM_DEVICES,), ("lanes",), devices=devices, **types)


def make_training():
    """Parameters and the state of the optimizer, made on every device."""

    def make():
        numbers = np.random.default_rng(1).normal(size=WIDTH * 5).astype(np.float32)
        hidden, heads = jnp.asarray(numbers[:WIDTH]), jnp.asarray(numbers[WIDTH:])
        params = {"hidden": hidden[None], "heads": heads.reshape(WIDTH, 4)}
        return params, OPTIMIZER.init(params)

    everywhere = NamedSharding(make_mesh(), PartitionSpec())
    return jax.jit(make, out_shardings=everywhere)()


def make_stream(collector, params, **options):
    """Batches of T steps per lane."""
    options = {"steps_per_batch": T * B, **options}
    return rollout.Stream(collector, key=jax.random.key(2), params=params, **options)


def train(folder, num_updates, dies=None):
    """Yields the number of every update, and what there is after it, by name."""
    training = make_training()
    collector = rollout.shard(make_collector(), make_mesh())
    stream = make_stream(collector, training[0], total_steps=num_updates * T * B)
    if rollout.checkpoint.steps(folder):
        saved = rollout.checkpoint.restore(folder, (stream.state(), training))
        stream.restore(saved[0])
        training = saved[1]
    for batch in stream:
        training, plain = update(training, batch.trajectory)
        stream.set_params(training[0])
        number = stream.steps // (T * B)
        if number == dies and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rollout.checkpoint.save(folder, (stream.state(), training), step=number)
        after = {"trajectory": batch.trajectory, "training": training, "plain": plain}
        yield number, after | {"lanes": stream.state()["carry"].episode}  # with keys


def arrays(tree):
    """The leaves of a tree in NumPy, by their place."""
    leaves = jax.tree.leaves_with_path(raw(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def local(tree, *axes):
    """The lanes of this process."""
    lanes = PartitionSpec(*axes)
    return multihost_utils.global_array_to_host_local_array(tree, make_mesh(), lanes)


def refused(process):
    """Yields by name the calls that raise where this process differs from the other."""
    mesh, sharded = make_mesh(), rollout.shard(make_collector(), make_mesh())
    params = make_training()[0]
    acts = (act, lambda params, obs, key: (act(params, obs, key)[0] // 2, {}))
    other = rollout.shard(make_collector(act=acts[process]), mesh)
    calls = {
        "lanes": lambda: rollout.shard(make_collector(B * (1 + process)), mesh),
        "uneven": lambda: rollout.shard(make_collector(B + process), mesh),
        "parameters": lambda: rollout.shard(make_collector(limit=7 + process), mesh),
        "policy": lambda: make_stream(other, params).compile(),
        "prefetch": lambda: make_stream(sharded, params, prefetch=1),
        "host": lambda: make_stream(sharded, params, placement="host"),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            yield name, str(error)


def main(folder, num_updates, dies=None):
    """Makes the calls that raise, trains, and writes the arrays of this process."""
    process = jax.process_index()
    if not rollout.checkpoint.steps(folder / "checkpoint"):
        text = json.dumps(dict(refused(process)))
        (folder / f"refused-{process}.json").write_text(text)
        each = local(make_lengths(), None, "lanes")
        np.savez(folder / f"each-{process}.npz", **arrays(each))
    for number, after in train(folder / "checkpoint", num_updates, dies):
        after["trajectory"] = local(after["trajectory"], None, "lanes")
        after["lanes"] = local(after["lanes"], "lanes")
        np.savez(folder / f"{number}-{process}.npz", **arrays(after))


if __name__ == "__main__":
    port, process_id, folder, *numbers = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // NUM_PROCESSES)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=NUM_PROCESSES,
        process_id=int(process_id),
        heartbeat_timeout_seconds=SHORT,
    )
    main(Path(folder), *map(int, numbers))
