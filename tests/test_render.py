"""嵌入式渲染器：每种构件一个小测试，不认识的构件必须拒绝。

The embedded renderer: one small test a construct; what it does not know it must refuse.
"""
import html as htmllib
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from render.notebook import RenderError, cell_options  # noqa: E402
from render.site import render, structure  # noqa: E402

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><rect width="9" height="9"/></svg>'


def md(text):
    return new_markdown_cell(text)


def code(source, *outputs):
    return new_code_cell(source, outputs=list(outputs))


def display(**data):
    return new_output("display_data", {k.replace("_", "/").replace("svg", "svg+xml"): v for k, v in data.items()})


def write_book(root, chapters, appendices=None, language=None):
    """写一本小书：{名: 格的列表}。 Write a tiny staged book."""
    (root / "nbs").mkdir(parents=True, exist_ok=True)
    (root / "index.qmd").write_text("# 前言 {.unnumbered}\n\n第一页。\n", encoding="utf-8")
    for name, cells in (chapters | (appendices or {})).items():
        nb = new_notebook(cells=cells)
        for i, cell in enumerate(nb.cells, 1):
            cell["id"] = f"c{i}"
        nbformat.write(nb, root / "nbs" / f"{name}.ipynb")
    config = {"project": {"type": "book", "output-dir": "_book"}, "lang": "zh",
              "book": {"title": "小书", "chapters": ["index.qmd"] + [f"nbs/{n}.ipynb" for n in chapters],
                       "appendices": [f"nbs/{n}.ipynb" for n in appendices or {}]}}
    if language:
        config["language"] = language
    (root / "_quarto.yml").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return root


@pytest.fixture
def page(tmp_path):
    """渲染一章，返回正文的 HTML。 Render one chapter, return the HTML of its main part."""
    def run(*cells, full=False):
        first = [] if cells and cells[0].source.startswith("# ") else [md("# 题 {#sec-one}")]
        render(write_book(tmp_path, {"01_one": [*first, *cells]}), tmp_path / "out")
        text = (tmp_path / "out/nbs/01_one.html").read_text(encoding="utf-8")
        return text if full else re.search(r"(?s)<main.*</main>", text)[0]
    return run


def refusal(page, *cells):
    with pytest.raises(RenderError) as e:
        page(*cells)
    return str(e.value)


def text_of(fragment):
    return re.sub(r"\s+", " ", htmllib.unescape(re.sub(r"<[^>]+>", "", fragment))).strip()


# ---------------------------------------------------------------- 构件 constructs

def test_chapter_and_section_numbers(page):
    out = page(md("# 注意力 {#sec-a}\n\n## 甲\n\n### 乙\n\n## 丙\n\n## 参考文献 {.unnumbered}"))
    assert '<p class="head">第 1 章</p>' in out and '<h1 id="sec-a">注意力</h1>' in out
    assert [text_of(h) for h in re.findall(r"(?s)<h[23].*?</h[23]>", out)] == ["1.1 甲", "1.1.1 乙", "1.2 丙", "参考文献"]


def test_unnumbered_preface_has_no_numbers(page, tmp_path):
    page()
    home = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert 'class="head"' not in home and ">前言</h1>" in home


def test_appendix_is_lettered(tmp_path):
    render(write_book(tmp_path, {"01_a": [md("# 甲")]}, {"x_b": [md("# 乙\n\n## 丙 {#sec-c}\n\n见 @sec-c 。\n\n$$\nx\n$$ {#eq-x}")]}), tmp_path / "out")
    out = (tmp_path / "out/nbs/x_b.html").read_text(encoding="utf-8")
    assert "附录 A" in out and ">A.1 节</a>" in out and r"\tag{A.1}" in out


def test_numbered_equation_and_reference(page):
    out = page(md("由 @eq-a 可得\n\n$$\n\\begin{aligned}\nx &= 1 \\\\\ny &= 2\n\\end{aligned}\n$$ {#eq-a}\n\n以及\n\n$$\nz\n$$ {#eq-b}"))
    assert re.search(r'(?s)<span id="eq-a" class="equation"><span\s+class="math display">\\\[.*\\begin\{aligned\}.*\\tag\{1\.1\}\\\]', out)
    assert '<a href="01_one.html#eq-a" class="xref">式 (1.1)</a>' in out and r"\tag{1.2}" in out and "{#eq" not in out


