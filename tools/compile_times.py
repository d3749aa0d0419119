"""量各种写法的编译时间，写 results/compile-times.json：每个内核一个新进程，不用缓存，从源码到机器码。

Measure cold compile times of attention forward kernels in several front ends, and check the CuTe-DSL kernel's PTX.

    python tools/compile_times.py [--repeats 3]

要装附加包 cute，还要 flash-attn-4、quack-kernels、einops（官方的内核，只在这里用）：
    pip install 'attn-book[cute]' && pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 einops
不要 GPU。时间有墙钟与 CPU 两种；别的进程在忙时，看 CPU 时间。
"""
from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "results" / "compile-times.json"
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "quack-kernels")
KERNELS = {                                            # 键：(写法, 内核, 目标)
    "cuda": ("CUDA C++，NVRTC", "第 4 章，mma.sync", "sm_100a"),
    "cute": ("CuTe-DSL", "本节，mma.sync", "sm_100a"),
    "triton": ("Triton", "第 4 章，flash2", "sm_100"),
    "gluon_fa3": ("Gluon", "第 5 章，flash3", "sm_90a"),
    "gluon_fa4": ("Gluon", "本章，flash4", "sm_100a"),
    "fa4_fwd": ("CuTe-DSL，官方", "FlashAttention-4 前向", "sm_100a"),
    "fa4_bwd": ("CuTe-DSL，官方", "FlashAttention-4 反向", "sm_100a"),
}


