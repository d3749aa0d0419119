"""建书的工具，以及建好的书：在断网的无头 Chromium 里从磁盘打开每一页。

The book builder, and the built book: every page opened from disk in a headless Chromium with the network cut.
"""
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import book  # noqa: E402
from render.browser import browser  # noqa: E402
from render.quarto_post import localise  # noqa: E402
from render.site import structure  # noqa: E402

PAGES = [page["html"] for page in structure(ROOT)[1]]
NOTEBOOKS = [ROOT / page["source"] for page in structure(ROOT)[1] if page["source"].endswith(".ipynb")]


# ---------------------------------------------------------------- 小书：执行、缓存、布置、检查 tiny books

def md(text):
    return new_markdown_cell(text)


def code(text):
    return new_code_cell(text)


def tiny(root, **chapters):
    """在 root 写一本小书和一个小库。 Write a tiny book and library under `root`."""
    (root / "nbs").mkdir(parents=True, exist_ok=True)
    (root / "attn_book").mkdir(exist_ok=True)
    for name in ("__init__", "used", "deep", "other"):
        (root / f"attn_book/{name}.py").write_text("from .deep import value\n" if name == "used" else "value = 1\n")
    for name, cells in chapters.items():
        nb = new_notebook(cells=[c.copy() for c in cells])
        for i, cell in enumerate(nb.cells, 1):
            cell["id"] = f"c{i}"
        nbformat.write(nb, root / f"nbs/{name}.ipynb")
    (root / "index.qmd").write_text("# 前言 {.unnumbered}\n", encoding="utf-8")
    (root / "_quarto.yml").write_text(json.dumps({"project": {"type": "book", "output-dir": "_book"}, "lang": "zh", "book": {
        "title": "小书", "chapters": ["index.qmd", *(f"nbs/{n}.ipynb" for n in chapters)]}}), encoding="utf-8")
    return root


CHAPTER = [md("# 一 {#sec-one}"), code("#| default_exp one"), code("#| hide\n藏 = 1"),
           code("#| export\nfrom attn_book.used import value"),
           code("#| test\ndef test_value():\n    assert value == 1"), code("test_value()\nprint(value + 41)"),
           code("#| gpu\n#| eval: false\nraise RuntimeError('没有显卡也执行了')"), code("#| eval: false\nraise RuntimeError('不该执行')")]


def test_build_then_rebuild_only_what_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(book, "has_gpu", lambda: False)
    root = tiny(tmp_path, one=CHAPTER)
    run = lambda: (book.build(root, renderer="embedded"), "✓ one" in capsys.readouterr().out)[1]
    assert run(), "第一次要执行"
    text = (root / "_book/nbs/one.html").read_text(encoding="utf-8")
    assert "42" in text and "需要 GPU，此处未运行" in text and "此处未运行。" in text
    assert "导出到 <code>attn_book.one</code>" in text and "测试：导出到 tests/test_one.py" in text
    assert not any(s in text for s in ("default_exp", "藏 = 1", "#| "))
    assert not run(), "没有改动却又执行了"
    (root / "attn_book/other.py").write_text("value = 2\n")
    tiny_md = [md("# 一，改了文字 {#sec-one}"), *CHAPTER[1:]]
    nbformat.write(new_notebook(cells=tiny_md), root / "nbs/one.ipynb")
    assert not run(), "只改了文字和无关的模块，却又执行了"
    assert "改了文字" in (root / "_book/nbs/one.html").read_text(encoding="utf-8")
    (root / "attn_book/deep.py").write_text("value = 1  # 间接用到的模块变了\n")
    assert run(), "间接用到的模块变了，应当重新执行"


def test_a_failing_cell_is_named_and_the_exit_status_is_not_zero(tmp_path, capsys):
    root = tiny(tmp_path, one=CHAPTER[:2], two=[md("# 二"), code("x = 1"), code("assert x == 2, '不等'")])
    assert book.main(["build", "--root", str(root), "--renderer", "embedded"]) == 1
    captured = capsys.readouterr()
    assert "two.ipynb 第 3 格（c3） 执行失败：AssertionError: 不等" in captured.err and not (root / "_book").exists()
    assert "✓ one" in captured.out


def test_a_dead_kernel_is_named(tmp_path):
    root = tiny(tmp_path, one=[md("# 一"), code("import os\nos._exit(3)")])
    with pytest.raises(book.BookError, match="one.ipynb 第 2 格"):
        book.execute(root)


def test_gpu_cells_run_where_there_is_one(monkeypatch):
    monkeypatch.setattr(book, "has_gpu", lambda: True)
    assert book.skip_note("#| gpu\nf()") is None and book.skip_note("#| eval: false\nf()") == "此处未运行。"


