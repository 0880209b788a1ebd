"""A network of the user whose outputs have a wrong shape raises where it is passed."""

import flax.linen as nn
import jax
import pytest

from rollout.envs import Box, Discrete
from rollout.envs.spaces import EnvSpec
from rollout.recipes.dqn import DQN
from rollout.recipes.ppo import PPO
from rollout.recipes.pqn import PQN
from rollout.recipes.sac import SAC
from rollout.recipes.td3 import TD3


class Layers(nn.Module):
    """An output per size; the size None is a last axis that is left out."""

    sizes: tuple

    @nn.compact
    def __call__(self, *inputs):
        x = inputs[0]
        layers = [nn.Dense(size or 1)(x) for size in self.sizes]
        pairs = zip(layers, self.sizes, strict=True)
        outputs = [y if size else y[..., 0] for y, size in pairs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


CHOICE, FORCE = Discrete(3), Box(-1.0, 1.0, (2,))
PAIR = r"must return a tuple of 2 arrays of shape \(1, {}\) and \(1,\), got "
ONE = r"must return one array of shape \(.*1, {}\), got "
WRONG = [
    (PPO, CHOICE, "network", (2, None), PAIR.format(3)),
    (PPO, CHOICE, "network", (3, 1), PAIR.format(3)),
    (PPO, CHOICE, "network", (3,), PAIR.format(3)),
    (PPO, CHOICE, "network", (None, 3), PAIR.format(3)),
    (PPO, FORCE, "network", (2, None), PAIR.format(4)),  # no log standard deviations
    (DQN, CHOICE, "network", (4,), ONE.format(3)),
    (DQN, CHOICE, "network", (3, None), ONE.format(3) + "2 values"),
    (PQN, CHOICE, "network", (4,), ONE.format(3)),
    (SAC, FORCE, "actor_network", (2,), ONE.format(4)),
    (SAC, FORCE, "critic_network", (2,), ONE.format(1)),
    (SAC, FORCE, "critic_network", (None,), ONE.format(1)),
    (TD3, FORCE, "actor_network", (4,), ONE.format(2)),
    (TD3, FORCE, "critic_network", (None,), ONE.format(1)),
]


def init(agent_class, action_space, **networks):
    spec = EnvSpec(Box(-1.0, 1.0, (5,)), action_space, num_envs=1)
    agent = agent_class(spec, **networks)
    obs = jax.ShapeDtypeStruct((1, 5), "float32")
    return jax.eval_shape(agent.init_learner, jax.random.key(0), obs)


@pytest.mark.parametrize(("agent_class", "space", "name", "sizes", "message"), WRONG)
def test_network_with_wrong_outputs_is_named(agent_class, space, name, sizes, message):
    with pytest.raises(ValueError, match=f"`{name}` {message}"):
        init(agent_class, space, **{name: Layers(sizes)})


@pytest.mark.parametrize(
    ("agent_class", "space", "sizes"),
    [
        (PPO, CHOICE, {"network": (3, None)}),
        (DQN, CHOICE, {"network": (3,)}),
        (SAC, FORCE, {"actor_network": (4,), "critic_network": (1,)}),
    ],
)
def test_network_with_the_outputs_of_its_docstring_is_accepted(
    agent_class, space, sizes
):
    networks = {name: Layers(x) for name, x in sizes.items()}
    assert jax.tree.leaves(init(agent_class, space, **networks).params)
