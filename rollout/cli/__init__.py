"""The command line: `main` reads the arguments; `steps` and `episodes` are its runs.

`collector` makes what they collect with; `report` prints and `figure` draws what came
of them, and `agents` is what it says of several agents.
"""
