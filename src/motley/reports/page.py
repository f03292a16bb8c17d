"""A report as one HTML file: no script, nothing from elsewhere, light and dark, fit to print.

Knows nothing of what is reported.
"""

from __future__ import annotations

import html
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import motley
from motley.reports.drawing import style

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --faint: #d0d0d0; --paper: #fff;
  --soft: #f4f4f2; --warn: #fff2d0 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --faint: #444; --paper: #14171a;
  --soft: #1f2326; --warn: #4a3a10 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 14px }
td, th { padding: .25em .8em; text-align: left; border-bottom: 1px solid var(--faint) }
svg { max-width: 100%; height: auto }
.wide { overflow-x: auto }
.charts { display: flex; flex-wrap: wrap; gap: 1em }
.box, .warning { background: var(--soft); padding: .6em 1.2em; border-radius: 6px }
.warning { background: var(--warn); font-weight: 600 }
pre { background: var(--soft); padding: .8em; overflow-x: auto; font-size: 13px }
@media print { body { margin: 0; max-width: none } svg, tr { break-inside: avoid } }
"""

PACKAGES = ("torch", "transformers", "peft", "numpy", "scipy")


def page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}{style()}</style></head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def warning(text: str) -> str:
    return f'<p class="warning">Warning: {html.escape(text)}.</p>'


def box(sentences: Sequence[str]) -> str:
    return f'<div class="box">{bullets(sentences)}</div>'


def bullets(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(one)}</li>" for one in sentences) + "</ul>"


def charts(svgs: Sequence[str]) -> str:
    return '<div class="charts">' + "\n".join(svgs) + "</div>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = lambda tag, row: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", head)}</tr>\n{body}</table></div>'


def folded(summary: str, text: str) -> str:
    """Text as it is, shown on a click."""
    return (
        f"<details><summary>{html.escape(summary)}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
    )


def code(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def versions() -> str:
    """What the report was written with."""
    known = [f"Motley {motley.__version__}", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            known.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue  # torch can come under another name
    return ", ".join([*known, f"{platform.system()} {platform.machine()}"])
