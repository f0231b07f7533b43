"""The built site: every link and picture leads somewhere, and no page loads from a third party.

zensical checks the links in Markdown; this also sees raw HTML, what the theme adds, and anchors in
what was made from docstrings. Usage: `python .ci/check_site.py site`.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ELSEWHERE = r"""['"]?((?:https?:)?//[^)'"]+)"""
_IN_CSS = re.compile(rf"(?:url\(\s*|@import\s+){_ELSEWHERE}")


class Page(HTMLParser):
    """What one page names: its own anchors, where it links to, what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name == "href":
                (self.links if tag == "a" else self.loads).append(value)
            elif name == "src":
                self.loads.append(value)
            elif name == "class" and "mermaid" in value.split():
                self.loads.append("//a script that draws mermaid")


def target(page: Path, link: str, site: Path) -> Path:
    """The file that *link* on *page* means."""
    path = unquote(urlsplit(link).path)
    found = page if not path else site / path[1:] if path[0] == "/" else page.parent / path
    return (found / "index.html" if found.is_dir() else found).resolve()


def problems(site: Path) -> list[str]:
    """One line for each thing that is wrong."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for link in page.links + page.loads:
            url = urlsplit(link)
            if url.scheme in ("data", "mailto"):
                continue
            if url.scheme or url.netloc:
                if link in page.loads:
                    found.append(f"{where}: loads {link}")
            elif not (file := target(path, link, site)).exists():
                found.append(f"{where}: {link} leads nowhere")
            elif file in pages and unquote(url.fragment) not in pages[file].anchors:
                found.append(f"{where}: {link} has no such anchor")
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        found += [f"{path.name}: loads {url}" for url in _IN_CSS.findall(path.read_text())]
    if not pages:
        found.append(f"no page in {site}")
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1])
    if wrong := problems(site):
        sys.exit("\n".join(wrong))
    sys.stdout.write(f"{len(list(site.rglob('*.html')))} pages, no broken link, no third party\n")