def test_text_after_a_labelled_equation_is_kept(page):
    assert "后文" in page(md("$$\nx\n$$ {#eq-a}\n后文还在。"))


def test_display_math_with_spaces_and_newlines(page):          # known-failures quarto-dev/quarto-cli#8505
    out = page(md("$$\nx=4\n$$\n\n行内 $a_1$ 。"))
    assert re.search(r'<span class="math display">\\\[\s*x=4\s*\\\]', out) and r"\(a_1\)" in out and "$" not in out


def test_punctuation_stays_with_a_short_formula(page):
    html = page(md("记 $d$ ，$x$ 与 $" + "x+" * 20 + "x$ 。"))
    assert '<span class="together"><span class="math inline">\\(d\\)</span>，</span><span class="math inline">\\(x\\)</span> 与' in html
    assert html.count('"together"') == 1 and "</span>。" in html


def test_figure_from_code_cell(page, tmp_path):
    out = page(md("见 @fig-a 。"), code("#| label: fig-a\n#| fig-cap: 曲线 $x$\nplot()", display(image_svg=SVG, text_plain="<Figure>")))
    figure = re.search(r'(?s)<figure id="fig-a".*?</figure>', out)[0]
    assert text_of(re.search(r"(?s)<figcaption.*?</figcaption>", figure)[0]) == r"图 1.1 曲线 \(x\)"
    assert 'alt="曲线 x"' in figure and ">图 1.1</a>" in out and "&lt;Figure&gt;" not in out
    assert (tmp_path / "out/nbs" / re.search(r'src="([^"]+)"', figure)[1]).read_text() == SVG


def test_figure_from_html_output(page):
    out = page(code("#| label: fig-h\n#| fig-cap: 画\nHTML()", display(text_html="<b class='own'>$$</b>")))
    assert re.search(r'(?s)<figure id="fig-h".*<b class=\'own\'>.*图 1\.1.*</figure>', out)


def test_figure_from_markdown(page, tmp_path):
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs/p.svg").write_text(SVG)
    out = page(md("![图题](p.svg){#fig-m}\n\n见 @fig-m 。"))
    assert '<figure id="fig-m"' in out and ">图 1.1</a>" in out and (tmp_path / "out/nbs/p.svg").is_file()


def test_pipe_table_with_caption_and_reference(page):
    out = page(md("见 @tbl-t 。\n\n| 甲 | 乙 |\n|:--|--:|\n| 1 | $x$ |\n\n: 表题 {#tbl-t}"))
    table = re.search(r'(?s)<figure id="tbl-t".*?</figure>', out)[0]
    assert "表 1.1" in table and "表题" in table and '<div class="table-wrap">' in table and ">表 1.1</a>" in out


def test_wide_table_keeps_natural_columns(page):
    assert "<col" not in page(md("| " + "很长的表头" * 12 + " | 乙 |\n|:--|--:|\n| 1 | 2 |"))


def test_computed_table(page):
    out = page(code("#| label: tbl-c\n#| tbl-cap: 算出来的表\nMarkdown()", display(text_markdown="| a | b |\n|--|--|\n| 1 | 2 |", text_plain="x")), md("见 @tbl-c 。"))
    assert re.search(r'(?s)<figure id="tbl-c".*<table.*表 1\.1.*算出来的表.*</figure>', out) and ">表 1.1</a>" in out


def test_labelled_cell_shows_printed_text_before_the_float(page):
    out = page(code("#| label: fig-a\n#| fig-cap: 题\nplot()", new_output("stream", name="stdout", text="先印"), display(image_svg=SVG)))
    assert out.index("先印") < out.index("<figure")


@pytest.mark.parametrize("kind,default", [("note", "注"), ("tip", "提示"), ("warning", "警告"), ("important", "重要"), ("caution", "当心")])
def test_callouts(page, kind, default):
    out = page(md(f"::: {{.callout-{kind}}}\n正文\n:::\n\n::: {{.callout-{kind}}}\n## 自己的 $x$ 标题\n正文\n:::"))
    titles = [text_of(t) for t in re.findall(r'(?s)<div class="callout-title">.*?</div>', out)]
    assert titles == [default, r"自己的 \(x\) 标题"] and out.count(f"callout callout-{kind}") == 2 and "<h2" not in out


