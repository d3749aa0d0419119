"""构建这本书：检查、执行、布置、渲染。

Build the book: check, execute, stage, render.

    python tools/book.py build    执行改过的章节，写出 _book/      execute what changed, write _book/
    python tools/book.py preview  同上，再起本地服务器并随改随建   the same, then serve it and rebuild on change
    python tools/book.py check    只检查笔记本，不执行             lint the notebooks, execute nothing

书的结构只写在 `_quarto.yml` 里。The book's structure is stated in `_quarto.yml` and nowhere else.
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell, new_output

from render.notebook import OPTIONS, RenderError
from render.site import render, structure

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "attn_book"
DIRECTIVES = {"default_exp", "export", "exporti", "exports", "hide", "test", "gpu", "slow"}
PACKAGES = ("torch", "triton", "numpy", "matplotlib", "sympy")


class BookError(Exception):
    """书建不成的原因，带文件与格。 Why the book cannot be built, with file and cell."""


# ---------------------------------------------------------------- 笔记本 notebooks

def directives(source: str) -> tuple[dict[str, str], str]:
    """拆开 nbdev 指令与其余源码（Quarto 选项留在源码里）。

    Split nbdev's directives from the rest of a cell; Quarto's options stay in the rest.
    """
    lines = source.splitlines()
    head = next((i for i, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    found, rest = {}, []
    for line in lines[:head]:
        word, _, value = line[2:].strip().partition(" ")
        if word in DIRECTIVES:
            found[word] = value.strip()
        else:
            rest.append(line)
    return found, "\n".join(rest + lines[head:])


def where(path: Path, number: int, cell) -> str:
    return f"{path.name} 第 {number} 格（{cell.get('id', '无 id')}）"


def notebooks(root: Path) -> list[Path]:
    return [root / page["source"] for page in structure(root)[1] if page["source"].endswith(".ipynb")]


def module_name(nb) -> str:
    """`#| default_exp` 的模块名，没有则为空。 The notebook's `default_exp`, or ''."""
    return next((d["default_exp"] for c in nb.cells if c.cell_type == "code" and "default_exp" in (d := directives(c.source)[0])), "")


# ---------------------------------------------------------------- 检查 check

def prose(source: str) -> str:
    """去掉代码块之后的 markdown。 Markdown without its fenced code."""
    return re.sub(r"^(```+|~~~+).*?^\1", "", source, flags=re.M | re.S)


