"""The command line: `main` reads the arguments; `steps` and `episodes` are its runs.

`report` prints and `figure` draws what came of them.
"""