def test_callout_title_attribute_and_collapse(page):
    out = page(md('::: {.callout-tip collapse="true" title="答案"}\n见 @eq-a\n\n$$\nx\n$$ {#eq-a}\n:::\n\n::: {.callout-tip collapse="false"}\n开\n:::'))
    assert re.search(r'(?s)<details class="callout callout-tip"><summary>\s*答案', out) and '<details class="callout callout-tip" open>' in out
    assert r"\tag{1.1}" in out and "式 (1.1)" in out


def test_callout_may_span_cells(page):
    out = page(md("::: {.callout-tip}\n## 答案"), code("1 + 1"), md(":::"))
    assert re.search(r'(?s)callout-tip.*class="sourceCode.*</div>\s*</div>', out)


def test_code_cell_highlight_and_outputs(page):
    out = page(code("def f():\n    return 1", new_output("stream", name="stdout", text="\x1b[31m印出\x1b[0m\n"), display(text_plain="<1>")))
    assert '<span class="kw">def</span>' in out and "印出" in out and "\x1b" not in out and "&lt;1&gt;" in out


def test_code_containing_fences(page):
    assert "````" in text_of(page(code('s = """\n````\n"""')))


def test_folded_hidden_and_unechoed_code(page):
    out = page(code("#| code-fold: true\n折叠 = 1"), code('#| code-fold: true\n#| code-summary: "测试：导出到 tests/test_x.py"\n测 = 1'),
               code("#| echo: false\n不回显 = 1", new_output("stream", name="stdout", text="看得见")), code("#| include: false\n不出现 = 1"),
               code("#| output: false\n留着 = 1", new_output("stream", name="stdout", text="藏起")))
    assert len(re.findall(r'<details class="code-fold">', out)) == 2 and "测试：导出到 tests/test_x.py" in out
    assert "看得见" in out and "留着" in out and not any(s in out for s in ("不回显", "不出现", "藏起"))


@pytest.mark.parametrize("language", ["python", "text", "bash", "cuda", "cpp", "json", "toml", "yaml"])
def test_fenced_code(page, language):
    out = page(md(f"```{language}\nx = 1 @eq-a $$ {{{{<\n```"))
    assert "x = 1 @eq-a $$ {{&lt;" in re.sub(r"<[^>]+>", "", out)


def test_stderr_and_warning_option(page):
    err = new_output("stream", name="stderr", text="当心啊")
    assert "cell-stderr" in page(code("f()", err))
    assert "当心啊" not in page(code("#| warning: false\nf()", err))


def test_sympy_latex_output(page):
    out = page(code("expr", display(text_latex=r"$\displaystyle \frac{a}{b}$", text_plain="a/b")))
    assert re.search(r'math display">\\\[\s*\\frac\{a\}\{b\}\s*\\\]', out)


def test_exported_caption(page):
    assert re.search(r'(?s)<div class="exported">.*导出到 <code>attn_book.x</code>', page(md("::: {.exported}\n导出到 `attn_book.x`\n:::"), code("x = 1")))


def test_footnote(page):
    out = page(md("文[^a]\n\n[^a]: 注文。"))
    assert 'id="fn1"' in out and "注文" in out and 'href="#fn1"' in out


def test_lists_quotes_emphasis(page):
    out = page(md("1. 甲\n2. 乙\n\n- 丙\n\n> 引\n\n**粗**与*斜*"))
    assert all(f"<{t}" in out for t in ("ol", "ul", "blockquote", "strong", "em"))


def test_line_breaks_between_chinese_are_not_spaces(page):
    assert "上一行下一行" in text_of(page(md("上一行\n下一行")))


def test_no_space_before_full_width_punctuation(page):
    assert "见式 (1.1)，再见（式 (1.1)）。" in text_of(page(md("$$\nx\n$$ {#eq-a}\n\n见[@eq-a] ，再见（ @eq-a ） 。")))


