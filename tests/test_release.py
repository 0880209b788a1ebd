"""Tests of versions, the citation and the packages of a release."""

import pathlib
import re
import tomllib

import yaml

import rollout

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_version_is_a_literal():
    """A build reads the version without an import of JAX."""
    source = (ROOT / "rollout" / "version.py").read_text()
    assert f'\n__version__ = "{rollout.__version__}"\n' in source


def test_citation_and_changelog_have_the_version():
    assert str(CITATION["version"]) == rollout.__version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert not released or released[0].split()[0] == rollout.__version__


def test_manifest_patterns_match_files():
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        command, *patterns = line.split()
        if command in ("include", "graft"):
            for pattern in patterns:
                assert list(ROOT.glob(pattern)), pattern


def test_settings_list_every_package():
    """The folders `buffers` and `envs` are packages inside `rollout`."""
    folders = {"buffers": "rollout.buffers", "envs": "rollout.envs"}
    settings = PROJECT["tool"]["setuptools"]
    assert settings["package-dir"] == {name: path for path, name in folders.items()}
    names = set()
    for folder, name in {"rollout": "rollout", **folders}.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            names.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
        link = ROOT / name.replace(".", "/")
        assert link.samefile(ROOT / folder)
    assert set(settings["packages"]) == names


def test_extras_refer_to_existing_extras():
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = [name for extra in extras.values() for name in extra]
    matches = [re.fullmatch(r"rollout-jax\[(.*)\]", name) for name in requirements]
    references = {name for match in matches if match for name in match[1].split(",")}
    assert references
    assert references <= set(extras)
