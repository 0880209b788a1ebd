"""The command line `python -m rollout`.

`main` runs the commands and handles errors and Ctrl-C, `arguments` parses, `runs`
collects, `table` formats what was found, and `figure` plots it.
"""