def test_modules_used(tmp_path):
    root = tiny(tmp_path)
    names = lambda text: [p.stem for p in book.modules_used(text, "", root)]
    assert names("from attn_book.used import x") == ["__init__", "deep", "used"]
    assert names("from attn_book import other, deep") == ["__init__", "deep", "other"]
    (root / "attn_book/other.py").write_text("import importlib\n")
    assert names("import attn_book.other") == ["__init__", "deep", "other", "used"]


@pytest.mark.parametrize("cells,message", [
    ([md("# 题"), code("#| default_exp one"), code("#| export\n%time\nx = 1")], "one.ipynb 第 3 格（c3）：导出的格里有魔法命令 '%time'"),
    ([md("# 题"), code("#| default_exp one"), code("#| test\n!ls")], "one.ipynb 第 3 格（c3）：导出的格里有魔法命令 '!ls'"),
    ([md("# 题"), code("#| default_exp one"), code("#| export\nx = = 1")], "one.ipynb 第 3 格（c3）：导出的格有语法错误"),
    ([md("# 题"), code("#| exprot\nx = 1")], "one.ipynb 第 2 格（c2）：未知的指令"),
    ([md("# 题"), code("#| label:fig-a\nx = 1")], "选项要写成"),
    ([md("# 题"), code("x = 1\n#| export")], "指令要放在格的最前面"),
    ([md("# 题"), code("#| export\nx = 1")], "没有 #| default_exp"),
    ([md("正文")], "一级标题有 0 个"),
    ([md("# 题"), md("# 又一题")], "一级标题有 2 个"),
    ([md("正文"), md("# 题")], "第 1 格不是一级标题"),
    ([md("# 题\n\n$$\nx\n$$ {#eq-a}"), code("#| label: eq-a\nx")], "标签 eq-a 重复，已在 one.ipynb 第 1 格"),
])
def test_check_finds(tmp_path, cells, message):          # known-failures X: AnswerDotAI/nbdev#1249
    problems = book.check(tiny(tmp_path, one=cells))
    assert any(message in p for p in problems), problems


def test_check_finds_stored_outputs_and_reports_by_exit_status(tmp_path, capsys):
    root = tiny(tmp_path, one=[md("# 题"), new_code_cell("1", execution_count=1)])
    assert book.main(["check", "--root", str(root)]) == 1 and "one.ipynb 第 2 格（c2）：存了输出" in capsys.readouterr().out
    assert book.check(root, stored_outputs=False) == []


def test_check_ignores_comments_in_code_fences(tmp_path):
    assert book.check(tiny(tmp_path, one=[md("# 题\n\n```python\n# 注释不是标题\n```")])) == []


def test_the_real_quarto_is_used_when_it_is_on_the_path(tmp_path, monkeypatch):
    root = tiny(tmp_path / "书", one=CHAPTER[:2])
    fake = tmp_path / "bin/quarto"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\n[ "$1" = render ] && mkdir -p "$2/_book" && cp "$2/nbs/one.ipynb" "$2/_book/" && echo quarto > "$2/_book/index.html"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    assert book.build(root).read_text() == "quarto\n"


def test_quarto_pages_get_a_local_mathjax(tmp_path):
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs/a.html").write_text('<script src="https://cdn.example/npm/mathjax@3/es5/tex-chtml-full.js" defer></script>')
    localise(tmp_path)
    assert (tmp_path / "nbs/a.html").read_text() == '<script src="../site_libs/mathjax/tex-svg-full.js" defer></script>'
    assert (tmp_path / "site_libs/mathjax/tex-svg-full.js").stat().st_size > 1_000_000


def test_the_notebooks_of_this_book_pass_the_check():
    assert book.check(ROOT, stored_outputs=False) == []


# ---------------------------------------------------------------- 建好的书 the built book

@pytest.fixture(scope="session")
def site():
    """用嵌入式渲染器建好的全书；没有改动的章节不再执行。 The book, by the embedded renderer."""
    return book.build(ROOT, ROOT / "_build" / "tested", renderer="embedded").parent


@pytest.fixture(scope="session")
def chromium():
    """一个断网的 Chromium；没有就失败，并说怎么装。 A Chromium with the network cut; none is a failure."""
    with browser() as page:
        yield page


@pytest.fixture
def tab(chromium, site):
    """从磁盘打开一页，公式排完为止；测试结束时不许有失败的请求或脚本错误。

    Opens a page from disk; at the end no request may have failed and no script thrown.
    """
    chromium.size(1280)
    chromium.scheme("light")
    chromium.events.clear()

    def open_page(name, width=1280, scheme="light"):
        chromium.size(width, 900, width < 600)
        chromium.scheme(scheme)
        chromium.open((site / name).as_uri(), "document.documentElement.dataset.math === 'done'")
        return chromium
    yield open_page
    chromium.js("localStorage.clear()")
    bad = [e["params"] for e in chromium.events if e["method"] in ("Network.loadingFailed", "Runtime.exceptionThrown")
           and not e["params"].get("canceled")]
    urls = [e["params"]["request"]["url"] for e in chromium.events if e["method"] == "Network.requestWillBeSent"]
    assert not bad and not [u for u in urls if not u.startswith(("file:", "data:", "about:"))]


