"""打包：wheel 里只有库，装进一个只有 torch、triton、numpy 的环境就能用。"""
import email
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = {"torch", "triton", "numpy"}


def run(*argv, cwd):
    "运行命令，失败时把它的话带进断言；返回标准输出。"
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)})
    assert done.returncode == 0, f"{argv} 退出码 {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "在只含打包所需文件的副本里造 wheel：证明别的文件都用不着，也不弄脏工作目录。"
    src = tmp_path_factory.mktemp("源 码")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, src)
    shutil.copytree(ROOT / "attn_book", src / "attn_book", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "-w", "dist", cwd=src)
    built, = (src / "dist").glob("*.whl")
    return built


def closure(names):
    "这些发行包连同它们运行时依赖的发行包。"
    found, todo = {}, list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found[name] = dist = metadata.distribution(name)
        needs = [Requirement(r) for r in dist.requires or []]
        todo += [r.name for r in needs if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """一个空的虚拟环境：看得见 torch、triton、numpy 和它们自己的依赖，看不见本仓库和开发工具。

    不下载：把当前环境里那几个包的顶层目录链接到一个文件夹，再用 .pth 让新环境看见这个文件夹。
    """
    home = tmp_path_factory.mktemp("空环境")
    venv.create(home / "venv", with_pip=False)
    visible = home / "runtime"
    visible.mkdir()
    for dist in closure(RUNTIME).values():
        for top in {f.parts[0] for f in dist.files} - {"..", "__pycache__"}:
            if not (visible / top).exists():
                (visible / top).symlink_to(Path(dist.locate_file(top)).resolve())
    site, = (home / "venv/lib").glob("python3*/site-packages")
    (site / "runtime.pth").write_text(f"{visible}\n")
    python = home / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    return python


def test_wheel_holds_only_the_library(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names} == {"attn_book", f"attn_book-{version()}.dist-info"}
    inside = {n.removeprefix("attn_book/") for n in names if n.startswith("attn_book/")}
    assert inside == {p.name for p in (ROOT / "attn_book").glob("*.py")}
    assert any(n.endswith("/licenses/LICENSE") for n in names)


def test_metadata_requires_only_the_runtime(wheel):
    archive = zipfile.ZipFile(wheel)
    name, = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    meta = email.message_from_bytes(archive.read(name))
    needs = [Requirement(r) for r in meta.get_all("Requires-Dist")]
    assert {r.name for r in needs if not r.marker} == RUNTIME
    assert all("extra" in str(r.marker) for r in needs if r.marker)
    assert meta["Name"] == "attn-book" and meta["Version"] == version()
    assert meta["License-Expression"] == "Apache-2.0"


def version():
    return re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)[1]


def test_one_version_everywhere():
    settings = (ROOT / "settings.ini").read_text("utf-8")
    assert re.search(r"^version *= *(.+)$", settings, re.M)[1] == version()
    assert f'__version__ = "{version()}"' in (ROOT / "attn_book/__init__.py").read_text("utf-8")
    asked = re.search(r"^requirements *= *(.+)$", settings, re.M)[1].split()
    listed = re.search(r"^dependencies = (\[.+\])", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)[1]
    assert asked == json.loads(listed)


def test_empty_environment_is_empty(python):
    code = "import importlib.util as u; print([n for n in ('matplotlib','nbdev','IPython','pytest','nbformat') if u.find_spec(n)])"
    assert run(python, "-c", code, cwd=python.parent) == "[]\n"


def test_import_and_call(python):
    code = """
import importlib, pkgutil, torch, attn_book
assert "site-packages" in attn_book.__file__, attn_book.__file__
for m in pkgutil.iter_modules(attn_book.__path__):
    if not m.name.startswith("_"): importlib.import_module("attn_book." + m.name)      # 下划线开头的：命令行入口，或者要附加包
from attn_book.projection import project
from attn_book.standard import standard_attention
from attn_book import oracle
torch.manual_seed(0)
x, w = torch.randn(2, 33, 24), torch.randn(24, 40, requires_grad=True)
y = project(x, w)
oracle.assert_within(y.detach(), x.double() @ w.detach().double(), oracle.matmul_bound(x, w.detach(), torch.float32), "y")
y.sum().backward()
assert w.grad.shape == w.shape
q, k, v = (torch.randn(1, h, 37, 16) for h in (4, 2, 2))
o = standard_attention(q, k, v, causal=True)
oracle.assert_within(o, oracle.attention(q, k, v, causal=True)[0], oracle.attention_bound(q, k, v, causal=True, materialised=True)[0], "o")
from attn_book import attention, attention_paged, attention_varlen, merge_partials, scaled_dot_product_attention
o = attention(q, k, v, causal=True)
oracle.assert_within(o, oracle.attention(q, k, v, causal=True)[0], oracle.attention_bound(q, k, v, causal=True, steps=2)[0], "o")
"""
    run(python, "-c", code, cwd=python.parent)


def test_commands(python):
    d = json.loads(run(python.parent / "attn-book", "doctor", "--json", cwd=python.parent))
    assert d["versions"]["attn_book"] == version() and {"projection", "standard"} <= {m["module"] for m in d["modules"]}
    assert run(python, "-m", "attn_book", "--version", cwd=python.parent) == f"attn-book {version()}\n"


def test_compile_from_the_wheel(python):
    "提前编译也不靠仓库：每个登记的内核取一个就够，全部内核由各章的测试编译。"
    name = run(python, "-c", "from attn_book import aot; print(sorted(aot.kernels())[0])", cwd=python.parent).strip()
    d = json.loads(run(python, "-m", "attn_book", "compile", name, "--arch", "sm_80", "--json", cwd=python.parent))
    assert d["kernel"] == name and d["registers"] > 0
