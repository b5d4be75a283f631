# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A hook of mkdocs: Chinese pages have the anchors of their originals, and say if these have
changed; the language selector leads to a page's counterpart.

The front matter of a page in docs/zh has the Git object id of its original in docs as `original`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify, unique

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#{2,} )(.+)$", re.MULTILINE)
ALTERNATE = re.compile(r' *<link rel="alternate" [^>]*>\n?')
BEHIND = '!!! warning "本页落后于英文版"\n    请以[英文版](../{name})为准。\n\n'


def object_id(path: Path) -> str:
    """Object id of a file, as `git hash-object` prints it."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def anchors(text: str) -> list[str]:
    """Ids of a page's headings below its title, in order."""
    used: set[str] = set()
    headings = [title for _, title in HEADING.findall(FENCE.sub("", text))]
    names = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title) for title in headings]
    return [unique(slugify(name, "-"), used) for name in names]


def on_page_markdown(markdown: str, page: Any, **arguments: object) -> str:
    """Called by mkdocs for each page."""
    if not page.file.src_uri.startswith("zh/"):
        return markdown
    original = DOCS / Path(page.file.src_uri).name
    ids = iter(anchors(original.read_text()))
    parts = FENCE.split(markdown)
    for index in range(0, len(parts), 2):
        parts[index] = HEADING.sub(
            lambda match: f'{match[1]}<a id="{next(ids, "")}"></a>{match[2]}', parts[index]
        )
    title, _, text = "".join(parts).partition("\n\n")
    behind = page.meta["original"] != object_id(original)
    note = BEHIND.format(name=original.name) if behind else ""
    return f"{title}\n\n{note}{text}"


def on_page_context(context: Any, page: Any, config: Any, **arguments: object) -> Any:
    """Called by mkdocs before a page is rendered: the language selector leads to its counterpart."""
    url = page.file.url.removeprefix("zh/")
    is_translated = (DOCS / "zh" / Path(page.file.src_uri).name).exists()
    english, chinese = config.extra["alternate"]
    english["link"] = url if is_translated and url else "./"
    chinese["link"] = f"zh/{url if is_translated else ''}"
    return context


def on_post_page(output: str, page: Any, **arguments: object) -> str:
    """Called by mkdocs with the HTML of a page: state the language of a Chinese page, which screen
    readers and the choice of a font follow."""
    if page.file.src_uri.startswith("zh/"):
        output = output.replace('<html lang="en"', '<html lang="zh"', 1)
    return on_post_template(output)


def on_post_template(output: str, **arguments: object) -> str:
    """Called by mkdocs with the HTML of another file: remove the links from which Material's script
    takes the addresses of other languages, at each of which it asks for a sitemap.xml."""
    return ALTERNATE.sub("", output)
