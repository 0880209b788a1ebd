"""The kernel: the pure step, the folds over it, and the keys it draws from.

Begin with `step`, one screen and a half. `fold` folds it over T steps, and `episodes`
until exactly N episodes are done. `carry` checks what both begin with, `episode_keys`
derives every key and episode id, `policy_state` starts anew with an episode,
`step_once` isolates the environments, `values` calls the critic, and `recording`
accumulates values and records rows.
"""
