"""Draws the chart on top of `docs/speed.md` from the tables of that page.

Nothing is measured or typed here: `PEERS` names, for each line of the chart, the tables
and the columns that it shows, one dot per cell. After a table has changed, run

    python tests/benchmarks/speed_chart.py
"""

import math
import pathlib
from typing import NamedTuple

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGE, CHART = DOCS / "speed.md", DOCS / "speed.svg"

Row = dict[str, str]
GYMNAX, BARE = "`rollout` / `gymnax loop`", "`rollout` / `bare loop`"
RANDOM = ("Random policy", "jax 0.11", "One flag of XLA")
HOSTS = "Environments that are not JAX"
LIBRARY = ("`HostCollector`, same environments / library",)
LIBRARY += ("`HostCollector`, one array / library",)
HAND_MADE = "`rollout` / `shard_map` by hand"


class Peer(NamedTuple):
    """A line of the chart: which cells of the page it shows."""

    name: str
    headings: tuple[str, ...]
    columns: tuple[str, ...]
    # Only rows in which some cell begins with this.
    only: str = ""
    # The cells are our time over the peer's, so their inverses are speeds.
    is_time: bool = False


PEERS = {
    "Collecting steps": (
        Peer("gymnax loop, random policy", RANDOM, (GYMNAX,)),
        Peer("gymnax loop, small network", ("A network",), (GYMNAX,)),
        Peer(
            "the suites' own loops", ("Suites",), ("`rollout` / the suite's own loop",)
        ),
        Peer("JaxMARL's loop", ("Several agents",), ("`rollout` / JaxMARL's loop",)),
        Peer("bare loop, without resets", (*RANDOM, "A network"), (BARE,)),
        Peer(
            "bare loop, for a Stream",
            ("Streams",),
            ("time, first / second",),
            only="stream",
            is_time=True,
        ),
    ),
    "Whole episodes": (
        Peer(
            "gymnax's RolloutWrapper",
            ("Whole episodes",),
            ("speed, `rollout` / that", "speed, `rollout` / this"),
        ),
    ),
    "A whole PPO, on a CPU": (
        Peer(
            "PureJaxRL's update",
            ("A whole PPO",),
            ("time on a CPU, ours / PureJaxRL's",),
            is_time=True,
        ),
    ),
    "Gymnasium and EnvPool": (
        Peer(
            "plain loop that stores nothing",
            (HOSTS,),
            ("speed / plain loop, run 1", "speed / plain loop, run 2"),
            only="`HostCollector`",
        ),
        Peer("plain processes, for actors of Ray", (HOSTS,), ("actors / processes",)),
    ),
    "Gymnasium, other libraries": (
        Peer("Stable-Baselines3", (HOSTS,), LIBRARY, only="Stable-Baselines3"),
        Peer("TorchRL", (HOSTS,), LIBRARY, only="TorchRL"),
        Peer("Tianshou", (HOSTS,), LIBRARY, only="Tianshou"),
        Peer("RLlib", (HOSTS,), LIBRARY, only="RLlib"),
    ),
    "Recommendation": (
        Peer("plain loop in NumPy", ("Recommendation",), ("`rollout` / `plain loop`",)),
        Peer("EasyRL4Rec", ("Recommendation",), ("`rollout` / EasyRL4Rec",)),
    ),
    "Replay buffers": (
        Peer("flashbax, flat", ("Buffers",), ("flashbax `flat` / ours",)),
        Peer("flashbax, prioritised", ("Buffers",), ("flashbax / ours",)),
    ),
    "Two devices": (Peer("shard_map by hand", ("Several devices",), (HAND_MADE,)),),
}


def tables(page: str) -> list[tuple[str, list[Row]]]:
    """The tables of a page, each with the heading it stands under."""
    heading, found, header = "", [], []
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
            found.append((heading, []))
        elif set(line) != {"|", "-"}:
            found[-1][1].append(dict(zip(header, cells, strict=True)))
    return found


def settings(page: str, peer: Peer) -> list[str]:
    """The cells that a line of the chart shows, as the page has them."""
    return [
        row[column]
        for heading, rows in tables(page)
        if heading in peer.headings
        for row in rows
        if any(cell.startswith(peer.only) for cell in row.values())
        for column in peer.columns
        if row.get(column)
    ]


WIDTH, LEFT, RIGHT, TOP, LINE = 700, 250, 605, 62, 21
LOW, HIGH = 0.5, 700.0
SLOWER, FASTER, DARK, GREY = "#c2410c", "#0b63b5", "#1f2933", "#5f6c7b"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def position(speed: float) -> float:
    """Where a ratio of speeds lies on the logarithmic axis."""
    share = math.log(speed / LOW) / math.log(HIGH / LOW)
    return round(LEFT + share * (RIGHT - LEFT), 1)


def text(x: float, y: float, words: str, fill: str = DARK, more: str = "") -> str:
    """A line of text."""
    return f'  <text x="{x}" y="{y}" fill="{fill}"{more}>{words}</text>'


def draw_axis(bottom: float) -> list[str]:
    """The title, both halves and the lines of the axis."""
    one, middle = position(1.0), ' text-anchor="middle" font-size="12"'
    lines = [
        text(20, 30, "Speed of rollout / speed of the peer", more=' font-weight="600"'),
        text(20, 48, "one dot per setting", GREY, ' font-size="12"'),
        f'  <rect x="{LEFT}" y="{TOP}" width="{one - LEFT:.1f}" '
        f'height="{bottom - TOP}" fill="#fdf0e7"/>',
        text(one - 6, 48, "slower", SLOWER, ' text-anchor="end" font-size="12"'),
        text(one + 6, 48, "faster", FASTER, ' font-size="12"'),
        text(686, 48, "from – to", GREY, ' text-anchor="end" font-size="12"'),
    ]
    for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500):
        x, stroke = position(tick), DARK if tick == 1 else "#dde3e9"
        lines += [
            f'  <path d="M{x} {TOP}V{bottom}" stroke="{stroke}"/>',
            text(x, bottom + 18, f"{tick}", GREY, middle),
        ]
    return lines


def draw_peer(y: float, name: str, is_time: bool, cells: list[str]) -> list[str]:
    """The name of a peer, its dots and its range."""
    if is_time:
        cells = [f"{1 / float(x):.2f}" for x in cells]
    ends = [min(cells, key=float), max(cells, key=float)]
    lines = [text(32, y + 4.5, name)]
    for speed in map(float, cells):
        fill = SLOWER if speed < 1 else FASTER
        lines.append(
            f'  <circle cx="{position(speed)}" cy="{y}" r="4.5" fill="{fill}" '
            'fill-opacity="0.55"/>'
        )
    words = " – ".join(dict.fromkeys(ends))
    return [*lines, text(686, y + 4.5, words, GREY, ' text-anchor="end"')]


def draw(page: str) -> str:
    """The chart of a page, as SVG on a white card."""
    body, y = [], TOP + 16.0
    for group, peers in PEERS.items():
        body.append(text(20, y + 4.5, group, more=' font-weight="600"'))
        y += LINE
        for peer in peers:
            cells = [x.split()[0] for x in settings(page, peer)]
            body += draw_peer(y, peer.name, peer.is_time, cells)
            y += LINE
        y += 5
    bottom = y - 10
    height = bottom + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="{FONT}" font-size="13">',
            "  <title>Speed of rollout over that of each peer</title>",
            f'  <rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
            'fill="#ffffff" stroke="#d0d7de"/>',
            *draw_axis(bottom),
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    CHART.write_text(draw(PAGE.read_text()))
