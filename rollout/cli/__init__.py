"""The command line `python -m rollout`.

`main` executes the commands, `arguments` parses them; `collector` makes the collector
of a run and `runs` collects with it; `report` formats the results, `figure` plots them,
`files` writes files, and `interrupts` handles Ctrl-C.
"""
