"""Adapts the pages to MkDocs; in the repository they stay plain Markdown and notebooks.

The README is the first page of the site, and the notebooks are pages with their saved
outputs. Links between them lead to pages. Links to other files lead to the repository
that `project.urls` in pyproject.toml names, and as long as it names none, the path
stands in their place. Names of the packages lead to the API, where classes of flax have
the signature of dataclasses.
"""

import binascii
import pathlib
import posixpath
import re
import tomllib

import griffe
import nbconvert
from mkdocs.structure.files import File
from traitlets.config import Config

ROOT = pathlib.Path(__file__).parent.parent
API = "".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
# Refer to a function whose module has the same name, for example
# `rollout.envs.vectorize.vectorize`, by the name of the module.
PUBLIC = {re.sub(r"\b(\w+)\.\1$", r"\1", x): x for x in re.findall(r"::: (\S+)", API)}
FIELDS = {"struct.PyTreeNode", "NamedTuple"}  # bases of classes made of fields
PICTURES = ["image/gif", "image/png"]
# Pages that the search shows before others with the words of their names.
BOOSTS = {"recipes/ppo.md": 2, "own_gymnasium.md": 1.25}
# Outputs are blocks of text, one for all that a cell prints, and pictures are files.
NOTEBOOK = nbconvert.MarkdownExporter(
    raw_template="""{% extends "markdown/index.md.j2" %}
{% block stream %}
```text
{{ output.text.rstrip() }}
```
{% endblock %}
{% block data_text %}
```text
{{ output.data["text/plain"] }}
```
{% endblock %}
{% block data_other %}
![{{ cell.metadata.alt }}]({{ output.metadata.filenames["image/gif"] }})
{% endblock %}
{% block data_png %}
![{{ cell.metadata.alt }}]({{ output.metadata.filenames["image/png"] }})
{% endblock %}""",
    config=Config(
        CoalesceStreamsPreprocessor=Config(enabled=True),
        ExtractOutputPreprocessor=Config(extract_output_types=PICTURES),
        NbConvertBase=Config(display_data_priority=PICTURES),
    ),
)


class Signatures(griffe.Extension):
    """Takes `flax.struct` and named tuples for dataclasses, whose fields are arguments.

    Private fields are left out.
    """

    def on_module_members(self, *, mod, **_):
        """Redirects the import."""
        if "struct" in mod.members:
            mod.members["struct"].target_path = "dataclasses"

    def on_class_members(self, *, cls, **_):
        """Removes private fields."""
        for name in [x for x in cls.members if x.startswith("_") and x != "_"]:
            if cls.members[name].is_attribute:
                del cls.members[name]

    def on_package(self, *, pkg, **_):
        """Makes dataclasses of the subclasses, now that their bases are known."""
        for cls in _classes(pkg):
            bases = {str(base) for x in (cls, *cls.mro()) for base in x.bases}
            if bases & FIELDS:
                arguments = [griffe.ExprKeyword(*x) for x in cls.keywords.items()]
                name = griffe.ExprName("dataclasses.dataclass")
                call = griffe.ExprCall(name, arguments)
                decorator = griffe.Decorator(call, lineno=None, endlineno=None)
                cls.decorators.append(decorator)


def on_config(config):
    """Reads the address of the repository, if it has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    if config.repo_url:
        config.repo_name = "/".join(config.repo_url.rstrip("/").split("/")[-2:])
        config.edit_uri = "edit/main/docs/"


def on_files(files, config):
    """Adds the README as the first page, and the notebooks."""

    def add(src_uri, content, edited=None):
        file = File.generated(config, src_uri, content=content)
        file.edit_uri = edited and f"../{edited}"
        files.append(file)

    readme = (ROOT / "README.md").read_text().replace('src="docs/', 'src="')
    add("index.md", readme, "README.md")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        resources = {"unique_key": path.stem}
        text, resources = NOTEBOOK.from_filename(path, resources=resources)
        add(f"notebooks/{path.stem}.md", text, f"notebooks/{path.name}")
        add(f"notebooks/{path.name}", path.read_bytes())
        for name, data in resources["outputs"].items():
            # nbconvert decodes PNG pictures and leaves other formats as base64 text.
            is_gif = name.endswith(".gif")
            add(f"notebooks/{name}", binascii.a2b_base64(data) if is_gif else data)


def on_page_markdown(markdown, page, config, **_):
    """Converts links to files of the repository to links of the site."""
    folder = posixpath.dirname(_in_repository(page.file.src_uri))
    if folder == "docs/api":  # the search finds the pages that show the use first
        page.meta["search"] = {"boost": 0.05}
    if boost := BOOSTS.get(page.file.src_uri):
        page.meta["search"] = {"boost": boost}

    def link(match):
        text, path, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / target).is_file():
            return match.group()
        if on_site := _on_site(target):
            page_folder = posixpath.dirname(page.file.src_uri) or "."
            return f"[{text}]({posixpath.relpath(on_site, page_folder)}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{target})"
        return f"{text} (`{target}`)"

    def name(match):
        target = PUBLIC.get(match[1])
        return f"[{match[0]}][{target}]" if target else match[0]

    def adapt(text):
        text = re.sub(r"(?<!\[)`([\w.]+\.\w+)(?:\([^`]*\))?`(?!\])", name, text)
        return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*|)\)", link, text)

    url = config.repo_url
    clone = f"\n```bash\ngit clone {url} rollout && cd rollout\n```\n" if url else ""
    markdown = markdown.replace("<!-- clone -->", clone)
    # Every other part is a block of code.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    text = "".join(x if i % 2 else adapt(x) for i, x in enumerate(parts))
    return _with_download(text, page.file) if folder == "notebooks" else text


def _with_download(text, file):
    """Puts a link to the notebook itself below the title of its page."""
    title, rest = text.lstrip().split("\n", 1)
    name = posixpath.basename(file.src_uri).replace(".md", ".ipynb")
    link = f"[Download the notebook]({name}){{ download data-search-exclude }}"
    return f"{title}\n\n{link}\n{rest}"


def on_page_content(html, **_):
    """Tells each cell of a wide table its column, for phones, where rows are lists."""

    def label(table):
        rows = re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)
        names = re.findall(r"<th\b.*?>(.*?)</th>", rows[0])
        names = [re.sub(r"<.*?>", "", x) for x in names]
        longest = max(len(re.sub(r"<.*?>|\s+", " ", row)) for row in rows)
        if longest < 60:  # as it is, it fits
            return table[0]
        labels = iter(names * (len(rows) - 1))
        html = re.sub(r"<td\b", lambda _: f'<td data-label="{next(labels)}"', table[0])
        return html.replace("<table", "<table data-lists")

    return re.sub(r"<table>.*?</table>", label, html, flags=re.DOTALL)


def on_post_page(output, **_):
    """Keeps the theme from asking GitHub for stars and releases."""
    return output.replace(' data-md-component="source"', "")


def _classes(module):
    """All classes of a module and of those inside it."""
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_class:
            yield member
        elif member.is_module:
            yield from _classes(member)


def _in_repository(src_uri):
    if src_uri == "index.md":
        return "README.md"
    if src_uri.startswith("notebooks/"):
        return src_uri.removesuffix(".md") + ".ipynb"
    return f"docs/{src_uri}"


def _on_site(path):
    if path == "README.md":
        return "index.md"
    if path.startswith("notebooks/"):
        return path.removesuffix(".ipynb") + ".md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None
