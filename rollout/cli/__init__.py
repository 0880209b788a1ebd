"""The command line `python -m rollout`.

`arguments` parses, `main` collects, draws or inspects, and handles errors, and `table`
formats what was found.
"""
