"""The command line `python -m rollout`.

`arguments` parses the arguments, `main` runs the command and handles errors, and
`table` formats the results.
"""