def test_references_across_chapters(tmp_path):
    render(write_book(tmp_path, {"01_a": [md("# 甲 {#sec-a}\n\n见 @sec-b 、 @sec-b-two 、 @eq-b 。")],
                                 "02_b": [md("# 乙 {#sec-b}\n\n## 一\n\n## 二 {#sec-b-two}\n\n$$\nx\n$$ {#eq-b}\n\n回到[第一章](01_a.ipynb)。")]}), tmp_path / "out")
    out = (tmp_path / "out/nbs/01_a.html").read_text(encoding="utf-8")
    found = dict(re.findall(r'<a\s+href="(02_b.html#[^"]*)" class="xref"[^>]*>([^<]*)</a>', out))
    assert found == {"02_b.html#sec-b": "第 2 章", "02_b.html#sec-b-two": "2.2 节", "02_b.html#eq-b": "式 (2.1)"}
    assert re.search(r'href="01_a.html">第一章</a>', (tmp_path / "out/nbs/02_b.html").read_text(encoding="utf-8"))


def test_words_come_from_the_configuration(tmp_path):
    book = write_book(tmp_path, {"01_a": [md("# 甲\n\n$$\nx\n$$ {#eq-a}\n\n见 @eq-a 。")]}, language={"crossref-eq-prefix": "公式"})
    render(book, tmp_path / "out")
    assert "公式 (1.1)" in (tmp_path / "out/nbs/01_a.html").read_text(encoding="utf-8")


def test_navigation(tmp_path):
    render(write_book(tmp_path, {"01_a": [md("# 甲 $W_K$")], "02_b": [md("# 乙")]}, {"x": [md("# 丙")]}), tmp_path / "out")
    out = (tmp_path / "out/nbs/02_b.html").read_text(encoding="utf-8")
    assert re.search(r'rel="prev" href="01_a.html"', out) and re.search(r'rel="next" href="x.html"', out)
    assert [text_of(a) for a in re.findall(r"<a[^>]*>.*?</a>", re.search(r'(?s)<div class="chapters">.*?</div>', out)[0])] == ["前言", r"1甲 \(W_K\)", "2乙", "A丙"]
    assert 'href="02_b.html" aria-current="page"' in out and "附录" in out and 'href="../index.html"' in out


def test_contents_of_the_page_and_chinese_anchors(page):          # known-failures Z: squidfunk/mkdocs-material#5211
    out = page(md("# 题\n\n## 为什么除以 $\\sqrt{d}$？\n\n## 小结\n\n### 小结"), full=True)
    from urllib.parse import unquote
    ids = set(re.findall(r' id="([^"]*)"', out))
    links = [unquote(a) for a in re.findall(r'href="#([^"]*)"', out)]
    assert {"小结", "小结-1"} <= ids and len(links) >= 6 and set(links) <= ids


def test_search_index(page, tmp_path):
    page(md("# 题 {#sec-t}\n\n## 在线归一化\n\n行最大值 $m_i$ 与 `BLOCK_M`。\n\n$$\n\\frac{a}{b}\n$$"))
    index = json.loads((tmp_path / "out/libs/search-index.js").read_text(encoding="utf-8").partition("=")[2])
    record = next(r for r in index if r[2] == "在线归一化")
    assert record[0].startswith("nbs/01_one.html#") and record[1] == "题" and "行最大值" in record[3] and "BLOCK_M" in record[3] and "frac" not in record[3]


def test_no_page_asks_for_the_network(page, tmp_path):
    page()
    for f in (tmp_path / "out").rglob("*.html"):
        assert not re.search(r'(src|href)="(https?:)?//', f.read_text(encoding="utf-8").split("<main")[0])
    assert (tmp_path / "out/libs/tex-svg-full.js").stat().st_size > 1_000_000


# ---------------------------------------------------------------- 拒绝 refusals

