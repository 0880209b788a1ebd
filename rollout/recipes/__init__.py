"""Agents to read, run and copy, one file each.

    python -m rollout.recipes.ppo CartPole-v1

Copy a file and change it: that is what it is for, and the one here may change, too. It
needs the extra `train`: optax, and what draws curves and episodes.

- `ppo`, `recurrent_ppo`, `dqn`, `sac`: the agents.
- `training`: what they share, the loop and the command.
- `gradients`: those of networks, in less time.
- `distributions`: the distribution over any space of actions.
"""
