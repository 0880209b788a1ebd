"""Writes the tables of the pages from the data files in `docs`.

A table follows a comment, `<!-- table: NAME -->`. Text files contain all rows for two
pages. `speed_page.py` and `accelerators_page.py` draw the charts.

    python benchmarks/tables.py
"""

import json
import re
from pathlib import Path
from typing import Any

import accelerators_page
import learning_compared
import ppo_results
import speed_page
import teams
from speed_page import DOCS


def written() -> dict[Path, str]:
    """Returns the required text of every file that contains tables."""

    def load(name: str) -> dict[str, Any]:
        return json.loads((DOCS / name).read_text())

    speed, accelerators = load("speed.json"), load("accelerators.json")
    more, ppo = load("learning_more_seeds.json"), load("recipes/ppo.json")
    tables = {
        "speed": speed_page.table_of(speed),
        "trainings": speed_page.columns_of(speed, "trainings", speed_page.TRAININGS),
        "overhead": speed_page.columns_of(speed, "overhead", speed_page.OVERHEAD),
        "accelerators": accelerators_page.table_of(accelerators),
        "learning": learning_compared.table(load("learning.json")["results"]),
        "endings": learning_compared.table_of_endings(more["results"]),
        "ppo": ppo_results.table(ppo),
        "details": ppo_results.table_of_details(ppo),
        "teams": teams.table(load("teams.json")),
    }
    files = {
        DOCS / "speed_tables.txt": speed_page.text_of(
            speed, speed_page.NOTES, "docs/speed.md"
        ),
        DOCS / "accelerators_tables.txt": speed_page.text_of(
            accelerators, accelerators_page.NOTES, "docs/accelerators.md"
        ),
    }
    missing = set(tables)
    # A table ends at a blank line: a line of text right below it would be a row.
    mark = re.compile(r"(<!-- table: (\w+) -->\n\n)(?:\|.*\n)*\n*")
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if names := {match[2] for match in mark.finditer(page)}:
            files[path] = mark.sub(lambda x: f"{x[1]}{tables[x[2]]}\n\n", page)
            missing -= names
    if missing:
        raise ValueError(f"no page shows {sorted(missing)}")
    return files


def main() -> None:
    """Writes all files that contain tables."""
    for path, text in written().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
