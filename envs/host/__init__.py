"""Environments that are not JAX, seen through one contract.

`types` has the contracts; `local` steps environments in this process and `workers` in
others; `gymnasium` and `envpool` adapt those packages, which are imported only when
they are called for; `spaces` converts their spaces; `simulated` is a JAX environment
that answers after a latency, for tests and teaching.
"""
