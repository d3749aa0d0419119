"""官方的 FlashAttention-4 前向与本书的并排：同样编译，按分区数一圈的指令，写 results/fa4-instructions.json。

Compile the official flash-attn-4 forward and ours for sm_100a and count instructions of one turn of each partition's loop.

    python tools/fa4_instructions.py              两边都做；要装的包见 tools/compile_times.py
    python tools/fa4_instructions.py --ours       只重做本书的一半，官方的一半照抄原来的文件

官方的包（BSD 许可证）只编译，不收进本仓库。不要 GPU。
"""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

from attn_book import aot, flash2

OUT = Path(__file__).resolve().parent.parent / "results" / "fa4-instructions.json"
PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")
PARTITIONS = {"multiply": {"UTCHMMA"}, "softmax": {"MUFU"}, "correct": {"LDTM", "STTM"}, "load": {"UTMALDG"}}
CASES = [dict(d=d, causal=causal) for d in (64, 128) for causal in (False, True)]


def turns(sass: str) -> dict[str, dict]:
    """各分区的循环走一圈：指令数，按操作码。One turn of every partition's main loop: total and by opcode."""
    found = {}
    for name, wanted in PARTITIONS.items():
        ops = Counter(flash2._opcode(text) for text in flash2.main_loop(sass, wanted))
        found[name] = dict(total=sum(ops.values()), ops=dict(sorted(ops.items())))
    return found


def official(d: int, causal: bool) -> dict:
    """在新进程里编译官方的内核，取 cubin。Compile the official kernel in a fresh process."""
    code = f"""
import glob, os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
import cutlass.utils.hardware_info as info
info.HardwareInfo.__init__ = lambda self, device_id=0: None
info.HardwareInfo.get_device_multiprocessor_count = lambda self: 148
info.HardwareInfo.get_max_active_clusters = lambda self, n, *a, **k: 148 // n
from flash_attn.cute.interface import _flash_attn_fwd
with FakeTensorMode():
    q = torch.empty(1, 1024, 4, {d}, dtype=torch.bfloat16, device="cuda")
    _flash_attn_fwd(q, q, q, causal={causal}, return_lse=True)
"""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | dict(CUTE_DSL_CACHE_DIR=f"{folder}/cache", CUTE_DSL_DUMP_DIR=folder, CUTE_DSL_KEEP_CUBIN="1",
                                CUTE_DSL_ARCH="sm_100a", FLASH_ATTENTION_ARCH="sm_100", FLASH_ATTENTION_NUM_SMS="148", HOME=folder)
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"错误：官方的内核编译失败\n{done.stderr[-3000:]}")
        cubin = max(Path(folder).glob("*.cubin"), key=lambda p: p.stat().st_size).read_bytes()
    used, sass = aot._inspect(cubin)
    ops = aot._opcodes(sass)
    return dict(registers=used["registers"], spills=ops["LDL"] + ops["STL"], total=sum(ops.values()), turns=turns(sass))


def ours(d: int, causal: bool) -> dict:
    """本书的内核。Our kernel, as registered."""
    from attn_book import flash4
    import torch
    r = flash4.flash4_report("sm_100a", dict(D=d, CAUSAL=causal), dtype=torch.bfloat16)
    return dict(registers=r.registers, spills=r.spills, total=sum(r.instructions.values()), turns=turns(r.sass))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", action="store_true", help="只重做本书的一半")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    now = datetime.now(timezone.utc).date().isoformat()
    if args.ours:
        old = json.loads(args.out.read_text("utf-8"))
        about, theirs = old["official"], [row["official"] for row in old["rows"]]
    else:
        try:
            about = {"date": now, **{p: importlib.metadata.version(p) for p in PACKAGES}}
        except importlib.metadata.PackageNotFoundError as error:
            raise SystemExit(f"错误：没有安装 {error.name}\n\n{__doc__}") from None
        theirs = [official(**case) for case in CASES]
    rows = []
    for case, row in zip(CASES, theirs, strict=True):
        rows.append(case | {"official": row, "ours": ours(**case)})
        print(case, *({n: t["total"] for n, t in rows[-1][who]["turns"].items()} for who in ("official", "ours")), flush=True)
    record = {"kind": "fa4-instructions", "date": now, "triton": importlib.metadata.version("triton"), "official": about, "rows": rows}
    args.out.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