@pytest.mark.parametrize("name", PAGES)
def test_page_reads_with_no_network(tab, site, name):
    page = tab(name)
    prose = page.js("""(() => { const main = document.querySelector('main').cloneNode(true);
        main.querySelectorAll('pre, code, mjx-container, .cell-output-html').forEach(e => e.remove()); return main.textContent; })()""")
    assert len(prose) > 100 and re.search(r"[\u4e00-\u9fff]", prose)
    for raw in ("$$", "@eq-", "@fig-", "@tbl-", "@sec-", "{#", ":::", "\\(", "\\["):
        assert raw not in prose, f"{name} 里有没解析的 {raw}"
    expected = len(re.findall(r'class="math (?:inline|display)"', (site / name).read_text(encoding="utf-8")))
    assert page.js("document.querySelectorAll('mjx-container').length") == expected
    errors = page.js("""[...document.querySelectorAll('[data-mml-node=merror], mjx-merror, [data-mml-node=mtext][fill=red]')]
        .map(e => e.closest('mjx-container').outerHTML.slice(0, 80) + e.textContent)""")
    assert errors == []
    assert page.js("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)") == []
    assert page.js("[...document.images].filter(i => i.closest('main') && !i.alt).length") == 0


@pytest.mark.parametrize("name", PAGES)
def test_no_sideways_scrolling_on_a_phone(tab, name):
    page = tab(name, 375)
    assert page.js("document.documentElement.scrollWidth") <= 375
    wide = page.js("""[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 376
        && !e.closest('pre, .table-wrap, .math, .cell-output-html, mjx-container')).map(e => e.outerHTML.slice(0, 120))""")
    assert wide == []


