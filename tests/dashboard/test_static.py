"""The page's own files: small, readable, and nothing in them lets a peer's text become markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import motley.dashboard

STATIC = Path(motley.dashboard.__file__).parent / "static"
MODULES = sorted(STATIC.glob("*.js"))
MOST_BYTES = 150_000  # of all files: the page must be there at once on a slow line
MOST_LINES = 300  # of a file
OWN_ADDRESSES = {"http://www.w3.org/2000/svg"}  # a name, which nobody asks


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < MOST_BYTES
    long = [path.name for path in STATIC.iterdir() if path.read_text().count("\n") > MOST_LINES]
    assert long == []


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_no_module_makes_markup_or_code_of_a_text(module: Path) -> None:
    dangers = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFrag"
    )
    dangers += r"|\beval\(|new Function|javascript:|srcdoc|setAttribute\(\"style\""
    assert re.findall(dangers, module.read_text()) == []


def test_nothing_comes_from_elsewhere() -> None:
    texts = [path.read_text() for path in STATIC.iterdir()]
    addresses = {found for text in texts for found in re.findall(r"https?://[^\s\"'`)]+", text)}
    assert addresses <= OWN_ADDRESSES
    assert not any(re.search(r"@import|url\(", text) for text in texts)


def test_the_first_page_has_no_script_or_style_of_its_own() -> None:
    # the server's policy would refuse them, and the page would be bare
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<style|style=|\son[a-z]+=", page) == []
    assert all('src="/static/' in tag for tag in re.findall(r"<script[^>]*>", page))
    asked = re.findall(r"(?:src|href)=\"/static/([^\"]+)\"", page)
    assert asked
    assert all((STATIC / name).is_file() for name in asked)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_names_that_there_are(module: Path) -> None:
    for names, source in re.findall(r"import \{([^}]*)\} from \"\./([^\"]+)\"", module.read_text()):
        exported = set(
            re.findall(
                r"export (?:async )?(?:const|function|class) (\w+)", (STATIC / source).read_text()
            )
        )
        wanted = {name.strip() for name in names.split(",") if name.strip()}
        assert wanted <= exported, f"{source} has no {wanted - exported}"
        body = module.read_text()
        unused = {name for name in wanted if len(re.findall(rf"\b{name}\b", body)) < 2}
        assert unused == set()


def test_javascript_can_read_every_module() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not here to read them; the browser's tests do")
    read = "new vm.SourceTextModule(fs.readFileSync(path, 'utf8'), {identifier: path})"
    script = f"for (const path of process.argv.slice(1)) {read}"
    command = [node, "--no-warnings", "--experimental-vm-modules", "-e", script, *map(str, MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
