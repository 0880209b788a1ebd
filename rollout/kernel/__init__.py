"""The kernel: the pure step, the folds over it, and the derivation of random keys.

Begin with `step`. `scan` folds it over T steps, and `episodes` over exactly N episodes.
`keys` derives every key and episode id. `state` validates the carry, resets the
policy's state, evaluates the critic and records transitions. `isolation` keeps XLA from
computing an environment step several times.
"""
