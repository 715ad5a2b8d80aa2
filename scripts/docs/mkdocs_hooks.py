"""Hooks of MkDocs: README is the home page, and a file of the repository to which a page links becomes a page as well.

So the links of the Markdown files work in the repository and on the site, which names no host of the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_mtp_patches.catalog import CATALOG
from mkdocs.structure.files import File, Files

from scripts.common.markdown import fill
from scripts.docs import site
from scripts.docs.addresses import topic

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FORMER_PAGES = {"quickstart": "#quickstart", "other-frameworks": "frameworks/", "upstream-reports": "known-defects/"}
# {the file of the site: that of the repository}
_origins: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Add README, and each file outside of docs/ to which a page leads, directly or through such a file."""
    _origins.clear()
    _origins.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    todo = ["README.md", *_origins.values()]
    for path in todo:
        uri = place(path)
        if uri not in _origins:
            _origins[uri] = path
            files.append(make_page(config, uri, path))
        if path.endswith(".md"):
            todo += [target for target in targets(path) if (ROOT / target).is_file() and target not in todo]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What the site alone has, and the links as they lead from page to page.

    A folder has no page: what is said of it stays, without the link.
    """
    origin = _origins[page.file.src_uri]

    def link(match: re.Match[str]) -> str:
        target = resolve(origin, match["path"])
        if (ROOT / target).is_dir():
            return match["text"]
        path = posixpath.relpath(place(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match['image']}[{match['text']}]({path}{match['anchor'] or ''})"

    return LINK.sub(link, fill(markdown, site.blocks()))


def on_post_build(config: Any, **_: Any) -> None:
    """The address that a page had, as docs/ID.md of a patch, leads to where its text is."""
    sections = {patch.id: f"{topic(patch.id)}/#{patch.id}" for patch in CATALOG}
    for name, there in {**sections, **FORMER_PAGES}.items():
        page = Path(config.site_dir, name, "index.html")
        page.parent.mkdir(exist_ok=True)
        page.write_text(f'<meta http-equiv="refresh" content="0; url=../{there}">\n', encoding="utf-8")


def place(path: str) -> str:
    """The file of the site for a file of the repository: of docs/ at the top, all others below repository/."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def make_page(config: Any, uri: str, path: str) -> File:
    """A page that shows a file of the repository, Markdown as such and all else as code."""
    if path.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    language = {".py": "python"}.get(PurePosixPath(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    return File.generated(config, uri, content=f"# {path}\n\n````{language}\n{code}````\n")


def targets(path: str) -> Iterator[str]:
    """The files of the repository to which a Markdown file links, without those of docs/, which are there anyway."""
    for match in LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        target = resolve(path, match["path"])
        if not target.startswith("docs/"):
            yield target


def resolve(origin: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
