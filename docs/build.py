"""Build the site from the repository's own pages: python docs/build.py [OUT]

README.md, CHANGELOG.md, docs/*.md and docs/results/*.md become HTML in OUT (`site/`), in the same
folders. The site needs no server and no script. Formulas between $ and $$ become MathML. Links to
other files of the repository are kept, and those files are copied. A link or an anchor that leads
nowhere, and a formula that cannot be set, end the build.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]

# Pages by part. Who is not here comes under "More".
MENU = {
    "Start": ("README.md", "docs/quickstart.md", "docs/words.md", "docs/troubleshooting.md"),
    "Use": (
        "docs/python.md",
        "docs/command_line.md",
        "docs/watch.md",
        "docs/crew_file.md",
        "docs/tasks.md",
        "docs/models.md",
        "docs/engines.md",
        "docs/distributed.md",
        "docs/studies.md",
        "docs/threats.md",
    ),
    "Look up": ("docs/methods.md", "docs/metrics.md", "docs/protocol.md"),
    "Results": (
        "docs/results/joining.md",
        "docs/results/specialists.md",
        "docs/results/drawn.md",
        "docs/results/crowd.md",
        "docs/results/hub.md",
        "docs/results/delay.md",
        "docs/results/smollm2.md",
        "docs/results/adapters.md",
        "docs/results/expertise.md",
        "docs/results/tiny.md",
        "docs/results/vocabularies.md",
        "docs/results/threats.md",
        "docs/results/wire.md",
        "docs/performance.md",
    ),
    "Inside": ("docs/architecture.md", "CHANGELOG.md"),
}
MORE = "More"
NAMES = {"README.md": "Motley", "CHANGELOG.md": "Changelog"}
LINK = re.compile(r'\b(href|src|srcset)="([^"]*)"')
ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


class BuildError(Exception):
    """What is wrong with the pages, one line each."""


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    text: str
    anchor: str


@dataclass(slots=True)
class Page:
    """A page of the site. `source` is relative to the repository, such as docs/models.md."""

    source: Path
    body: str
    headings: list[Heading]
    wrong: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        name = "index.html" if self.source == Path("README.md") else f"{self.source.stem}.html"
        return self.source.with_name(name)

    @property
    def title(self) -> str:
        return next((h.text for h in self.headings if h.level == 1), self.source.stem)

    @property
    def name(self) -> str:
        """In the menu."""
        return NAMES.get(str(self.source), self.title)


# Markdown


def markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark").enable("table")
    parser.inline.ruler.before("escape", "math", _inline_math)
    stops = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    parser.block.ruler.before("fence", "math_block", _math_block, stops)
    parser.add_render_rule("math", _rendered_math)
    parser.add_render_rule("math_block", _rendered_math)
    return parser


def _inline_math(state: StateInline, silent: bool) -> bool:
    """$x$, as GitHub reads it: no space inside the marks, no letter or digit outside."""
    text, start = state.src, state.pos + 1
    if text[state.pos] != "$" or text[start : start + 1] in ("", "$") or text[start].isspace():
        return False
    if state.pos and text[state.pos - 1].isalnum():
        return False
    end = text.find("$", start)
    if end < 0 or text[end - 1].isspace() or text[end + 1 : end + 2].isalnum():
        return False
    if not silent:
        state.push("math", "", 0).content = text[start:end]
    state.pos = end + 1
    return True


def _math_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """$$ to $$, on one line or several."""
    text = lambda line: state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]
    if not text(first).startswith("$$"):
        return False
    if silent:
        return True
    end = first
    while not (text(end).rstrip().endswith("$$") and (end > first or len(text(end).strip()) > 4)):
        end += 1
        if end >= last:
            return False
    content = "\n".join(map(text, range(first, end + 1))).strip().strip("$").strip()
    token = state.push("math_block", "", 0)
    token.content, token.block, token.map = content, True, [first, end + 1]
    state.line = end + 1
    return True


def _rendered_math(renderer: RendererHTML, tokens: list[Token], place: int, *_: object) -> str:
    token = tokens[place]
    return formula(token.content, block=token.type == "math_block")


def formula(tex: str, block: bool) -> str:
    """MathML; what cannot be set is an error."""
    try:
        made = convert(tex, display="block" if block else "inline")
    except Exception as error:  # whatever the converter finds wrong
        raise BuildError(f"the formula {tex!r} cannot be set: {error!r}") from error
    if "\\" in made:
        raise BuildError(f"the formula {tex!r} has a command that is not known; use another")
    return f'<div class="formula">{made}</div>' if block else made


def slug(text: str, seen: Counter[str]) -> str:
    """A heading's anchor, as GitHub makes it.

    >>> slug("`senders`: what came from whom", Counter())
    'senders-what-came-from-whom'
    """
    plain = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
    seen[plain] += 1
    return plain if seen[plain] == 1 else f"{plain}-{seen[plain] - 1}"


def read_page(source: Path, root: Path) -> Page:
    parser, text = markdown(), (root / source).read_text(encoding="utf-8")
    tokens = parser.parse(text)
    headings, seen = [], Counter[str]()
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            inline = tokens[place + 1]
            words = "".join(child.content for child in inline.children or [])
            headings.append(Heading(int(token.tag[1:]), words, slug(words, seen)))
            token.attrSet("id", headings[-1].anchor)
    try:
        body = parser.renderer.render(tokens, parser.options, {})
    except BuildError as error:
        raise BuildError(f"{source}: {error}") from error
    return Page(source, _scrolling(_with_anchors(body)), headings)


def _with_anchors(body: str) -> str:
    mark = r'<h\1 id="\2">\3 <a class="anchor" href="#\2" aria-label="link to this">#</a></h\1>'
    return re.sub(r'<h([2-6]) id="([^"]*)">(.*?)</h\1>', mark, body)


def _scrolling(body: str) -> str:
    """Wide tables scroll by themselves."""
    return body.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )


# Links


class Site:
    """Pages that know each other, and files that they link to."""

    def __init__(self, root: Path, pages: list[Page]) -> None:
        self.root = root
        self.pages = pages
        self.by_source = {page.source: page for page in pages}
        self.files: set[Path] = set()
        self.folders: set[Path] = set()

    def link(self, page: Page) -> None:
        """Have every link of a page lead to where it leads on the site."""
        page.body = LINK.sub(lambda found: self._linked(page, *found.groups()), page.body)

    def _linked(self, page: Page, kind: str, given: str) -> str:
        url = html.unescape(given)
        if ELSEWHERE.match(url):
            return f'{kind}="{given}"'
        path, _, anchor = url.partition("#")
        place = self._place(page, unquote(path), unquote(anchor))
        if place is None:
            page.wrong.append(f"{page.source}: {url} leads nowhere")
            return f'{kind}="{given}"'
        away = relative(place, page.place) if path else ""
        return f'{kind}="{html.escape(away + (f"#{anchor}" if anchor else ""))}"'

    def _place(self, page: Page, path: str, anchor: str) -> Path | None:
        """Where on the site a link leads; None: nowhere."""
        target = page.source
        if path:
            whole = (self.root / page.source.parent / path).resolve()
            if not whole.is_relative_to(self.root.resolve()) or not whole.exists():
                return None
            target = whole.relative_to(self.root.resolve())
        if target in self.by_source:
            other = self.by_source[target]
            known = {"", *(heading.anchor for heading in other.headings)}
            return other.place if anchor in known else None
        if (self.root / target).is_dir():
            self.folders.add(target)
            return target / "index.html"
        self.files.add(target)
        return target


def relative(place: Path, page: Path) -> str:
    """The way from a page to a place, both on the site."""
    up = "../" * len(page.parent.parts)
    return up + quote(place.as_posix())


# The frame around a page


def ordered(pages: list[Page]) -> dict[str, list[Page]]:
    """The menu: parts and their pages, in the order to read them in."""
    by_source = {str(page.source): page for page in pages}
    menu = {
        part: [by_source.pop(name) for name in names if name in by_source]
        for part, names in MENU.items()
    }
    return {part: some for part, some in (menu | {MORE: list(by_source.values())}).items() if some}


def framed(page: Page, menu: dict[str, list[Page]]) -> str:
    order = [one for part in menu.values() for one in part]
    place = order.index(page)
    before = order[place - 1] if place else None
    after = order[place + 1] if place + 1 < len(order) else None
    return frame(page.name, page.place, menu, page.body + _neighbours(page, before, after), page)


def frame(
    title: str, place: Path, menu: dict[str, list[Page]], body: str, page: Page | None = None
) -> str:
    name = title if title == NAMES["README.md"] else f"{title} - Motley"
    style = relative(Path("style.css"), place)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<title>{html.escape(name)}</title>\n<link rel="stylesheet" href="{style}">\n</head>\n'
        f'<body>\n<nav class="menu">\n{"".join(_menu(place, menu, page))}</nav>\n'
        f"<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _menu(place: Path, menu: dict[str, list[Page]], page: Page | None) -> Iterator[str]:
    for part, pages in menu.items():
        yield f"<h2>{part}</h2>\n<ul>\n"
        for one in pages:
            here = ' aria-current="page"' if one is page else ""
            link = f'<a href="{relative(one.place, place)}"{here}>{html.escape(one.name)}</a>'
            yield f"<li>{link}{_contents(one) if one is page else ''}</li>\n"
        yield "</ul>\n"
    yield f'<p><a href="{relative(CONTENTS, place)}">Every heading</a></p>\n'


def _contents(page: Page) -> str:
    """The headings of a page, below it in the menu."""
    items = [
        f'<li><a href="#{h.anchor}">{html.escape(h.text)}</a></li>'
        for h in page.headings
        if h.level == 2
    ]
    return f"\n<ul>{''.join(items)}</ul>\n" if len(items) > 1 else ""


def _neighbours(page: Page, before: Page | None, after: Page | None) -> str:
    link = lambda other, rel, words: (
        f'<a rel="{rel}" href="{relative(other.place, page.place)}">{words}</a>' if other else ""
    )
    back = link(before, "prev", f"← {html.escape(before.name)}" if before else "")
    on = link(after, "next", f"{html.escape(after.name)} →" if after else "")
    return f'<p class="neighbours"><span>{back}</span><span>{on}</span></p>\n'


CONTENTS = Path("contents.html")


def contents(menu: dict[str, list[Page]]) -> str:
    """Every heading of every page, to be searched by the browser."""
    parts = ["<h1>Every heading</h1>\n"]
    for page in (one for some in menu.values() for one in some):
        items = "".join(
            f'<li><a href="{relative(page.place, CONTENTS)}#{h.anchor}">'
            f"{html.escape(h.text)}</a></li>\n"
            for h in page.headings[1:]
        )
        link = f'<a href="{relative(page.place, CONTENTS)}">{html.escape(page.name)}</a>'
        parts.append(f"<h2>{link}</h2>\n<ul>\n{items}</ul>\n")
    return frame("Every heading", CONTENTS, menu, "".join(parts))


# Building


def sources(root: Path) -> list[Path]:
    found = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    return [path.relative_to(root) for path in found if path.exists()]


def build(root: Path, out: Path) -> list[Page]:
    """Write the site, anew; nothing is written if a page is wrong."""
    pages = [read_page(source, root) for source in sources(root)]
    site = Site(root, pages)
    for page in pages:
        site.link(page)
    if wrong := [line for page in pages for line in page.wrong]:
        raise BuildError("\n".join(wrong))
    menu = ordered(pages)
    if out.exists():
        if not (out / "style.css").exists() and any(out.iterdir()):
            raise BuildError(f"{out} is not a site; choose another folder, or delete it")
        shutil.rmtree(out)
    _write(out / "style.css", (Path(__file__).parent / "site.css").read_text(encoding="utf-8"))
    for page in pages:
        _write(out / page.place, framed(page, menu))
    _write(out / CONTENTS, contents(menu))
    for folder in sorted(site.folders):
        _write(out / folder / "index.html", _listing(site, folder, menu))
    for path in sorted(site.files):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, out / path)
    return pages


def _listing(site: Site, folder: Path, menu: dict[str, list[Page]]) -> str:
    """A folder of the repository; its files come along."""
    names = sorted(p.name for p in (site.root / folder).iterdir() if p.is_file())
    site.files |= {folder / name for name in names}
    items = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>\n' for name in names)
    body = f"<h1>{html.escape(folder.as_posix())}/</h1>\n<ul>\n{items}</ul>\n"
    return frame(folder.name, folder / "index.html", menu, body)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    try:
        pages = build(ROOT, out)
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{len(pages)} pages; open {out / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
