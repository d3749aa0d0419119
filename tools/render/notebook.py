"""把执行过的笔记本变成 Quarto 式的 markdown（Quarto 自己也是这样做的）。

Turn executed notebooks into Quarto-flavoured markdown, as Quarto itself does.
"""
from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import yaml

OPTIONS = {"label", "fig-cap", "fig-alt", "tbl-cap", "code-fold", "code-summary", "echo", "output", "include", "eval", "warning"}
WORDS = {"crossref-eq-prefix": "式", "crossref-fig-prefix": "图", "crossref-tbl-prefix": "表", "crossref-apx-prefix": "附录",
         "callout-note-title": "注", "callout-tip-title": "提示", "callout-warning-title": "警告",
         "callout-important-title": "重要", "callout-caution-title": "当心", "code-summary": "代码"}


class RenderError(Exception):
    """渲染器拒绝的构件，一行一个。 The constructs refused, one a line."""


def cell_options(source: str) -> tuple[dict, str]:
    """拆开 `#| 选项: 值` 与代码。 Split a code cell into its `#|` options and its body."""
    lines = source.splitlines()
    n = next((i for i, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    options = yaml.safe_load("\n".join(line[2:].removeprefix(" ") for line in lines[:n])) or {}
    if not isinstance(options, dict):
        raise ValueError(f"不是“选项: 值”的写法：{options}")
    if unknown := options.keys() - OPTIONS:
        raise ValueError(f"未知的代码格选项 {'、'.join(map(str, sorted(unknown)))}")
    return options, "\n".join(lines[n:]).strip("\n")


def fence(text: str, classes: str) -> str:
    ticks = "`" * max(3, *(len(t) + 1 for t in re.findall(r"`+", text)), 3)
    return f"{ticks} {{{classes}}}\n{text}\n{ticks}\n"


def output_markdown(output: dict, options: dict, stem: str, media: dict | None) -> str:
    """一个输出 → markdown；图片存进 media。 One output as markdown; pictures go to `media`."""
    if output["output_type"] == "stream":
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output["text"]).rstrip("\n")
        hidden = output["name"] == "stderr" and options.get("warning") is False
        return "" if hidden else fence(text, ".cell-stream" if output["name"] == "stdout" else ".cell-stream .cell-stderr")
    if output["output_type"] == "error":
        raise ValueError(f"输出是一个错误：{output['ename']}: {output['evalue']}")
    data = output["data"]
    for mime, ext in (("image/svg+xml", "svg"), ("image/png", "png")):
        if mime in data and not (ext == "png" and "text/latex" in data):
            alt = options.get("fig-alt") or options.get("fig-cap")
            if not alt:
                raise ValueError("代码格输出了图，却没有 fig-cap 或 fig-alt")
            name = f"{stem}_files/{options.get('label', 'out')}-{len(media or {})}.{ext}"
            if media is not None:
                media[name] = data[mime].encode() if ext == "svg" else base64.b64decode(data[mime])
            return f"![{alt}]({name})" + ("\\\n" if "label" in options or "fig-cap" not in options else "\n")
    if "text/markdown" in data:
        return data["text/markdown"] + "\n"
    if "text/html" in data:
        return "::: {.cell-output-html}\n" + fence(data["text/html"], "=html") + ":::\n"
    if "text/latex" in data:
        return re.sub(r"^\$\s*(?:\\displaystyle)?(.*?)\$$", r"$$\1$$", data["text/latex"].strip(), flags=re.S) + "\n"
    return fence(data["text/plain"], ".cell-stream")


def code_markdown(cell: dict, stem: str, media: dict | None) -> str:
    """代码格 → markdown：代码、折叠、输出、浮动体。 A code cell as markdown: code, fold, outputs, float."""
    options, body = cell_options(cell["source"])
    if options.get("include") is False:
        return ""
    code = fence(body, ".python .cell-code") if body and options.get("echo") is not False else ""
    if code and options.get("code-fold"):
        code = f"::::: {{.code-fold summary=\"{options.get('code-summary', WORDS['code-summary'])}\"}}\n{code}:::::\n"
    outputs = [] if options.get("output") is False else cell.get("outputs", [])
    texts = [(o["output_type"] == "stream", output_markdown(o, options, stem, media)) for o in outputs]
    label, caption = options.get("label"), options.get("fig-cap") or options.get("tbl-cap")
    if not label:
        return code + "\n" + "\n".join(t for _, t in texts)
    results = [t for is_stream, t in texts if not is_stream]
    if not caption or len(results) != 1:
        raise ValueError(f"{label} 要有标题和恰好一个图或表的输出，现在标题是 {caption!r}，输出 {len(results)} 个")
    return code + "\n".join(t for is_stream, t in texts if is_stream) + f"\n:::::: {{#{label}}}\n{results[0]}\n{caption}\n::::::\n"


def page_markdown(path: Path, media: dict | None, errors: list | None = None) -> str:
    """一页的 markdown，每格前有 `<!-- cell … -->`。 A page as markdown with a marker before each cell."""
    if path.suffix != ".ipynb":
        return f"<!-- cell 全文 -->\n\n{path.read_text(encoding='utf-8')}\n\n<!-- cell 结尾 -->"
    parts = []
    for i, cell in enumerate(nbformat.read(path, 4).cells, 1):
        where = f"第 {cell.metadata.get('cell', i)} 格（{cell.get('id', '')}）"
        try:
            text = code_markdown(cell, path.stem, media) if cell.cell_type == "code" else cell.source
        except (ValueError, yaml.YAMLError) as e:
            text = ""
            if errors is not None:
                errors.append(f"{where}：{e}")
        parts.append(f"<!-- cell {where} -->\n\n{text}")
    return "\n\n".join([*parts, "<!-- cell 结尾 -->"])