@pytest.mark.parametrize("source,named", [
    ("::: {.callout-danger}\n文\n:::", "callout-danger"),
    ("::: {.panel-tabset}\n文\n:::", "panel-tabset"),
    ("::: {.callout-note icon=false}\n文\n:::", "icon"),
    ("::: {.callout-note}\n文\n\n## 中间的标题\n:::", "提示块"),
    ("::: {#lst-a}\n文\n\n题\n:::", "lst-a"),
    ("[文]{.column-margin}", "column-margin"),
    ("{{< video x.mp4 >}}", "{{<"),
    ("```{mermaid}\nA-->B\n```", "{mermaid}"),
    ("```rust\nfn\n```", "rust"),
    ("<div>文</div>\n\n<script>1</script>", "<script>"),
    ("行内 <b>粗</b>", "<b>"),
    ("## 节 {.special}", "special"),
    ("见 @eq-none 。", "@eq-none"),
    ("见 @smith2020 。", "@smith2020"),
    ("见@eq-a 。\n\n$$\nx\n$$ {#eq-a}", "@eq-"),
    ("$$\nx\n\ny\n$$", "$$"),
    ("文字 {#eq-a}", "{#eq-a"),
    ("![](p.svg)", "替代文字"),
    ("![图](missing.svg)", "missing.svg"),
    ("[链接](99_none.ipynb)", "99_none.ipynb"),
    ("# 又一个一级标题", "一级标题"),
    ("```python\nx = 1", "```"),
    ("::: {.callout-note}\n没有结束的提示块", "unclosed"),
    ("多出来的结尾\n\n:::", ":::"),
    ("$$\nx\n$$ {#eq-a}\n\n$$\ny\n$$ {#eq-a}", "eq-a 重复"),
])
def test_refused_markdown(page, source, named):
    message = refusal(page, md("# 题"), md("先有一格。"), md(source))
    assert named in message and "nbs/01_one.ipynb" in message
    if not any(w in named for w in ("missing", "99_none")):
        assert "第 3 格（c3）" in message


@pytest.mark.parametrize("cell,named", [
    (code("#| column: margin\nx"), "column"),
    (code("#| fig-cap: 甲: 乙\nx"), "mapping values"),
    (code("#| label: fig-a\nplot()", display(image_svg=SVG)), "fig-a"),
    (code("#| label: fig-a\n#| fig-cap: 题\nplot()"), "恰好一个"),
    (code("#| label: fig-a\n#| fig-cap: 题\nplot()", display(image_svg=SVG), display(image_svg=SVG)), "恰好一个"),
    (code("plot()", display(image_svg=SVG)), "fig-cap"),
    (code("1/0", new_output("error", ename="ZeroDivisionError", evalue="除零", traceback=[])), "ZeroDivisionError"),
])
def test_refused_code_cell(page, cell, named):
    message = refusal(page, md("# 题"), cell)
    assert named in message and "nbs/01_one.ipynb 第 2 格（c2）" in message


def test_duplicate_label_over_two_chapters(tmp_path):
    cells = lambda: [md("# 题"), md("$$\nx\n$$ {#eq-a}")]
    with pytest.raises(RenderError, match=r"02_b.ipynb 第 2 格.*eq-a 重复，已在 nbs/01_a.ipynb 第 2 格"):
        render(write_book(tmp_path, {"01_a": cells(), "02_b": cells()}), tmp_path / "out")


def test_missing_title(tmp_path):
    with pytest.raises(RenderError, match="没有一级标题"):
        render(write_book(tmp_path, {"01_a": [md("正文")]}), tmp_path / "out")


def test_structure_refuses_missing_file_and_parts(tmp_path):
    book = write_book(tmp_path, {"01_a": [md("# 题")]})
    (book / "nbs/01_a.ipynb").unlink()
    with pytest.raises(RenderError, match="01_a.ipynb"):
        structure(book)
    (book / "_quarto.yml").write_text("book: {title: 书, chapters: [{part: 一, chapters: []}]}", encoding="utf-8")
    with pytest.raises(RenderError, match="part"):
        structure(book)


def test_a_failed_render_leaves_the_old_book(page, tmp_path):
    page()
    refusal(page, md("见 @eq-none 。"))
    assert (tmp_path / "out/index.html").is_file()


def test_cell_options():
    assert cell_options("#| label: fig-a\n#| echo: false\nx = 1") == ({"label": "fig-a", "echo": False}, "x = 1")
    assert cell_options("x = 1\n#| 不在开头") == ({}, "x = 1\n#| 不在开头")


def test_adapter_stays_small():
    """转换方言的部分（过滤器与笔记本转换）不超过 300 行代码。 The dialect adapter stays under 300 lines."""
    lines = [line for name in ("filter.lua", "notebook.py") for line in (ROOT / "tools/render" / name).read_text(encoding="utf-8").splitlines()]
    assert len([s for line in lines if (s := line.strip()) and not s.startswith(("--", "#"))]) < 300
