"""与 Triton 教程的注意力内核并排：同样编译，数主循环的指令，写 results/tutorial-instructions.json。

Compile the forward kernel of Triton's tutorial and ours for several targets and count the instructions of the main loop.

    python tools/tutorial_table.py                          只重做本书的一半，教程的一半照抄原来的文件
    python tools/tutorial_table.py 06-fused-attention.py --commit SHA
                                                            两半都做；SHA 是教程文件在 triton-lang/triton 的提交

教程（MIT 许可证）不收进本仓库：从 https://github.com/triton-lang/triton 的 python/tutorials/06-fused-attention.py 取得。
只取其中的内核函数，不执行文件的其余部分，所以不要 GPU。要认得的是带块指针的 `_attn_fwd(Q, K, V, …, STAGE)`。
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import triton

from attn_book import aot, flash2

OUT = Path(__file__).resolve().parent.parent / "results" / "tutorial-instructions.json"
SOURCE = {"repo": "triton-lang/triton", "path": "python/tutorials/06-fused-attention.py", "kernel": "_attn_fwd", "licence": "MIT"}
TARGETS = ("sm_80", "sm_90", "sm_100")
CONFIGS = {64: dict(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3), 128: dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)}
PARAMETERS = dict.fromkeys(("Q", "K", "V", "Out"), "*fp16") | {"M": "*fp32", "sm_scale": "fp32"} | dict.fromkeys(
    ("stride_qk", "stride_kk", "stride_vn", "stride_on"), 1)      # 其余是 i32


def extract(text: str, entry: str) -> str:
    """入口内核与它调用的内核，去掉 triton.jit 以外的装饰器。The entry kernel and those it calls, as source."""
    found = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    if entry not in found:
        raise SystemExit(f"错误：文件里没有函数 {entry}")
    wanted, todo = set(), [entry]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += [n.id for n in ast.walk(found[name]) if isinstance(n, ast.Name) and n.id in found]
    for name in wanted:
        found[name].decorator_list = [d for d in found[name].decorator_list if ast.unparse(d) == "triton.jit"]
    return "\n\n\n".join(ast.unparse(node) for name, node in found.items() if name in wanted) + "\n"


def tutorial_kernel(source: str, folder: str):
    """把源码写成模块再导入：Triton 要从文件里读函数的源码。Import the kernel from a scratch module."""
    path = Path(folder) / "tutorial_kernel.py"
    path.write_text("import triton\nimport triton.language as tl\n\n\n" + source, "utf-8")
    spec = importlib.util.spec_from_file_location("tutorial_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, SOURCE["kernel"])
    runtime = {p.name for p in kernel.params if not p.is_constexpr}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    if not {"Q", "K", "V", "Out", "M", "sm_scale"} <= runtime or fixed != {"HEAD_DIM", "BLOCK_M", "BLOCK_N", "STAGE"}:
        raise SystemExit(f"错误：不认得这一版的 {SOURCE['kernel']}，参数是 {kernel.arg_names}")
    return kernel


def compile_tutorial(kernel, target: str, d: int, config: dict[str, int]) -> aot.Report:
    """因果、fp16、输入连续。STAGE 3 is causal."""
    options = {n: config[n] for n in ("num_warps", "num_stages")}
    signature = {p.name: PARAMETERS.get(p.name, "i32") for p in kernel.params if not p.is_constexpr}
    constexprs = dict(HEAD_DIM=d, STAGE=3, BLOCK_M=config["BLOCK_M"], BLOCK_N=config["BLOCK_N"])
    return aot.report(kernel, target, signature=signature, constexprs=constexprs, **options)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tutorial", nargs="?", type=Path, help="教程文件；不给就只重做本书的一半")
    parser.add_argument("--commit", help="教程文件的提交")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    if (args.tutorial is None) != (args.commit is None):
        parser.error("教程文件与 --commit 要一起给")
    now = datetime.now(timezone.utc).date().isoformat()
    rows = [dict(target=target, d=d, config=config) for target in TARGETS for d, config in CONFIGS.items()]
    if args.tutorial:
        source = extract(args.tutorial.read_text("utf-8"), SOURCE["kernel"])
        about = SOURCE | {"commit": args.commit, "sha256": hashlib.sha256(source.encode()).hexdigest(), "triton": triton.__version__, "date": now}
        with tempfile.TemporaryDirectory() as folder:
            kernel = tutorial_kernel(source, folder)
            for row in rows:
                row["tutorial"] = flash2.loop_report(compile_tutorial(kernel, row["target"], row["d"], row["config"]))
    else:
        old = json.loads(args.out.read_text("utf-8"))
        about = old["tutorial"]
        if about["triton"] != triton.__version__:
            raise SystemExit(f"错误：教程的一半由 triton {about['triton']} 编译，这里是 {triton.__version__}：请连教程一起重做")
        for row, before in zip(rows, old["rows"], strict=True):
            if any(row[n] != before[n] for n in row):
                raise SystemExit("错误：块大小变了：请连教程一起重做")
            row["tutorial"] = before["tutorial"]
    for row in rows:
        row["ours"] = flash2.loop_report(flash2.aot_report("forward", row["target"], d=row["d"], config=row["config"]))
        print(row["target"], row["d"], "教程", row["tutorial"]["total"], "本书", row["ours"]["total"])
    record = {"kind": "tutorial-instructions", "triton": triton.__version__, "date": now, "tutorial": about, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
