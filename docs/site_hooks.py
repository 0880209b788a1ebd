"""Adapts the pages to MkDocs; in the repository they stay plain Markdown.

The README is the first page of the site. Links that leave `docs/` lead to the file at
`repo_url`; as long as mkdocs.yml names none, its path stands in their place. Names of
the packages lead to the API, where classes of flax have the signature of dataclasses.
"""

import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
API = "".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
# A function in a module of its own name stands there as `envs.vectorize.vectorize`.
PUBLIC = {re.sub(r"\.\w+\.", ".", x): x for x in re.findall(r"::: (\S+)", API)}


class FlaxDataclasses(griffe.Extension):
    """Takes `flax.struct` for `dataclasses`; private fields are left out."""

    def on_module_members(self, *, mod, **_):
        """Redirects the import."""
        if "struct" in mod.members:
            mod.members["struct"].target_path = "dataclasses"

    def on_class_members(self, *, cls, **_):
        """Removes private fields."""
        for name in [x for x in cls.members if x.startswith("_")]:
            if cls.members[name].is_attribute:
                del cls.members[name]


def on_files(files, config):
    """Adds the README as the first page."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme))


def on_page_markdown(markdown, page, config, **_):
    """Turns the links of a page, which are those of the repository, into the site's."""
    is_readme = page.file.src_uri == "index.md"
    folder = "" if is_readme else posixpath.dirname("docs/" + page.file.src_uri)

    def link(found):
        text, path, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / target).is_file():
            return found.group()
        if target.startswith("docs/"):
            return f"[{text}]({posixpath.relpath(target, folder or 'docs')}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{target})"
        return f"{text} (`{target}`)"

    def name(found):
        target = PUBLIC.get(found[1])
        return f"[{found[0]}][{target}]" if target else found[0]

    markdown = re.sub(r"(?<!\[)`(\w+\.\w+)(?:\([^`]*\))?`(?!\])", name, markdown)
    return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*|)\)", link, markdown)
