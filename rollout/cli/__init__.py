"""The command line: `main` reads the arguments; `steps` and `episodes` are its runs.

`collector` makes what they collect with; `report` prints and `figure` draws what came
of them, which is in `types`; `agents` is what they say of several agents.
`inspection` runs nothing, but says what a run would do on an accelerator.
"""
