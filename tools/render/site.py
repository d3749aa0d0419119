"""嵌入式渲染器：用 pandoc 把布置好的书写成不需要网络的 HTML。

The embedded renderer: a staged book in, an offline HTML book out, by pandoc.
"""
from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import files
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

import pypandoc
import yaml

from .notebook import WORDS, RenderError, page_markdown

HERE = Path(__file__).parent
READER = "markdown+east_asian_line_breaks-yaml_metadata_block"


def structure(root: Path) -> tuple[dict, list[dict]]:
    """读 `_quarto.yml`：配置与各页（source、kind、number）。 Read the book's structure from `_quarto.yml`."""
    config = yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))
    book, pages, counts = config["book"], [], {"chapter": 0, "appendix": 0}
    for kind, key in (("chapter", "chapters"), ("appendix", "appendices")):
        for source in book.get(key, []):
            if not isinstance(source, str) or not (root / source).is_file():
                raise RenderError(f"_quarto.yml：{key} 里的 {source!r} 不是一个存在的文件")
            first = re.search(r"^# .*$", page_markdown(root / source, None), re.M)
            numbered = not (first and ".unnumbered" in first[0])
            counts[kind] += numbered
            number = "" if not numbered else str(counts[kind]) if kind == "chapter" else chr(64 + counts[kind])
            pages.append(dict(source=source, html=str(PurePosixPath(source).with_suffix(".html")), number=number, kind=kind if numbered else "front"))
    return config, pages


def pandoc(text: str, *args: str, **env: str) -> tuple[str, str]:
    """跑一次 pandoc，返回输出与警告。 Run pandoc once: its output and its warnings."""
    run = subprocess.run([pypandoc.get_pandoc_path(), *args], input=text, capture_output=True, encoding="utf-8", env={**os.environ, **env})
    if run.returncode:
        raise RenderError(run.stderr.strip())
    return run.stdout, run.stderr


def parse(root: Path, page: dict, config: dict) -> dict:
    """页 → {ast, book, media, errors}：pandoc 解析并编号。 Parse and number one page."""
    words = WORDS | config.get("language", {})
    settings = dict(
        number=page["number"], kind=page["kind"], depth=config.get("format", {}).get("html", {}).get("number-depth", 3),
        words=dict(eq=words["crossref-eq-prefix"] + " ({})", fig=words["crossref-fig-prefix"] + " {}", tbl=words["crossref-tbl-prefix"] + " {}",
                   chapter=dict(chapter="第 {} 章", appendix=words["crossref-apx-prefix"] + " {}", front=""), section="{} 节",
                   callout={k.split("-")[1]: v for k, v in words.items() if k.startswith("callout-")}))
    media, errors = {}, []
    text = page_markdown(root / page["source"], media, errors)
    out, warnings = pandoc(text, "-f", READER, "-t", "json", "--columns=9999", "-L", str(HERE / "filter.lua"), BOOK_SETTINGS=json.dumps(settings))
    ast = json.loads(out)
    book = json.loads(ast["meta"].pop("book")["c"])
    errors += [f"{e['cell']}：{e['message']}" for e in book["errors"]]
    marks = re.findall(r"^<!-- cell (.*?) -->$", text, re.M)
    lost = next((i for i, mark in enumerate(marks) if mark not in book["marks"]), None)
    if lost is not None:
        errors.append(f"{marks[lost - 1]}：有代码块或 div 没有结束")
    for warning, line in re.findall(r"(Div at .*?line (\d+).*? unclosed)", warnings):
        errors.append(f"{re.findall(r'<!-- cell (.*?) -->', chr(10).join(text.splitlines()[:int(line)]))[-1]}：div 没有结束（{warning}）")
    return page | dict(ast=ast, book=book, media=media, errors=[f"{page['source']} {e}" for e in errors])


def collect_labels(pages: list[dict]) -> tuple[dict, list[str]]:
    """全书的标签与错误：重复的标签、没有着落的引用。 The book's labels; duplicate labels and dangling references."""
    labels, errors = {}, [e for p in pages for e in p["errors"]]
    for p in pages:
        for entry in p["book"]["labels"]:
            key = entry["id"] if re.match(r"(eq|fig|tbl|sec)-", entry["id"]) else (p["html"], entry["id"])
            if key in labels:
                errors.append(f"{p['source']} {entry['cell']}：标签 {entry['id']} 重复，已在 {labels[key]['where']}")
            labels[key] = entry | dict(page=p["html"], where=f"{p['source']} {entry['cell']}")
    errors = errors or [f"{p['source']} {r['cell']}：引用 @{r['id']} 没有着落" for p in pages for r in p["book"]["refs"] if r["id"] not in labels]
    return labels, errors


