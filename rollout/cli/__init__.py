"""The command line `python -m rollout`.

`main` runs the commands and handles errors, `arguments` parses, `runs` collects, and
`table` formats what was found.
"""
