"""How fast are complete training runs, and how slow is a convolution on a CPU?

Runs recipes and programs of other libraries with the same settings, from a key to all
outputs, in interleaved runs. Reports CPU and wall time per update, and CPU time to
trace, lower and compile; ratios are ratios of medians.

Rows of PPO whose name ends in "microbatches of 256" have `microbatch_size=256` here:
the gradient of a minibatch is accumulated over microbatches of 256 rows, whose
intermediate values fit into a cache of the CPU. The gradient is the same up to
rounding. Rows without that ending differentiate all rows of a minibatch at once, as the
other libraries do.

Also times one layer and its gradient on a batch of MinAtar images: `nn.Conv`, the same
convolution as a matrix product over patches, and a dense layer as wide as the MLP.

    pip install ".[brax,craftax,jaxmarl]" distrax evosax flashbax optax \\
        pyyaml rejax==0.1.3
    git clone https://github.com/luchris429/purejaxrl
    git clone https://github.com/mttga/purejaxql
    git clone https://github.com/FLAIROx/JaxMARL
    git clone https://github.com/MichaelTMatthews/Craftax_Baselines
    taskset -c 0 python benchmarks/training_speed.py \\
        --purejaxrl purejaxrl/purejaxrl --purejaxql purejaxql/purejaxql \\
        --jaxmarl JaxMARL --craftax Craftax_Baselines --rejax 1 --evosax 1

`--purejaxql` also needs `--purejaxrl`. `--only` takes prefixes of row names.
`learning_compared.py` explains `taskset`.
"""

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import learners_of_peers as peers
import recipes
import teams
from harness import Program, measure, run
from recipes import PUREJAXRL, DQNSettings, PPOSettings, make_env

import rollout
from rollout import envs
from rollout.recipes import ppo, recurrent_ppo

STEPS = 20
MICROBATCH_SIZE = 256
SIZES = {  # number of CartPole lanes: number of updates
    4: 50,
    64: 10,
    256: 4,
    1024: 2,
}
Train = Callable[[jax.Array], Any]


class Training(NamedTuple):
    """Two programs with the same settings, each a function of a key.

    Attributes:
        name: name of the row, for example `"PPO, CartPole, 64 lanes"`.
        peer: name of the other program.
        num_updates: number of updates of both programs.
        ours: makes the training function of a recipe.
        theirs: makes the training function of the peer.
        seeds: numbers of seeds to train at once.
    """

    name: str
    peer: str
    num_updates: int
    ours: Callable[[], Train]
    theirs: Callable[[], Train]
    seeds: tuple[int, ...] = (1,)


class RecurrentNetwork(nn.Module):
    """The network of PureJaxRL's `ppo_rnn.py`."""

    num_actions: int

    def setup(self) -> None:
        """Creates the layers."""
        self.embedding, self.cell = nn.Dense(128), nn.GRUCell(128)
        self.actor, self.critic = (
            nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(size)])
            for size in (self.num_actions, 1)
        )

    @nn.nowrap
    def initialize_memory(self, num_envs: int) -> jax.Array:
        """Returns the memory at the start of an episode."""
        return jnp.zeros((num_envs, 128))

    def encode(self, memory: jax.Array, obs: jax.Array) -> Any:
        """Maps memory and observations to memory and features."""
        return self.cell(memory, nn.relu(self.embedding(obs)))

    def heads(self, features: jax.Array) -> Any:
        """Maps features to logits and values."""
        return self.actor(features), self.critic(features)[..., 0]

    def __call__(self, memory: jax.Array, obs: jax.Array) -> Any:
        """Maps memory and observations to memory, and to logits and values."""
        memory, features = self.encode(memory, obs)
        return memory, self.heads(features)


