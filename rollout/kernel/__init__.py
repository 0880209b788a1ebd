"""The kernel: the pure step, the folds over it, and the derivation of random keys.

Begin with `step`. `fold` folds it over T steps, and `episodes` until exactly N episodes
are done. `carry` validates the carry, `episode_keys` derives every key and episode id,
`policy_state` resets the policy's state at episode boundaries, `step_once` isolates the
environments, `values` evaluates the critic, and `recording` accumulates values and
records rows.
"""
