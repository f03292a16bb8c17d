"""`make docs` makes a site whose every link leads somewhere, and refuses one that would not."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_site"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    builder.build(ROOT, out)
    return out


class Reader(HTMLParser):
    """Links, what is loaded, anchors and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.text = ""
        self._code = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags[tag] += 1
        self._code += tag in ("code", "pre")
        if identity := known.get("id"):
            self.anchors[identity] += 1
        if tag == "a":
            self.links.append(known.get("href") or "")
        elif source := known.get("src") or (known.get("href") if tag == "link" else None):
            self.loads.append(source)

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else data


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    return {path: Reader(path) for path in sorted(site.rglob("*.html"))}


def test_every_link_and_anchor_of_the_site_leads_somewhere(pages: dict[Path, Reader]) -> None:
    wrong = []
    for path, page in pages.items():
        for link in (*page.links, *page.loads):
            place, _, anchor = unquote(link).partition("#")
            if "://" in place or place.startswith("mailto:"):
                continue
            target = (path.parent / place).resolve() if place else path
            if not target.is_file() or (
                anchor and target.suffix == ".html" and not pages[target].anchors[anchor]
            ):
                wrong.append(f"{path.name}: {link}")
    assert wrong == []


def test_a_page_needs_nothing_from_elsewhere_and_no_script(pages: dict[Path, Reader]) -> None:
    for path, page in pages.items():
        assert [load for load in page.loads if "://" in load] == [], path
        assert page.tags["script"] == 0


def test_anchors_are_unique(pages: dict[Path, Reader]) -> None:
    for path, page in pages.items():
        assert [name for name, count in page.anchors.items() if count > 1] == [], path


def test_every_page_of_the_repository_is_in_every_menu(
    builder: ModuleType, site: Path, pages: dict[Path, Reader]
) -> None:
    sources = builder.sources(ROOT)
    assert Path("docs/quickstart.md") in sources
    places = {
        site
        / (source.with_name("index.html") if source == Path("README.md") else source).with_suffix(
            ".html"
        )
        for source in sources
    }
    for path, page in pages.items():
        linked = {(path.parent / unquote(link).partition("#")[0]).resolve() for link in page.links}
        assert {place.resolve() for place in places} <= linked | {path.resolve()}


def test_every_page_of_the_menu_has_a_part_of_its_own(builder: ModuleType) -> None:
    """So that a new page is put where it belongs."""
    named = {name for names in builder.MENU.values() for name in names}
    assert [str(source) for source in builder.sources(ROOT) if str(source) not in named] == []


def test_formulas_are_set(pages: dict[Path, Reader], site: Path) -> None:
    methods = pages[site / "docs" / "methods.html"]
    assert methods.tags["math"] > 60
    for path, page in pages.items():
        assert "$" not in page.text, path


def test_a_site_can_be_printed_and_read_in_the_dark(site: Path) -> None:
    style = (site / "style.css").read_text()
    assert "@media print" in style
    assert "prefers-color-scheme: dark" in style


# Small repositories


def repository(folder: Path, **pages: str) -> Path:
    (folder / "docs").mkdir()
    (folder / "data.csv").write_text("a,b\n")
    (folder / "README.md").write_text("# Home\n\n[one](docs/one.md)\n")
    for name, text in pages.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "# One\n\n[x](none.md)\n",
        "# One\n\n[x](#none)\n",
        "# One\n\n[x](../README.md#none)\n",
        "# One\n\n[x](../../outside.md)\n",
        '# One\n\n<img src="none.svg">\n',
    ],
)
def test_a_link_that_leads_nowhere_ends_the_build(
    builder: ModuleType, tmp_path: Path, text: str
) -> None:
    (tmp_path / "outside.md").write_text("# Outside\n")
    (tmp_path / "inner").mkdir()
    root = repository(tmp_path / "inner", one=text)
    with pytest.raises(builder.BuildError, match=r"docs/one\.md: .* leads nowhere"):
        builder.build(root, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_files_that_are_linked_come_along(builder: ModuleType, tmp_path: Path) -> None:
    root = repository(tmp_path, one="# One\n\n[x](../data.csv) [y](https://example.org/a.md)\n")
    builder.build(root, tmp_path / "site")
    assert (tmp_path / "site" / "data.csv").read_text() == "a,b\n"
    page = (tmp_path / "site" / "docs" / "one.html").read_text()
    assert 'href="../data.csv"' in page
    assert 'href="https://example.org/a.md"' in page


@pytest.mark.parametrize(
    ("text", "has_math"),
    [
        ("$x_t$ and more", True),
        ("it costs 5$ and 6$ more", False),
        ("`$x$`", False),
        ("a$b$c", False),
        ("$ x $", False),
        ("$$\nx\n$$", True),
        ("- item\n\n  $$x$$\n", True),
        ("| a |\n|---|\n| $x$ |\n", True),
    ],
)
def test_formulas_stand_where_github_sees_them(
    builder: ModuleType, tmp_path: Path, text: str, has_math: bool
) -> None:
    root = repository(tmp_path, one=f"# One\n\n{text}\n")
    builder.build(root, tmp_path / "site")
    assert ("<math" in (tmp_path / "site" / "docs" / "one.html").read_text()) == has_math


def test_a_formula_that_cannot_be_set_ends_the_build(builder: ModuleType, tmp_path: Path) -> None:
    root = repository(tmp_path, one="# One\n\n$\\nosuchcommand{x}$\n")
    with pytest.raises(builder.BuildError, match=r"docs/one\.md: the formula .*nosuchcommand"):
        builder.build(root, tmp_path / "site")


def test_headings_have_the_anchors_of_github(builder: ModuleType) -> None:
    seen: Counter[str] = Counter()
    assert [
        builder.slug(text, seen)
        for text in ("`[task]`", "What's new: a & b?", "`dr_grpo`", "Twice", "Twice")
    ] == ["task", "whats-new-a--b", "dr_grpo", "twice", "twice-1"]


def test_a_folder_that_is_no_site_is_not_deleted(builder: ModuleType, tmp_path: Path) -> None:
    root = repository(tmp_path, one="# One\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(builder.BuildError, match="is not a site"):
        builder.build(root, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
