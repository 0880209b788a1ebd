import jax
import matplotlib.pyplot as plt
from ppo import PPO, Config, train

import rollout

config = Config(num_updates=40, num_envs=64, num_steps=128)
env = rollout.envs.make_vec("CartPole-v1", config.num_envs)
agent = PPO(env.action_space, config)
collector = rollout.Collector(env=env, policy=agent.policy)

key = jax.random.key(0)
params, carry, log = jax.jit(lambda key: train(agent, collector, key))(key)

plt.plot(log["steps"], log["return"])
plt.gca().set(xlabel="environment steps", ylabel="mean return, last 100 episodes")
plt.savefig("agent.png")
print(rollout.evaluate(collector, key, params, num_episodes=100))
rollout.record_gif(collector, key, params, "agent.gif", max_episode_steps=200)