def code_problems(source: str) -> list[str]:
    """一个代码格的毛病。 What is wrong with one code cell."""
    found, rest = directives(source)
    lines, problems = source.splitlines(), []
    head = next((i for i, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    for line in lines[:head]:
        word = re.match(r"#\|\s*([\w-]*)", line)[1]
        if word not in DIRECTIVES | OPTIONS:
            problems.append(f"未知的指令 {line!r}")
        elif word in OPTIONS and not re.match(r"#\| [\w-]+: \S", line):
            problems.append(f"选项要写成“#| 名: 值”：{line!r}")
    problems += [f"指令要放在格的最前面：{line!r}" for line in lines[head:] if re.match(r"#\|\s*[\w-]+(:|$)", line)]
    if found.keys() & {"export", "exporti", "exports", "test"}:
        magic = next((line for line in rest.splitlines() if re.match(r"\s*(%{1,2}[a-zA-Z]|![\w./])", line)), None)
        try:
            ast.parse(rest)
        except SyntaxError as e:
            problems.append(f"导出的格里有魔法命令 {magic.strip()!r}，导出后不是 Python" if magic else f"导出的格有语法错误：{e}")
    return problems


def check(root: Path, *, stored_outputs: bool = True) -> list[str]:
    """不执行，只看源：返回一行一个的毛病。

    Lint the sources without executing: one problem a line.
    """
    problems, labels = [], {}
    for page in structure(root)[1]:
        path = root / page["source"]
        if path.suffix != ".ipynb":
            titles, cells = len(re.findall(r"^# ", prose(path.read_text(encoding="utf-8")), re.M)), []
        else:
            nb = nbformat.read(path, 4)
            cells = list(enumerate(nb.cells, 1))
            titles = sum(len(re.findall(r"^# ", prose(c.source), re.M)) for _, c in cells if c.cell_type == "markdown")
            if not (nb.cells and nb.cells[0].cell_type == "markdown" and nb.cells[0].source.startswith("# ")):
                problems.append(f"{path.name}：第 1 格不是一级标题")
            if not module_name(nb) and any(directives(c.source)[0].keys() & {"export", "test"} for _, c in cells if c.cell_type == "code"):
                problems.append(f"{path.name}：有导出的格，却没有 #| default_exp")
        if titles != 1:
            problems.append(f"{path.name}：一级标题有 {titles} 个，应恰好 1 个")
        for number, cell in cells:
            at = where(path, number, cell)
            if cell.cell_type == "code":
                problems += [f"{at}：{p}" for p in code_problems(cell.source)]
                if stored_outputs and (cell.outputs or cell.execution_count):
                    problems.append(f"{at}：存了输出，运行 nbdev_clean")
            pattern = r"^#\|\s*label:\s*(\S+)" if cell.cell_type == "code" else r"\{#((?:eq|fig|tbl|sec)-[\w-]+)"
            for label in re.findall(pattern, cell.source if cell.cell_type == "code" else prose(cell.source), re.M):
                if label in labels:
                    problems.append(f"{at}：标签 {label} 重复，已在 {labels[label]}")
                labels[label] = at
    return problems


# ---------------------------------------------------------------- 执行 execute

@cache
def has_gpu() -> bool:
    """这台机器上 torch 用得到 CUDA 吗。 Can torch reach a CUDA card here."""
    if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    return subprocess.run([sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]).returncode == 0


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def modules_used(text: str, own: str, root: Path) -> list[Path]:
    """笔记本（传递地）用到的库模块；有动态导入时取全部。

    The library's modules that a notebook uses, transitively; all of them where imports are dynamic.
    """
    everything = {p.stem: p for p in sorted((root / PACKAGE).glob("*.py"))}
    seen, todo = {"__init__"} & everything.keys(), [own, *re.findall(rf"\b{PACKAGE}[./](\w+)", text)]
    for names in re.findall(rf"from {PACKAGE} import ([\w, ]+)", text):
        todo += re.findall(r"\w+", names)
    while todo:
        name = todo.pop()
        if name in everything and name not in seen:
            seen.add(name)
            source = everything[name].read_text(encoding="utf-8")
            if "importlib" in source or "pkgutil" in source:
                return list(everything.values())
            todo += re.findall(rf"(?:from |\b{PACKAGE})\.(\w+)", source)
            for names in re.findall(rf"from (?:\.|{PACKAGE}) import ([\w, ]+)", source):
                todo += re.findall(r"\w+", names)
    return [everything[n] for n in sorted(seen)]


def digest(path: Path, root: Path) -> str:
    """决定输出的一切：代码格、用到的模块、真卡结果、版本。

    Everything the outputs depend on: code cells, modules used, results from cards, versions.
    """
    nb = nbformat.read(path, 4)
    code = [c.source for c in nb.cells if c.cell_type == "code"]
    used = modules_used("\n".join(code), module_name(nb), root) + sorted((root / "results").glob("*.json"))
    stamp = [sys.version, has_gpu(), *map(installed, PACKAGES), code, [(p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in used]]
    return hashlib.sha256(json.dumps(stamp).encode()).hexdigest()


def skip_note(source: str) -> str | None:
    """不执行的格显示什么；要执行则为 None。 The note shown for a cell that is not run; None when it is."""
    found, rest = directives(source)
    if "gpu" in found:
        return None if has_gpu() else "需要 GPU，此处未运行。"
    return "此处未运行。" if re.match(r"(#\|.*\n)*#\|\s*eval:\s*false", rest) else None


def execute_notebook(path: Path, root: Path, progress=lambda done, total: None):
    """从干净的内核执行一章，返回带输出的笔记本；失败时抛出 BookError。

    Run one chapter from a clean kernel; a failing cell raises BookError with file and cell.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    nb = nbformat.read(path, 4)
    cells = [(i, c) for i, c in enumerate(nb.cells) if c.cell_type == "code"]
    client = NotebookClient(nb, timeout=900, kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(path.parent)}})
    # 测试把 MPLBACKEND 设成 Agg；笔记本里的图要由 Jupyter 自己的后端画出来
    env = {**{k: v for k, v in os.environ.items() if k != "MPLBACKEND"}, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}
    with client.setup_kernel(env=env):
        for done, (i, cell) in enumerate(cells):
            progress(done, len(cells))
            cell.outputs, note = [], skip_note(cell.source)
            if note:
                cell.outputs = [new_output("display_data", {"text/markdown": f"*{note}*", "text/plain": note})]
                continue
            try:
                client.execute_cell(cell, i)
            except CellExecutionError as e:
                trace = re.sub(r"\x1b\[[0-9;]*m", "", e.traceback).strip().splitlines()
                raise BookError(f"{where(path, i + 1, cell)} 执行失败：{e.ename}: {e.evalue}\n" + "\n".join(trace[-25:])) from None
            except (CellTimeoutError, DeadKernelError) as e:
                raise BookError(f"{where(path, i + 1, cell)} 执行失败：{type(e).__name__}: {e}") from None
    return nb


class Progress:
    """逐章的进度；终端里多一行实时状态。 Progress per chapter, with a live line on a terminal."""

    def __init__(self):
        self.lock, self.running, self.live = threading.Lock(), {}, sys.stdout.isatty()

    def update(self, name: str, done: int, total: int) -> None:
        with self.lock:
            start = self.running.setdefault(name, (0, 0, time.time()))[2]
            self.running[name] = (done, total, start)
            if self.live:
                print("\r\033[K" + "   ".join(f"… {n} {d}/{t} 格 {time.time() - s:.0f} s" for n, (d, t, s) in self.running.items()), end="", flush=True)

    def finish(self, name: str, text: str) -> None:
        with self.lock:
            self.running.pop(name, None)
            print(("\r\033[K" if self.live else "") + text, flush=True)


def cached(path: Path, root: Path, key: str):
    """缓存里与 key 相符的执行结果。 The cached execution that matches `key`, if any."""
    store = root / "_build" / "executed" / path.name
    if store.is_file():
        nb = nbformat.read(store, 4)
        if nb.metadata.get("book", {}).get("digest") == key:
            return nb
    return None


def execute(root: Path, jobs: int = 2) -> dict[Path, object]:
    """执行改过的章节，至多 jobs 个同时；返回每章带输出的笔记本。

    Execute what changed, up to `jobs` chapters at a time.
    """
    store, show, done, failed = root / "_build" / "executed", Progress(), {}, []
    store.mkdir(parents=True, exist_ok=True)
    keys = {path: digest(path, root) for path in notebooks(root)}
    for path, key in keys.items():
        if nb := cached(path, root, key):
            done[path] = nb
            show.finish(path.stem, f"· {path.stem:<24} 未变（上次 {nb.metadata.book['seconds']:.1f} s）")
    todo = [p for p in keys if p not in done]
    if todo:  # 先建好字体缓存，免得提示混进某章的输出。 Build the font cache first, lest its notice land in a chapter.
        subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], capture_output=True)

    def run(path: Path):
        start = time.time()
        nb = execute_notebook(path, root, lambda i, n: show.update(path.stem, i, n))
        nb.metadata["book"] = {"digest": keys[path], "seconds": time.time() - start}
        nbformat.write(nb, store / path.name)
        return nb

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, path): path for path in todo}
        for future in as_completed(futures):
            path = futures[future]
            try:
                done[path] = future.result()
                show.finish(path.stem, f"✓ {path.stem:<24} {done[path].metadata.book['seconds']:.1f} s")
            except BookError as e:
                failed.append(str(e))
                show.finish(path.stem, f"✗ {path.stem:<24} {e}")
    if failed:
        raise BookError(f"{len(failed)} 章执行失败：" + "；".join(f.splitlines()[0] for f in failed))
    return done


# ---------------------------------------------------------------- 布置 stage

def staged_cells(nb, executed, module: str):
    """一章交给渲染器的格：nbdev 指令已经兑现。 A chapter's cells for the renderer, nbdev's directives resolved."""
    outputs = iter([c.outputs for c in executed.cells if c.cell_type == "code"])
    for number, cell in enumerate(nb.cells, 1):
        cell.metadata["cell"] = number
        if cell.cell_type != "code":
            yield cell
            continue
        cell.outputs = next(outputs)
        found, cell.source = directives(cell.source)
        if "hide" in found or not re.sub(r"#\|.*", "", cell.source).strip():
            continue
        if "test" in found:
            cell.source = f'#| code-fold: true\n#| code-summary: "测试：导出到 tests/test_{module}.py"\n{cell.source}'
        if "export" in found or "exports" in found:
            yield new_markdown_cell(f"::: {{.exported}}\n导出到 `{PACKAGE}.{found.get('export') or module}`\n:::", id=f"{cell.id}-to", metadata={"cell": number})
        yield cell


def stage(root: Path, executed: dict[Path, object]) -> Path:
    """写出 _build/stage/：两种渲染器都读它。 Write _build/stage/, which both renderers read."""
    target = root / "_build" / "stage"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(root / "_quarto.yml", target)
    for extra in (ROOT / "tools" / "render").glob("quarto*"):
        (target / "tools" / "render").mkdir(parents=True, exist_ok=True)
        shutil.copy(extra, target / "tools" / "render")
    for page in structure(root)[1]:
        source, copy = root / page["source"], target / page["source"]
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source in executed:
            nb = nbformat.read(source, 4)
            nb.cells = list(staged_cells(nb, executed[source], module_name(nb)))
            nbformat.write(nb, copy)
        else:
            shutil.copy(source, copy)
        for picture in source.parent.rglob("*"):
            relative = picture.relative_to(root)
            if picture.suffix in {".svg", ".png", ".jpg"} and not relative.parts[0].startswith(("_", ".")):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(picture, target / relative)
    return target


# ---------------------------------------------------------------- 命令 commands

def render_quarto(staged: Path, out: Path) -> int:
    """用真正的 Quarto 渲染。 Render with the real Quarto."""
    if subprocess.run(["quarto", "render", str(staged)], env={**os.environ, "QUARTO_PYTHON": sys.executable}).returncode:
        raise BookError("quarto render 失败")
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(staged / structure(staged)[0]["project"].get("output-dir", "_book"), out)
    return len(list(out.rglob("*.html")))


def build(root: Path = ROOT, out: Path | None = None, renderer: str = "auto", jobs: int = 2) -> Path:
    """检查、执行、布置、渲染；返回首页。

    Check, execute, stage, render; returns the home page.
    """
    root = root.resolve()
    if problems := check(root, stored_outputs=False):
        raise BookError("\n".join(problems))
    start, out = time.time(), (out or root / structure(root)[0]["project"].get("output-dir", "_book")).resolve()
    staged = stage(root, execute(root, jobs))
    use_quarto = renderer == "quarto" or renderer == "auto" and shutil.which("quarto")
    print(f"渲染：{'quarto' if use_quarto else '嵌入式渲染器（pandoc）'}", flush=True)
    count = render_quarto(staged, out) if use_quarto else render(staged, out)
    print(f"{count} 页，共 {time.time() - start:.1f} s。打开 {(out / 'index.html').as_uri()}")
    return out / "index.html"


def preview(root: Path, out: Path | None, renderer: str, jobs: int, port: int) -> None:
    """构建，起服务器，源文件一变就重建。 Build, serve, rebuild when a source changes."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    folder = build(root, out, renderer, jobs).parent
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"预览 http://127.0.0.1:{server.server_port}/ ，Ctrl-C 结束")
    sources = lambda: {p: p.stat().st_mtime for g in ("_quarto.yml", "*.qmd", "nbs/*.ipynb", f"{PACKAGE}/*.py", "tools/render/*") for p in root.glob(g)}
    seen = sources()
    while True:
        time.sleep(1)
        if (now := sources()) != seen:
            seen = now
            try:
                build(root, out, renderer, jobs)
            except (BookError, RenderError) as e:
                print(e, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """命令行入口；返回退出码。 Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="book.py", description="构建这本书 / build the book")
    parser.add_argument("command", choices=["build", "preview", "check"])
    parser.add_argument("--root", type=Path, default=ROOT, help="书的根目录 / the book's root")
    parser.add_argument("--out", type=Path, help="输出目录，默认取自 _quarto.yml / output folder")
    parser.add_argument("--renderer", choices=["auto", "embedded", "quarto"], default="auto")
    parser.add_argument("--jobs", type=int, default=2, help="同时执行几章 / chapters at a time")
    parser.add_argument("--port", type=int, default=8888)
    a = parser.parse_args(argv)
    try:
        if a.command == "check":
            problems = check(a.root.resolve())
            print("\n".join(problems) or "没有发现问题")
            return bool(problems)
        if a.command == "build":
            build(a.root, a.out, a.renderer, a.jobs)
        else:
            preview(a.root.resolve(), a.out, a.renderer, a.jobs, a.port)
    except (BookError, RenderError) as e:
        print(f"错误：\n{e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
