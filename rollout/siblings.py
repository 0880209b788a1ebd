"""Fails early when the user's own `envs` or `buffers` shadows ours."""

import importlib.util
from pathlib import Path


def check(name: str) -> None:
    """Raises if a module of the user shadows one of our packages.

    Raises:
        ImportError: if `import name` would find another package.
    """
    ours = Path(__file__).parents[1] / name / "__init__.py"
    spec = importlib.util.find_spec(name)
    found = spec and spec.origin
    if found and ours.exists() and not ours.samefile(found):
        raise ImportError(
            f"`{name}` must be the package that comes with `rollout`, {ours}, got "
            f"{found}, which shadows it: rename that one."
        )


check("envs")