class Greedy(nn.Module):
    """A greedy policy for evosax, which passes an unused key."""

    @nn.compact
    def __call__(self, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Maps observations to one of two actions."""
        x = nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(obs))))
        return nn.Dense(2)(x).argmax(axis=-1)


class Patches(nn.Module):
    """A 3 x 3 convolution with 16 filters as a product of nine shifted images."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps `[S, 10, 10, C]` to `[S, 8, 8, 16]`."""
        shifts = [(i, j) for i in range(3) for j in range(3)]
        patches = [obs[:, i : i + 8, j : j + 8] for i, j in shifts]
        return nn.Dense(16)(jnp.concatenate(patches, axis=-1))


LAYERS = {
    "`nn.Conv(16, (3, 3))`": nn.Conv(16, (3, 3), padding="VALID"),
    "the same as a product over patches": Patches(),
    # The first layer of PureJaxRL's networks.
    "`nn.Dense(64)`, flat image": nn.Sequential(
        [lambda obs: obs.reshape(obs.shape[0], -1), nn.Dense(64)]
    ),
}


def of_purejaxrl(folder: Path) -> Iterator[Training]:
    """Yields comparisons with the scripts of PureJaxRL."""
    cartpole = functools.partial(train_ppo, "CartPole-v1")
    breakout = PUREJAXRL.replace(
        num_updates=2, num_minibatches=8, learning_rate=5e-3, activation="relu"
    )
    robot = PUREJAXRL.replace(
        num_updates=2,
        num_minibatches=8,
        learning_rate=3e-4,
        ent_coef=0.0,
        hidden_layer_sizes=(256, 256),
    )
    two, sweep = PUREJAXRL.replace(num_updates=2), (1, 8)
    for name, env_id, config, ours, script, seeds in (
        *(
            (
                f"PPO, CartPole, {num_envs:,} lanes",
                "CartPole-v1",
                PUREJAXRL.replace(num_envs=num_envs, num_updates=num_updates),
                cartpole,
                "ppo",
                sweep if num_envs in (4, 64) else (1,),
            )
            for num_envs, num_updates in SIZES.items()
        ),
        (
            "PPO, Breakout, 64 lanes",
            "Breakout-MinAtar",
            breakout,
            functools.partial(train_ppo, "Breakout-MinAtar"),
            "ppo",
            sweep,
        ),
        (
            "PPO, hopper, 64 lanes",
            "brax:hopper",
            robot,
            functools.partial(train_ppo, "brax:hopper"),
            "ppo_continuous_action",
            (1,),
        ),
        (
            "Recurrent PPO, CartPole, 64 lanes",
            "CartPole-v1",
            two,
            train_recurrent,
            "ppo_rnn",
            (1,),
        ),
        (
            "DQN, CartPole, 10 lanes",
            "CartPole-v1",
            DQNSettings(4000),
            train_dqn,
            "dqn",
            sweep,
        ),
    ):
        theirs = functools.partial(
            peers.make_purejaxrl, env_id, config, folder, script, normalize=True
        )
        training = Training(
            name,
            f"PureJaxRL's `{script}.py`",
            config.num_updates,
            functools.partial(ours, config),
            lambda theirs=theirs: theirs().train,
            seeds,
        )
        if script in ("ppo", "ppo_continuous_action"):
            yield from with_microbatches(training, ours, config)
        else:
            yield training


def with_microbatches(
    training: Training, ours: Callable[[PPOSettings], Train], config: PPOSettings
) -> Iterator[Training]:
    """Yields a comparison, and a copy with microbatches for large minibatches."""
    yield training
    num_rows = config.num_envs * config.num_steps // config.num_minibatches
    if num_rows > MICROBATCH_SIZE:
        config = config.replace(microbatch_size=MICROBATCH_SIZE)
        name = f"{training.name}, microbatches of {MICROBATCH_SIZE}"
        yield training._replace(name=name, ours=functools.partial(ours, config))


def train_ppo(env_id: str, config: PPOSettings) -> Train:
    """Makes a training function of PPO; normalizes robot observations and rewards."""
    return recipes.make_ppo(recipes.make_lanes(env_id, config), config).train


def train_recurrent(config: PPOSettings) -> Train:
    """Makes a training function of recurrent PPO with the network of PureJaxRL."""
    env = envs.vectorize(make_env("CartPole-v1"), config.num_envs)
    network = RecurrentNetwork(env.action_space.n)
    agent = recurrent_ppo.RecurrentPPO(
        env,
        recurrent_ppo.Config(
            num_updates=config.num_updates,
            num_minibatches=config.num_minibatches,
            learning_rate=config.learning_rate,
            clip_range_vf=config.clip_range_vf,
        ),
        network,
    )
    return lambda key: agent.train(agent.init(key))


def train_dqn(config: DQNSettings) -> Train:
    """Makes a training function of DQN with the settings of PureJaxRL."""
    return recipes.make_dqn(make_env("CartPole-v1"), config).train


def of_rejax() -> Iterator[Training]:
    """Yields comparisons with the programs of rejax."""
    config = PUREJAXRL.replace(num_updates=10)
    ours = functools.partial(train_ppo, "CartPole-v1")
    training = Training(
        "PPO, CartPole, 64 lanes",
        "rejax",
        10,
        functools.partial(ours, config),
        lambda: peers.make_rejax("CartPole-v1", config).train,
    )
    yield from with_microbatches(training, ours, config)
    yield Training(
        "DQN, CartPole, 10 lanes",
        "rejax",
        4000,
        functools.partial(train_dqn, DQNSettings(4000)),
        lambda: peers.make_rejax("CartPole-v1", DQNSettings(4000)).train,
    )


def of_purejaxql(folder: Path, purejaxrl: Path) -> Iterator[Training]:
    """Yields a comparison of purejaxql's script and the recipe of the page."""
    num_updates = 20

    def ours() -> Train:
        page, number = "../coming_from/purejaxql", {"64, 244,": f"64, {num_updates},"}
        return recipes.setup(page, "params, returns", number)["train"]

    yield Training(
        "PQN, CartPole, 32 lanes",
        "purejaxql's `pqn_gymnax.py`",
        num_updates,
        ours,
        lambda: peers.make_purejaxql(folder, purejaxrl, num_updates),
    )


def of_craftax(folder: Path) -> Iterator[Training]:
    """Yields comparisons of Craftax_Baselines' script and `ppo.py` with its network."""
    env_id = "Craftax-Classic-Symbolic-v1"
    config = PUREJAXRL.replace(
        num_updates=2,
        num_steps=64,
        num_minibatches=8,
        learning_rate=2e-4,
        gae_lambda=0.8,
        max_grad_norm=1.0,
        hidden_layer_sizes=(512,),
    )
    train, layers = peers.make_craftax(folder, env_id, config)

    class Network(nn.Module):
        layers: nn.Module

        def __call__(self, obs: jax.Array) -> Any:
            policy, value = self.layers(obs)
            return policy.logits, value

    def ours(config: PPOSettings) -> Train:
        env = envs.make_vec(f"craftax:{env_id}", config.num_envs)
        agent = ppo.PPO(env, config, Network(layers))
        return lambda key: agent.train(agent.init(key))

    training = Training(
        "PPO, Craftax Classic, 64 lanes",
        "Craftax_Baselines' `ppo.py`",
        config.num_updates,
        functools.partial(ours, config),
        lambda: train,
    )
    yield from with_microbatches(training, ours, config)


def of_jaxmarl(folder: Path) -> Iterator[Training]:
    """Yields comparisons with the scripts of JaxMARL."""
    length, num_updates = 10, teams.TASKS["VDN, spread"][0][3] // (8 * 26)

    def theirs(task: str, **overrides: Any) -> Train:
        module, config, _, settings = teams.TASKS[task][1]
        train = teams.load_script(folder, module, config, settings | overrides)[0]
        return lambda key: train(jax.random.key_data(key))

    def ippo() -> Train:
        names = recipes.setup("ippo", "carry_key, ")

        def train(key: jax.Array) -> Any:
            carry_key, init_key, key = jax.random.split(key, 3)
            carry = names["collector"].init(carry_key)
            obs = names["transform_obs"](carry.obs["agents"])
            state = names["agent"].init_learner(init_key, obs)
            state = state.replace(carry=carry, key=key)
            window = rollout.EpisodeWindow.init(200)
            step = lambda state, _: (names["update"](*state), None)  # noqa: E731
            return jax.lax.scan(step, (state, window), length=length)[0]

        return train

    yield Training(
        "IPPO, MPE spread, 16 lanes",
        "JaxMARL's `ippo_ff_mpe.py`",
        length,
        ippo,
        functools.partial(theirs, "IPPO, spread", TOTAL_TIMESTEPS=length * 16 * 128),
    )

    def vdn() -> Train:
        names = recipes.setup("vdn", "returns = ")
        shapes = jax.eval_shape(lambda: names["state"][1])

        def train(key: jax.Array) -> Any:
            buffer_state = jax.tree.map(jnp.zeros_like, shapes)
            init_key, params_key, key = jax.random.split(key, 3)
            carry = names["collector"].init(init_key)
            obs = jax.tree.map(lambda x: x[0], carry.obs["agents"])
            params = names["network"].init(params_key, obs, jnp.zeros((3, 64)))

            def step(state: Any, key: jax.Array) -> Any:
                return names["update"](*state, 0.05, key), None

            learner = params, params, names["optimizer"].init(params)
            state = carry, buffer_state, *learner, rollout.EpisodeWindow.init(200)
            keys = jax.random.split(key, num_updates)
            return jax.lax.scan(step, state, keys)[0]

        return train

    yield Training(
        "VDN, MPE spread, 8 lanes",
        "JaxMARL's `vdn_rnn.py`",  # takes gradient steps from update 33 of 1,440 on
        num_updates,
        vdn,
        functools.partial(theirs, "VDN, spread", LEARNING_STARTS=0),
    )


def of_evosax() -> Iterator[Training]:
    """Yields one generation of an evolution strategy: 256 policies, an episode each."""
    from evosax.problems import GymnaxProblem

    network, key = Greedy(), jax.random.key(0)
    obs = jnp.zeros(4)
    make = lambda key: network.init(key, obs)  # noqa: E731
    population = jax.vmap(make)(jax.random.split(key, 256))

    def ours() -> Train:
        policy = rollout.stateless_policy(
            lambda params, obs, key: jax.vmap(network.apply)(params, obs)
        )
        env = envs.make_vec("CartPole-v1", 256)
        collector = rollout.Collector(env=env, policy=policy)

        def train(key: jax.Array) -> Any:
            carry = collector.init(key)
            return collector.collect_episodes(
                carry, population, 1, max_episode_steps=500, per_env=True
            )[1]

        return train

    def theirs() -> Train:
        with mock.patch.object(gymnax, "make", peers.make_one_flag):
            problem = GymnaxProblem("CartPole-v1", network, use_normalize_obs=False)
        return lambda key: problem.eval(key, population, problem.init(key))

    yield Training("256 policies, CartPole, untrained", "evosax", 1, ours, theirs)


def training_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Compiles and times every comparison with each of its numbers of seeds."""
    trainings: list[Training] = []
    if args.purejaxrl[0]:
        trainings += of_purejaxrl(Path(args.purejaxrl[0]))
    if args.rejax[0]:
        trainings += of_rejax()
    if args.evosax[0]:
        trainings += of_evosax()
    if args.purejaxql[0]:
        trainings += of_purejaxql(Path(args.purejaxql[0]), Path(args.purejaxrl[0]))
    if args.craftax[0]:
        trainings += of_craftax(Path(args.craftax[0]))
    if args.jaxmarl[0]:
        trainings += of_jaxmarl(Path(args.jaxmarl[0]))
    for training in trainings:
        for num_seeds in training.seeds:
            name = f"{training.peer}, {training.name}, {num_seeds}"
            if any(name.startswith(x) for x in args.only):
                yield row_of(training, num_seeds, args.repeats)


def row_of(training: Training, num_seeds: int, repeats: int) -> dict[str, str]:
    """Compiles and times a comparison, with `jax.vmap` over multiple seeds."""
    jax.clear_caches()
    keys = jax.random.split(jax.random.key(0), num_seeds)
    compiled, programs = {}, {}
    for maker in ("ours", "theirs"):
        train = getattr(training, maker)()
        train = jax.vmap(train) if num_seeds > 1 else train
        inputs = keys if num_seeds > 1 else keys[0]
        start = time.process_time()
        program = jax.jit(train).lower(inputs).compile()
        compiled[maker] = time.process_time() - start
        programs[maker] = functools.partial(program, inputs)
    ours, theirs = measure(programs, repeats).values()

    def ms(seconds: float) -> str:
        value = 1e3 * seconds / training.num_updates
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    return {
        "training": training.name,
        "against": training.peer,
        "seeds": f"{num_seeds}",
        "here, CPU ms": ms(ours.cpu),
        "there, CPU ms": ms(theirs.cpu),
        "CPU time, there / here": f"{theirs.cpu / ours.cpu:.2f}",
        "wall time, there / here": f"{theirs.wall / ours.wall:.2f}",
        "compiling here, CPU s": f"{compiled['ours']:.1f}",
        "compiling there, CPU s": f"{compiled['theirs']:.1f}",
        "compiling, there / here": f"{compiled['theirs'] / compiled['ours']:.2f}",
        "repeats": f"{repeats}",
    }


def layer_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each layer and the gradient of its weights."""
    for batch_size in (64, 256):
        obs = jax.random.bernoulli(jax.random.key(0), 0.1, (batch_size, 10, 10, 4))
        obs, programs = obs.astype(jnp.float32), dict[str, Program]()
        for name, network in LAYERS.items():
            params = network.init(jax.random.key(1), obs)
            programs[name] = functools.partial(descend(network), params, obs)
        timing = measure(programs, args.repeats)
        us = {name: f"{1e6 * x.cpu / STEPS:,.0f}" for name, x in timing.items()}
        yield {"images": f"{batch_size}", **us}


def descend(network: nn.Module) -> Callable[[Any, jax.Array], Any]:
    """Makes a program that takes `STEPS` gradient descent steps."""

    def loss(params: Any, obs: jax.Array) -> jax.Array:
        return jnp.square(network.apply(params, obs)).mean()

    @jax.jit
    def program(params: Any, obs: jax.Array) -> Any:
        def step(params: Any, _: None) -> tuple[Any, None]:
            grads = jax.grad(loss)(params, obs)
            return jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads), None

        return jax.lax.scan(step, params, length=STEPS)

    return program


if __name__ == "__main__":
    tables = {"trainings": training_rows, "convolutions": layer_rows}
    folders = dict.fromkeys(("purejaxrl", "purejaxql", "craftax", "jaxmarl"), ("",))
    run(__doc__, 7, tables, **folders, rejax=(0,), evosax=(0,), only=("",))
