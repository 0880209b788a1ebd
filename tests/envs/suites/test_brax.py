"""What only brax has."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_suites
import pytest
from suite_checks import check_contract, collect

from rollout import envs
from rollout.envs.suites.brax import from_brax

brax_envs = plain_suites.import_quietly("brax.envs")
pytestmark = pytest.mark.usefixtures("rank_promotion")
KEY = jax.random.key(3)


def test_environment_without_a_model_has_no_leaves_and_is_traced_once():
    suite_env = brax_envs.get_environment("fast")
    env = from_brax(suite_env)
    assert jax.tree.leaves(env) == []
    lanes = envs.vectorize(envs.TimeLimit(env, 3), 2)
    rows = collect(lanes, num_steps=8)
    counts = suite_env.reset_count, suite_env.step_count
    collect(lanes, num_steps=8)
    assert (suite_env.reset_count, suite_env.step_count) == counts
    np.testing.assert_array_equal(rows.truncated[:, 0], np.arange(1, 9) % 3 == 0)
    assert not rows.terminated.any()
    assert not envs.render.can_render(env)


@pytest.mark.parametrize("backend", ["generalized", "spring", "positional", "mjx"])
def test_every_backend_keeps_the_contract(backend):
    env = envs.make("brax:inverted_pendulum", backend=backend)
    assert env is envs.make("brax:inverted_pendulum", backend=backend)
    check_contract(env)


def test_episodes_end_after_a_thousand_steps_or_as_asked():
    """As in `brax.envs.create`."""
    env = envs.make("brax:fast")
    assert (type(env), env.num_steps) == (envs.TimeLimit, 1000)
    longer = envs.make("brax:fast", max_episode_steps=2000)
    assert longer == envs.TimeLimit(env.env, 2000)  # in the place of the other
    with pytest.raises(ValueError, match="`max_episode_steps` limits episodes"):
        envs.make("brax:inverted_pendulum", episode_length=5)


def test_wrappers_of_training_are_refused():
    training = brax_envs.training
    fast = brax_envs.get_environment("fast")
    for env in (
        brax_envs.create("fast"),
        training.EpisodeWrapper(fast, 10, 1),
        training.VmapWrapper(fast),
        brax_envs.Wrapper(training.AutoResetWrapper(fast)),
    ):
        with pytest.raises(ValueError, match=r"`env` must be without .* got .*Wrapper"):
            from_brax(env)


def test_other_wrappers_are_kept_and_get_the_model():
    class Weigh(brax_envs.Wrapper):
        def step(self, state, action):
            return state.replace(reward=self.sys.gravity[2])

    env = from_brax(Weigh(brax_envs.get_environment("inverted_pendulum")))
    state = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(env.reset, KEY)[0]
    )
    for scale in (1.0, 3.0):
        model = env.model.replace(gravity=env.model.gravity * scale)
        step = env.replace(model=model).step(KEY, state, jnp.zeros(1))
        np.testing.assert_allclose(step.reward, -9.81 * scale, rtol=1e-6)
