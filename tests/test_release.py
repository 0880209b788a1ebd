"""A release: one version everywhere, a citation that can be read, and who is packed."""

import pathlib
import re
import tomllib

import yaml

import rollout

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_version_can_be_read_without_an_import():
    """Else a build would need jax."""
    source = (ROOT / "rollout" / "version.py").read_text()
    assert f'\n__version__ = "{rollout.__version__}"\n' in source


def test_citation_and_changelog_have_the_version():
    assert str(CITATION["version"]) == rollout.__version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert not released or released[0].split()[0] == rollout.__version__


def test_source_archive_names_files_that_exist():
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        command, *patterns = line.split()
        if command in ("include", "graft"):
            for pattern in patterns:
                assert list(ROOT.glob(pattern)), pattern


def test_every_package_is_packed():
    """And the two folders beside `rollout` become packages of it."""
    folders = {"buffers": "rollout.buffers", "envs": "rollout.envs"}
    settings = PROJECT["tool"]["setuptools"]
    assert settings["package-dir"] == {name: path for path, name in folders.items()}
    found = set()
    for folder, name in {"rollout": "rollout", **folders}.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
        link = ROOT / name.replace(".", "/")
        assert link.samefile(ROOT / folder)
    assert set(settings["packages"]) == found


def test_extras_that_name_extras_name_ones_that_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [asked for some in extras.values() for asked in some]
    own = [re.fullmatch(r"rollout-jax\[(.*)\]", one) for one in asked]
    named = {name for match in own if match for name in match[1].split(",")}
    assert named
    assert named <= set(extras)