def link(page: str, target: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/")


def resolve(node, page: dict, pages: list[dict], labels: dict):
    """AST 里的引用与书内链接换成地址。 Replace citations and links inside the book by addresses."""
    if isinstance(node, list):
        return [resolve(x, page, pages, labels) for x in node]
    if not isinstance(node, dict):
        return node
    if node.get("t") == "Cite":
        found = [labels[c["citationId"]] for c in node["c"][0]]
        links = [{"t": "Link", "c": [["", ["xref"], []], [{"t": "Str", "c": e["text"]}], [f"{link(page['html'], e['page'])}#{e['id']}", e["title"]]]} for e in found]
        return {"t": "Span", "c": [["", [], []], [x for i, l in enumerate(links) for x in ([{"t": "Str", "c": "、"}] if i else []) + [l]]]}
    if node.get("t") == "Link" and not re.match(r"[a-z]+:|#", node["c"][2][0]):
        path, _, anchor = unquote(node["c"][2][0]).partition("#")
        target = os.path.normpath(PurePosixPath(page["source"]).parent / path)
        html_page = next((p["html"] for p in pages if p["source"] == target), None)
        if not html_page:
            raise RenderError(f"{page['source']}：链接 {path} 不是书里的一章")
        node["c"][2][0] = link(page["html"], html_page) + (f"#{anchor}" if anchor else "")
    return {k: resolve(v, page, pages, labels) for k, v in node.items()}


def numbered_title(page: dict) -> str:
    number = f'<span class="chapter-number">{page["number"]}</span>' if page["number"] else ""
    return number + f'<span>{page["book"]["title_html"]}</span>'


def navigation(page: dict, pages: list[dict], words: dict) -> dict[str, str]:
    """侧栏与上一页、下一页。 The side navigation, previous and next."""
    items, i = [], pages.index(page)
    for p in pages:
        if p["kind"] == "appendix" and not any(q["kind"] == "appendix" for q in pages[:pages.index(p)]):
            items.append(f'<p class="nav-part">{words["crossref-apx-prefix"]}</p>')
        here = ' aria-current="page"' if p is page else ""
        items.append(f'<a href="{link(page["html"], p["html"])}"{here}>{numbered_title(p)}</a>')
    side = {"nav": "\n".join(items)}
    for name, j in (("prev", i - 1), ("next", i + 1)):
        if 0 <= j < len(pages):
            side[name] = f'<a class="{name}" rel="{name}" href="{link(page["html"], pages[j]["html"])}">{numbered_title(pages[j])}</a>'
    return side


def render_page(root: Path, out: Path, page: dict, pages: list[dict], labels: dict, config: dict) -> None:
    ast = page["ast"] | {"blocks": resolve(page["ast"]["blocks"], page, pages, labels)}
    head = {"chapter": "第 {} 章", "appendix": "附录 {}", "front": ""}[page["kind"]].format(page["number"])
    variables = navigation(page, pages, WORDS | config.get("language", {})) | dict(
        root=link(page["html"], ".") + "/", booktitle=html.escape(config["book"]["title"]), pagetitle=html.escape(page["book"]["title"]),
        title=page["book"]["title_html"], titleid=page["book"]["id"], head=head, lang=config.get("lang", "zh"))
    text, _ = pandoc(json.dumps(ast), "-f", "json", "-t", "html5", "-s", "--template", str(HERE / "template.html"), "--mathjax", "--toc", "--toc-depth=3",
                  "--wrap=none", "--syntax-highlighting=pygments", "-M", f"pagetitle={page['book']['title']}", *(a for k, v in variables.items() for a in ("-V", f"{k}={v}")))
    target = out / page["html"]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    for name, content in page["media"].items():
        (target.parent / name).parent.mkdir(exist_ok=True)
        (target.parent / name).write_bytes(content)
    for src in re.findall(r'<img[^>]* src="([^":]+)"', text.split("<main", 1)[1]):
        source, copy = (root / page["source"]).parent / unquote(src), target.parent / unquote(src)
        if not copy.exists():
            if not source.is_file():
                raise RenderError(f"{page['source']}：找不到图片 {src}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)


def search_index(pages: list[dict]) -> list[list[str]]:
    """[地址, 章, 节, 文本]。 One record a section."""
    tex = lambda m: re.sub(r"\\[a-zA-Z]+\*?|[{}$\\]", "", m[0].replace(r"\sqrt", "√"))
    tidy = lambda s: re.sub(r"\s+", " ", re.sub(r"\$[^$\n]+\$", tex, re.sub(r"[-=+|]{3,}|\\(?=\W)", " ", s))).strip()
    return [[f"{p['html']}#{quote(id)}", p["book"]["title"], title, tidy(text)] for p in pages for id, title, text in p["book"]["sections"]]


def render(root: Path, out: Path) -> int:
    """渲染全书到 out，返回页数；不认识的构件抛出 RenderError。 Render the book; unknown constructs raise RenderError."""
    config, pages = structure(root)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pages = list(pool.map(lambda p: parse(root, p, config), pages))
        labels, errors = collect_labels(pages)
        if errors:
            raise RenderError("\n".join(errors))
        shutil.rmtree(out, ignore_errors=True)
        list(pool.map(lambda p: render_page(root, out, p, pages, labels, config), pages))
    libs = out / "libs"
    libs.mkdir(parents=True)
    mathjax = next(f for f in files("django-static-mathjax") if str(f).endswith("es5/tex-svg-full.js"))
    for asset in (HERE / "book.css", HERE / "book.js", HERE / "favicon.svg", mathjax.locate()):
        shutil.copy(asset, libs)
    (libs / "search-index.js").write_text("window.BOOK_INDEX=" + json.dumps(search_index(pages), ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    return len(pages)
