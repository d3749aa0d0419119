"""README 说的话都要成立：命令存在、代码能跑、链接有效、章节与书一致、版本与配置一致。"""
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from attn_book.cli import parser

ROOT = Path(__file__).resolve().parent.parent
TEXT = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}
README, MAKEFILE = TEXT["README.md"], (ROOT / "Makefile").read_text("utf-8")


def blocks(text, language):
    "某种语言的代码块。"
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands():
    "bash 代码块和行内代码里的每条命令，按 && 拆开。"
    lines = [line for text in TEXT.values() for block in blocks(text, "bash") for line in block.splitlines()]
    inline = [c for text in TEXT.values() for c in re.findall(r"`((?:make|attn-book) [^`]+)`", text)]
    parts = [p.strip() for line in lines + inline for p in line.split("#")[0].split("&&")]
    return sorted({p for p in parts if p})


@pytest.mark.parametrize("command", commands())
def test_command_exists(command):
    word, *rest = shlex.split(command)
    if word == "make":
        targets = [r for r in rest if "=" not in r and not r.startswith("-")]
        assert targets and all(re.search(rf"^{re.escape(t)}:", MAKEFILE, re.M) for t in targets)
    elif word == "attn-book":
        args = parser().parse_args(rest)
        if args.command == "compile":
            from attn_book import aot
            assert args.kernel in aot.kernels()
    else:
        assert word in {"git", "cd", "pip", "sudo"}, f"README 里有没检验过的命令：{command}"


def test_there_are_commands():
    found = commands()
    assert {"make book", "make test", "make gpu-check", "attn-book doctor"} <= set(found)


def test_python_blocks_run():
    code = "\n".join(blocks(README, "python"))
    assert "attn_book" in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(TEXT))
def test_links(name):
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT[name])
    assert links
    for link in links:
        path, _, fragment = link.partition("#")
        assert "://" in link or not path or (ROOT / path).exists(), f"{name} 的链接 {link} 无效"
        if fragment and not path:
            anchors = [h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", TEXT[name], re.M)]
            assert fragment in anchors, f"{name} 里没有标题 {fragment}"


def sources(parts):
    "_quarto.yml 里的文件，展平各部分。"
    for p in parts:
        if isinstance(p, str):
            yield p
        else:
            yield from [p["part"]] if str(p.get("part", "")).endswith((".qmd", ".ipynb")) else []
            yield from sources(p.get("chapters", []))


def test_chapter_table_matches_the_book():
    book = yaml.safe_load((ROOT / "_quarto.yml").read_text("utf-8"))["book"]
    wanted = [s for s in sources(book["chapters"] + book.get("appendices", [])) if s != "index.qmd"]
    rows = re.findall(r"^\| \[(.+?)\]\((nbs/.+?\.ipynb)\) \|.*\| (?:`attn_book\.(\w+)`|—) \|$", README, re.M)
    assert [path for _, path, _ in rows] == wanted
    for title, path, module in rows:
        nb = nbformat.read(ROOT / path, 4)
        heading = re.sub(r"\s*\{.*\}$|\$|\\text|[\\{}]", "", nb.cells[0].source.splitlines()[0].removeprefix("# "))
        assert title.split("：")[-1] in heading or heading.startswith(title), f"{path} 的标题是 {heading}"
        exports = [m[1] for c in nb.cells if (m := re.match(r"#\|\s*default_exp\s+(\w+)", c.source))]
        assert exports == ([module] if module else [])


def test_versions_agree():
    pins = dict(re.findall(r"^(TORCH|TRITON) *:= *(\S+)$", MAKEFILE, re.M))
    rows = {r[0]: r for r in re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|$", README, re.M)}
    assert rows["torch"][1] == pins["TORCH"] and rows["triton"][1] == pins["TRITON"]
    settings = (ROOT / "settings.ini").read_text("utf-8")
    low = dict(re.findall(r"(torch|triton|numpy)>=([\d.]+)", settings))
    for name, version in low.items():
        assert rows[name][2].startswith(f"{version} 以上")
    assert f'min_python = {rows["Python"][2].removesuffix(" 以上")}' in settings


def test_results_are_described_honestly():
    "有了真实 GPU 的结果，就不能再写待测；没有，就必须写待测。"
    waiting = "`results/` 里还没有结果" in README
    kinds = [json.loads(p.read_text("utf-8")).get("kind") for p in (ROOT / "results").glob("*.json")]
    assert waiting == (not {"check", "bench"} & set(kinds))
