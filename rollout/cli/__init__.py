"""The command line `python -m rollout`.

`main` executes the commands, `arguments` parses them; `random_collector` makes the
collector of a run and `runs` collects with it; `table` formats the results, `figure`
plots them, `files` writes files, and `interrupts` handles Ctrl-C.
"""
