"""The command line `python -m rollout`: `main` runs what `arguments` reads.

`runs` collects, on the `collector` of the run; `report` says what came of it, `figure`
draws it, `interrupts` is Ctrl-C, and `files` writes files whole or not at all.
"""