class Anchors(HTMLParser):
    """一页的 id 与链接。 A page's ids and links."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.refs = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag in ("a", "link") and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag in ("img", "script") and attrs.get("src"):
            self.links.append(attrs["src"])
        self.refs += "xref" in attrs.get("class", "").split()


def test_every_link_and_anchor_resolves(site):          # known-failures Z: squidfunk/mkdocs-material#5211
    pages = {name: Anchors((site / name).read_text(encoding="utf-8")) for name in PAGES}
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path))) if parts.path else name
            assert (site / target).is_file(), f"{name} → {link}"
            if parts.fragment:
                assert unquote(parts.fragment) in pages[target].ids, f"{name} → {link}"
        own = [i for i in page.ids if not i.startswith("toc-")]
        assert len(own) == len(set(own)), f"{name} 有重复的 id"
    assert sum(p.refs for p in pages.values()) > 20


def test_previous_and_next_visit_every_page_in_order(tab):
    page, seen = tab(PAGES[0]), []
    while True:
        seen.append(page.js("location.pathname"))
        following = page.js("document.querySelector('a.next')?.href")
        if not following:
            break
        page.open(following)
        assert unquote(urlsplit(page.js("document.querySelector('a.prev').href")).path) == unquote(seen[-1])
    assert len(seen) == len(PAGES)


def test_figures_hold_every_character_as_a_shape(site):          # known-failures quarto-dev/quarto-cli#6507
    pictures = list(site.rglob("*.svg"))
    assert len(pictures) > 3
    for picture in pictures:
        text = picture.read_text(encoding="utf-8")
        lettering = re.findall(r"(?s)<text\b.*?</text>", text)
        assert not [t for t in lettering if re.search(r"[\u3000-\u9fff]", t)], f"{picture.name}：汉字没有转成轮廓"
        shapes = dict(re.findall(r'<path id="([^"]+)" d="([^"]*)"', text))
        used = set(re.findall(r'<use [^>]*href="#([^"]+)"', text))
        assert not [u for u in used if u in shapes and not shapes[u].strip() and not u.endswith("-20")], f"{picture.name}：有空的字形"


def test_no_missing_glyphs_were_reported(site):          # known-failures quarto-dev/quarto-cli#6507
    for path in NOTEBOOKS:
        executed = nbformat.read(ROOT / "_build/executed" / path.name, 4)
        streams = [o.text for c in executed.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"]
        assert not [s for s in streams if "missing from" in s or "findfont" in s], path.name


def test_search_finds_chinese(tab):
    page = tab(PAGES[-1])
    page.key("/")
    page.wait("document.querySelector('#search').open && document.activeElement.id === 'query'")
    page.type("注意力")
    page.wait("document.querySelectorAll('#hits a').length")
    assert page.js("document.querySelector('#hits a mark').textContent") == "注意力"
    first, second = page.js("[...document.querySelectorAll('#hits a')].slice(0, 2).map(a => a.href)")
    assert page.js("document.querySelector('#hits a[aria-selected=true]').href") == first
    page.key("ArrowDown")
    assert page.js("document.querySelector('#hits a[aria-selected=true]').href") == second
    page.key("Enter")
    page.wait(f"location.href === {json.dumps(second)} && document.readyState === 'complete'")
    assert page.js("!location.hash || !!document.getElementById(decodeURIComponent(location.hash.slice(1)))")


def test_search_ranks_loosely_when_nothing_is_exact_and_says_when_nothing_is_found(tab):
    page = tab("index.html")
    page.js("document.querySelector('.side .open-search').click()")
    page.type("注意力分数矩阵呀")
    page.wait("document.querySelectorAll('#hits a').length")
    page.js("document.querySelector('#query').value = ''")
    page.type("犇骉羴")
    page.wait("document.querySelector('#hits').textContent.includes('没有找到')")
    page.key("Escape")
    page.wait("!document.querySelector('#search').open")


def test_dark_follows_the_system_and_the_toggle_is_remembered(tab):
    page = tab("index.html", scheme="dark")
    colour = lambda: page.js("getComputedStyle(document.body).backgroundColor")
    dark = colour()
    assert page.js("document.documentElement.dataset.theme") == "dark"
    page.js("document.querySelector('.side .theme').click()")
    light = colour()
    assert page.js("document.documentElement.dataset.theme") == "light" and light != dark
    assert max(map(int, re.findall(r"\d+", dark)[:3])) < 60 < 200 < min(map(int, re.findall(r"\d+", light)[:3]))
    tab(PAGES[-1], scheme="dark")
    assert page.js("document.documentElement.dataset.theme") == "light", "换一页就忘了"


def test_figures_are_readable_in_the_dark(tab):
    name = next(n for n in PAGES if "fig" in n or "hardware" in n)
    page = tab(name, scheme="dark")
    background = page.js("getComputedStyle(document.querySelector('main figure img')).backgroundColor")
    assert min(map(int, re.findall(r"\d+", background)[:3])) > 200


def test_menu_on_a_phone(tab):
    page = tab(PAGES[1], 375)
    visible = "getComputedStyle(document.querySelector('#side')).visibility === 'visible'"
    assert not page.js(visible)
    page.js("document.querySelector('#menu').click()")
    page.wait(visible)
    page.wait("document.querySelector('#side').getBoundingClientRect().left === 0")
    assert page.js("document.querySelector('#menu').getAttribute('aria-expanded')") == "true"
    page.js("document.querySelector('.shade').click()")
    page.wait(f"!({visible})")


def test_code_has_a_copy_button_and_colours(tab):
    page = tab(PAGES[1])
    assert page.js("document.querySelectorAll('main div.sourceCode').length === document.querySelectorAll('main .copy').length")
    assert page.js("new Set([...document.querySelectorAll('main .sourceCode span')].map(e => getComputedStyle(e).color)).size") > 3
    page.js("document.querySelector('main .copy').click()")
    page.wait("document.querySelector('main .copy').textContent === '已复制'")


def test_contents_follow_the_scroll(tab):
    page = tab(PAGES[1])
    heads = "[...document.querySelectorAll('main h2')]"
    page.js(f"window.scrollTo({{top: {heads}[2].offsetTop - 150, behavior: 'instant'}})")
    page.wait(f"document.querySelector('aside.toc a.here')?.hash.length > 1 && decodeURIComponent(document.querySelector('aside.toc a.here').hash.slice(1)) === {heads}[2].id")


def test_pointing_at_a_reference_shows_the_equation(tab):
    page = tab(PAGES[2])
    x, y = page.js("""(() => { const a = [...document.querySelectorAll('main > p a.xref')].find(a => a.pathname === location.pathname && /#eq-/.test(a.hash));
        a.scrollIntoView({block: 'center', behavior: 'instant'}); const r = a.getBoundingClientRect(); return [r.x + 4, r.y + 4]; })()""")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait("document.querySelector('.peek mjx-container')")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    page.wait("!document.querySelector('.peek')")


def test_a_link_into_a_fold_opens_it(tab):
    page = tab(PAGES[1])
    page.js("document.querySelector('main details:not(.toc-phone) .details-body').id = 'inside'")
    assert not page.js("document.getElementById('inside').closest('details').open")
    page.js("location.hash = 'inside'")
    page.wait("document.getElementById('inside').closest('details').open")


def test_command_line_help():
    run = subprocess.run([sys.executable, ROOT / "tools/book.py", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and all(w in run.stdout for w in ("build", "preview", "check", "--renderer"))
