"""HTML elements of a report, and their style sheet for phones, paper, light and dark screens."""

from collections.abc import Iterable, Sequence
from html import escape

from dubito.models.report import clean

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #fff; --card: #f6f8fa; --line: #d1d9e0;
  --good: #1a7f37; --bad: #c4343f; --accent: #2f81c7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117; --card: #161b22;
  --line: #30363d; --good: #3fb950; --bad: #f2727c; --accent: #58a6e8 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; -webkit-text-size-adjust: 100% }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1rem 4rem }
h1 { font-size: clamp(1.5rem, 5vw, 2.2rem); line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .4rem; padding-top: 1.2rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem }
p { margin: 0 0 .8rem; max-width: 46rem }
.soft, figcaption, dd small { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem }
dt { font-size: .85rem; color: var(--soft) }
dd { margin: 0; font-size: 1.45rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.35 }
dd small { display: block; font-size: .78rem; font-weight: 400 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 1rem }
.plots figure { margin: 0 } .plots img { display: block; width: 100%; max-width: 30rem; height: auto }
.table { overflow-x: auto; margin: .8rem 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem .35rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft) }
.examples { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .75rem }
.examples figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  overflow: hidden }
.examples img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: #000;
  image-rendering: pixelated }
figcaption { font-size: .78rem; line-height: 1.4; padding: .5rem .6rem; overflow-wrap: anywhere }
figcaption b { color: var(--ink) } .good { color: var(--good) } .bad { color: var(--bad) }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem;
  font-size: .8rem }
footer { margin-top: 3rem; font-size: .85rem; color: var(--soft) }
@media print { body { font-size: 12px } h2 { break-after: avoid } figure { break-inside: avoid } }
"""


def text(raw: str) -> str:
    """Escaped text: names come from files and folders, and may hold markup."""
    return escape("\n".join(clean(line) for line in raw.split("\n")))


def section(title: str, explanation: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n<p>{text(explanation)}</p>\n{body}\n</section>"


def pictures(figures: Iterable[tuple[str, str]]) -> str:
    images = (f'<figure><img src="{source}" alt="{text(alt)}"></figure>' for source, alt in figures)
    return f'<div class="plots">\n{"".join(images)}\n</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{text(h)}</th>' for h in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{text(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="table"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