def clock() -> tuple[float, float]:
    """(墙钟, CPU)，CPU 含已结束的子进程。Wall and CPU seconds, children included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in used)


class Stopwatch:
    """包住一个函数，记下它用的时间。Wrap a callable and add up what it takes."""

    def __init__(self, call) -> None:
        self.call, self.spent = call, [0.0, 0.0]

    def __call__(self, *args, **kwargs):
        start = clock()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.spent[:] = [s + b - a for s, a, b in zip(self.spent, start, clock())]


def triton_report(make) -> tuple[list[float], object]:
    """只算 triton.compile，不算反汇编。Time triton.compile inside make()."""
    import triton
    triton.compile = watch = Stopwatch(triton.compile)
    report = make()
    return watch.spent, report


def official(backward: bool) -> tuple[list[float], object]:
    """官方的内核：FakeTensor 代替张量，不要驱动。The flash-attn-4 package on fake tensors."""
    import glob
    import warnings
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    import cutlass.utils.hardware_info as info
    info.HardwareInfo.__init__ = lambda self, device_id=0: None
    info.HardwareInfo.get_device_multiprocessor_count = lambda self: 148
    info.HardwareInfo.get_max_active_clusters = lambda self, n, *a, **k: 148 // n
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    folder = os.environ["CUTE_DSL_DUMP_DIR"]
    warnings.simplefilter("ignore")
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 1024, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        forward, back = Stopwatch(_flash_attn_fwd), Stopwatch(_flash_attn_bwd)
        o, lse = forward(q, k, v, causal=True, return_lse=True)[:2]
        before = set(glob.glob(f"{folder}/*.cubin"))
        if backward:
            back(q, k, v, o, torch.empty_like(o), lse, causal=True)
    made = set(glob.glob(f"{folder}/*.cubin"))
    cubin = max(made - before if backward else made, key=os.path.getsize)      # 反向有几个内核，取主要的
    return (back if backward else forward).spent, Path(cubin).read_bytes()


def compile_one(key: str) -> dict:
    """在本进程里编译一个内核。Compile one kernel here: import, wall and CPU seconds, and what came out."""
    start = time.perf_counter()
    import torch
    from attn_book import aot
    if key == "cuda":
        from attn_book import cuda, flash2
        macros = flash2.flash2_cuda_macros(128, torch.bfloat16)
        cuda._compile = watch = Stopwatch(cuda._compile)
        make = lambda: (watch.spent, cuda.nvrtc_report(flash2.FLASH2_CUDA, "flash2", "sm_100a", defines=macros,
                                                       shared=flash2.flash2_cuda_shared(macros)))
        cuda._nvrtc()
    elif key == "cute":
        from attn_book import _flash4_cute

        def make():
            watch = Stopwatch(_flash4_cute.build)
            made = watch("bfloat16", 128, True)
            return watch.spent, made.__cubin__
    elif key == "triton":
        from attn_book import flash2
        make = lambda: triton_report(lambda: flash2.aot_report("forward", "sm_100", d=128, dtype="bf16"))
    elif key == "gluon_fa3":
        from attn_book import flash3
        make = lambda: triton_report(lambda: flash3.flash3_report("sm_90a", dtype=torch.bfloat16))
    elif key == "gluon_fa4":
        from attn_book import flash4
        make = lambda: triton_report(lambda: flash4.flash4_report("sm_100a", dtype=torch.bfloat16))
    else:
        import cutlass                                                          # noqa: F401
        import flash_attn.cute.interface                                        # noqa: F401
        make = functools.partial(official, key == "fa4_bwd")
    imported = time.perf_counter() - start
    spent, made = make()
    if isinstance(made, bytes):
        used, sass = aot._inspect(made)
        ops = aot._opcodes(sass)
        registers, spills, shared = used["registers"], ops["LDL"] + ops["STL"], None
        if key == "cute":
            shared = 3 * _flash4_cute.BLOCK_M * 128 * 2
    else:
        ops, registers, spills, shared = made.instructions, made.registers, made.spills, made.shared
    return dict(import_s=imported, wall_s=spent[0], cpu_s=spent[1], registers=registers, spills=spills, shared=shared,
                instructions=sum(ops.values()), ops=dict(sorted(ops.items())))


def measure(key: str) -> dict:
    """新进程、空缓存。One measurement in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | dict(
            HOME=folder, TRITON_CACHE_DIR=f"{folder}/triton", CUTE_DSL_CACHE_DIR=f"{folder}/cute", CUTE_DSL_DUMP_DIR=folder,
            CUTE_DSL_KEEP_PTX="1", CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_ARCH="sm_100a", FLASH_ATTENTION_ARCH="sm_100",
            FLASH_ATTENTION_NUM_SMS="148", OMP_NUM_THREADS="1")
        done = subprocess.run([sys.executable, __file__, "--one", key], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"错误：{key} 编译失败\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_cute(dtype, causal: bool, shape: tuple[int, ...], spread: float) -> dict:
    """CuTe-DSL 版的 PTX 在 CPU 上执行，误差占界的比。Run the compiled PTX on the CPU against the oracle."""
    import torch
    from attn_book import flash2, flash4, oracle
    import run_ptx
    B, H, H_kv, Lq, Lk, D = shape
    torch.manual_seed(0)
    q, k, v = ((spread * torch.randn(B, n, h, D)).to(dtype).transpose(1, 2) for h, n in ((H, Lq), (H_kv, Lk), (H_kv, Lk)))
    o, lse = torch.full((B, Lq, H, D), torch.nan, dtype=dtype).transpose(1, 2), torch.full((B, H, Lq), torch.nan)
    memory = run_ptx.Memory()
    raw = [x.transpose(1, 2).view(torch.int16).numpy() for x in (q, k, v, o)] + [lse.numpy()]
    at = [memory.put(x) for x in raw]
    params = [struct.pack("<Qiiixxxx" + "q" * (x.dim() - 1), a, *x.shape[:3], *x.stride()[:-1])
              for x, a in zip((q, k, v, o, lse), at)] + [struct.pack("<f", D ** -0.5 * math.log2(math.e))]
    ptx = flash4.flash4_cute_report(D=D, dtype=dtype, causal=causal).ptx
    run_ptx.run(ptx, (Lq // flash4.CUTE_BLOCK, H, B), 128, params, memory)
    got = [torch.from_numpy(memory.get(a, x).copy()) for a, x in zip(at[3:], raw[3:])]
    got[0] = got[0].view(dtype).transpose(1, 2)
    exact, bound = (f(q, k, v, causal=causal) for f in (oracle.attention, flash2.flash2_cuda_bound))
    ratios = dict(zip(("o", "lse"), (float(oracle.ratio(*x)) for x in zip(got, exact, bound))))
    return dict(dtype=str(dtype)[6:], causal=causal, shape=shape, spread=spread, **ratios)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(compile_one(args.one)))
        return 0
    import torch
    from cuda.bindings import nvrtc
    load = os.getloadavg()[0]
    try:
        versions = {p: importlib.metadata.version(p) for p in PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"错误：没有安装 {error.name}\n\n{__doc__}") from None
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    rows = []
    for key, (language, kernel, target) in KERNELS.items():
        runs = [measure(key) for _ in range(args.repeats)]
        row = dict(key=key, language=language, kernel=kernel, target=target, **runs[0])
        row |= {n: [round(r[n], 3) for r in runs] for n in ("import_s", "wall_s", "cpu_s")}
        rows.append(row)
        print(key, row["wall_s"], row["cpu_s"], row["registers"], row["spills"], flush=True)
    checks = [check_cute(*case) for case in (
        (torch.float16, False, (1, 2, 1, 128, 192, 64), 1.0), (torch.bfloat16, True, (1, 2, 1, 128, 192, 128), 1.0),
        (torch.bfloat16, True, (2, 1, 1, 128, 64, 64), 3.0), (torch.float16, False, (1, 1, 1, 64, 128, 128), 3.0))]
    record = {"kind": "compile-times", "date": datetime.now(timezone.utc).date().isoformat(), "repeats": args.repeats,
              "machine": {"cpu": cpu[1].strip() if cpu else platform.processor(), "cores": os.cpu_count(), "load": round(load, 2)},
              "versions": {"python": platform.python_version(), "nvrtc": ".".join(map(str, nvrtc.nvrtcVersion()[1:])), **versions},
              "rows": rows, "checks": checks}
    args.out.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
