"""小的 PTX 执行器：在 CPU 上逐条执行一个内核的 PTX，只认得 mma.sync 一代的几十种指令，遇到别的就报错。

Execute the PTX of one kernel on NumPy: warps of 32 lanes in lockstep, reconverging at the smallest program counter;
warps take turns at random and wait for each other at barriers. cp.async lands at the wait, not before; shared memory
starts as NaN. Covers what a kernel with mma.sync, ldmatrix and cp.async uses and raises NotImplementedError elsewhere.

    memory = Memory(); a = memory.put(array)                     # 地址
    run(ptx, grid=(4, 1, 1), threads=128, params=[bytes, ...], memory=memory)
"""
from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import numpy as np

U32, U64, I32, I64, F32 = np.uint32, np.uint64, np.int32, np.int64, np.float32
EXITED = 1 << 40
Instruction = tuple["tuple[bool, str] | None", str, list[str]]          # (谓词, 操作码, 操作数)


class Memory:
    """显存：一段字节，put 放进去，get 取出来。Global memory; addresses start at 4096, allocations are apart."""

    def __init__(self, size: int = 1 << 24) -> None:
        self.bytes, self.used = np.zeros(size, np.uint8), {}

    def put(self, x: np.ndarray) -> int:
        raw = np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)
        at = 4096 + max((-(-end // 4096) * 4096 for end in self.used.values()), default=0)
        self.bytes[at:at + raw.size], self.used[at] = raw, at + raw.size
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(self.bytes[at:at + like.nbytes].tobytes(), like.dtype).reshape(like.shape)

    def slice(self, at: int, size: int) -> slice:
        if not any(start <= at and at + size <= end for start, end in self.used.items()):
            raise IndexError(f"global access out of bounds: address {at}, {size} bytes")
        return slice(at, at + size)


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """PTX → (指令, 标号)。Instructions of the first entry, and where labels point."""
    body = re.sub(r"//.*", "", ptx[ptx.index(".entry"):])
    body = re.sub(r"(\$\w+:)", r"\1;", body[body.index("{") + 1:body.rindex("}")])
    code, labels = [], {}
    for text in (" ".join(x.split()) for x in body.split(";")):
        if text.endswith(":"):
            labels[text[:-1]] = len(code)
        elif text and not text.startswith("."):
            guard = re.match(r"@(!?)(%\w+) ", text)
            op, _, rest = (text[guard.end():] if guard else text).partition(" ")
            code.append(((bool(guard[1]), guard[2]) if guard else None, op, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)))
    return code, labels


def _round(x: np.ndarray, kind: str) -> np.ndarray:
    "fp32 → 16 位的位。Bits of bf16 or f16, round to nearest even."
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16).astype(U32)
    u = x.view(U32)
    return np.where(np.isnan(x), U32(0x7FC0), (u + U32(0x7FFF) + (u >> U32(16) & U32(1))) >> U32(16))


def _pair(v: np.ndarray, kind: str) -> np.ndarray:
    "一个寄存器里的两个 16 位浮点。The two floats of a register, (32, 2)."
    halves = np.stack([v & U32(0xFFFF), v >> U32(16)], -1)
    return (halves << U32(16)).view(F32) if kind == "bf16" else halves.astype(np.uint16).view(np.float16).astype(F32)


def _names(operand: str) -> list[str]:
    return re.findall(r"[^{}|,\s]+", operand)


_FLOAT: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax, "max.NaN": np.maximum, "ex2": np.exp2,
    "lg2": np.log2, "rcp": lambda x: 1 / x, "neg": np.negative, "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(F32)}
_INT: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda x, y, z: x * y + z, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": lambda x, n: x << n.astype(x.dtype), "min": np.minimum,
    "max": np.maximum, "shr": lambda x, n: x >> n.astype(x.dtype), "neg": lambda x: 0 - x,
    "div": lambda x, y: (np.sign(x) * np.sign(y) * (abs(x) // abs(y))).astype(x.dtype) if x.dtype.kind == "i" else x // y}
_COMPARE: dict[str, Callable] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                                 "ge": np.greater_equal, "nan": lambda x, y: np.isnan(x) | np.isnan(y)}


class Warp:
    """32 个通道：寄存器、程序计数器、在途的 cp.async。One warp."""

    def __init__(self, program, block: Sequence[int], index: int, shared: np.ndarray, params, memory: Memory) -> None:
        (self.code, self.labels), self.shared, self.params, self.memory = program, shared, params, memory
        self.pc, self.groups, self.waiting = np.zeros(32, np.int64), [[]], False
        self.r = {"%tid.x": np.arange(32, dtype=U32) + U32(32 * index)}
        self.r |= {f"%ctaid.{d}": np.full(32, x, U32) for d, x in zip("xyz", block)}

    def value(self, name: str, kind: str) -> np.ndarray:
        "操作数的值，按类型解释。"
        if name in self.r:
            x = self.r[name]
        elif name.startswith("0f"):
            x = np.full(32, int(name[2:], 16), U32)
        else:                                                            # 立即数；共享内存从 0 开始
            wide = kind.endswith("64") or kind == "f32x2"
            x = np.full(32, (int(name, 0) if name[0] in "-0123456789" else 0) % 2 ** (64 if wide else 32), U64 if wide else U32)
        if kind == "f32x2":
            return x.view(F32).reshape(32, 2)
        return x.view({"f32": F32, "s32": I32, "s64": I64}.get(kind, x.dtype)) if x.dtype != bool else x

    def put(self, name: str, x: np.ndarray, on: np.ndarray) -> None:
        if name == "_":
            return
        if x.dtype != bool:
            x = np.ascontiguousarray(x).view(U64 if x.dtype.itemsize == 8 or x.ndim == 2 else U32).reshape(32)
        self.r[name] = np.where(on, x, self.r.get(name, x))

    def address(self, operand: str) -> np.ndarray:
        name, offset = re.match(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand).groups()
        return self.value(name, "b64" if self.r.get(name, np.zeros(1, U32)).dtype == U64 else "b32").astype(I64) + int(offset or 0)

    def run(self) -> bool:
        "走到下一个屏障或结束；结束返回 True。"
        while self.pc.min() < EXITED:
            at = self.pc.min()
            here = self.pc == at
            guard, op, a = self.code[at]
            on = here & (self.r[guard[1]] ^ guard[0]) if guard else here
            self.pc = np.where(here, at + 1, self.pc)
            if op.startswith("bra"):
                self.pc = np.where(on, self.labels[a[0]], self.pc)
            elif op == "ret":
                self.pc = np.where(on, EXITED, self.pc)
            elif op.startswith("bar.sync"):
                if not on.all():
                    raise RuntimeError("bar.sync in divergent code")
                return False
            else:
                self.step(op, op.split("."), a, on)
        return True

    def step(self, op: str, part: list[str], a: list[str], on: np.ndarray) -> None:
        kind, base = part[-1], part[0]
        values = lambda of=kind: [self.value(x, of) for x in a[1:]]
        if op.startswith("ld.param"):
            number, offset = re.search(r"_param_(\d+)(?:\+(\d+))?\]", a[1]).groups()
            size = int(kind[1:]) // 8
            for n, name in enumerate(_names(a[0])):
                raw = self.params[int(number)][int(offset or 0) + n * size:][:size]
                self.put(name, np.full(32, int.from_bytes(raw, "little"), U64 if size == 8 else U32), on)
        elif base == "mov" and a[0].startswith("{"):
            for name, shift in zip(_names(a[0]), (0, 32)):
                self.put(name, (self.value(a[1], "b64") >> U64(shift)).astype(U32), on)
        elif base == "mov" and a[1].startswith("{"):
            low, high = (self.value(x, "b32").astype(U64) for x in _names(a[1]))
            self.put(a[0], low | high << U64(32), on)
        elif base == "mov":
            self.put(a[0], *values(), on)
        elif base == "setp":
            self.put(a[0], _COMPARE[part[1]](*values()), on)
        elif kind == "pred":
            self.put(a[0], _INT[base](*values()), on)
        elif base == "selp":
            self.put(a[0], np.where(self.r[a[3]], self.value(a[1], kind), self.value(a[2], kind)), on)
        elif base == "cvt" and part[-2] in ("bf16x2", "f16x2"):
            high, low = (_round(np.ascontiguousarray(x), part[-2][:-2]) for x in values())
            self.put(a[0], low | high << U32(16), on)
        elif base == "cvt":
            self.put(a[0], values()[0].astype({"f32": F32, "u64": U64, "s64": I64, "u32": U32, "s32": I32}[part[-2]]), on)
        elif kind in ("f32", "f32x2") and base in _FLOAT:
            x, f = values(), _FLOAT["max.NaN" if "NaN" in part else base]
            self.put(a[0], f(f(*x[:2]), x[2]) if base in ("max", "min") and len(x) == 3 else f(*x), on)
        elif part[1:2] == ["wide"]:
            x, y = (self.value(n, kind).astype(I64 if kind[0] == "s" else U64) for n in a[1:3])
            self.put(a[0], x * y, on)
        elif base in _INT and kind[1:] in ("32", "64"):
            self.put(a[0], _INT[base](*values()), on)
        elif base == "shfl":
            source = self.value(a[2], "b32").astype(I64)
            self.put(_names(a[0])[0], self.value(a[1], "b32")[np.arange(32) ^ source if "bfly" in part else source], on)
        elif base == "ldmatrix":
            at = self.address(a[1])
            for n, name in enumerate(_names(a[0])):
                tile = np.stack([self.shared[x:x + 16].view(np.uint16) for x in at[8 * n:8 * n + 8]])
                self.put(name, np.ascontiguousarray(tile.T if "trans" in part else tile).view(U32).reshape(32), on)
        elif op.startswith("mma.sync.aligned.m16n8k16.row.col.f32"):
            self.mma(part[-2], *map(_names, a), on)
        elif op.startswith("cp.async.commit_group"):
            self.groups.append([])
        elif op.startswith("cp.async.wait_group"):
            done = len(self.groups) - 1 - int(a[0])
            for to, source in (pair for group in self.groups[:max(done, 0)] for pair in group):
                self.shared[to:to + 16] = self.memory.bytes[self.memory.slice(source, 16)]
            self.groups = self.groups[max(done, 0):]
        elif op.startswith("cp.async.c") and a[2:] == ["16", "16"]:
            self.groups[-1] += zip(self.address(a[0])[on], self.address(a[1])[on])
        elif op in ("st.global.b32", "st.global.f32"):
            for at, x in zip(self.address(a[0])[on], self.value(a[1], "b32")[on]):
                self.memory.bytes[self.memory.slice(at, 4)] = np.frombuffer(x.tobytes(), np.uint8)
        else:
            raise NotImplementedError(f"PTX instruction {op} {', '.join(a)}")

    def mma(self, kind: str, d: list[str], a: list[str], b: list[str], c: list[str], on: np.ndarray) -> None:
        "m16n8k16：寄存器的布局见 PTX 手册。"
        if not on.all():
            raise RuntimeError("mma in divergent code")
        g, t = np.arange(32) // 4, np.arange(32) % 4
        A, B, C = np.zeros((16, 16), F32), np.zeros((16, 8), F32), np.zeros((16, 8), F32)
        for n, name in enumerate(a):
            A[g + 8 * (n % 2), 2 * t + 8 * (n // 2)], A[g + 8 * (n % 2), 2 * t + 8 * (n // 2) + 1] = _pair(self.r[name], kind).T
        for n, name in enumerate(b):
            B[2 * t + 8 * n, g], B[2 * t + 8 * n + 1, g] = _pair(self.r[name], kind).T
        for n, name in enumerate(c):
            C[g + 8 * (n // 2), 2 * t + n % 2] = self.value(name, "f32")
        D = (A.astype(np.float64) @ B + C).astype(F32)
        for n, name in enumerate(d):
            self.put(name, D[g + 8 * (n // 2), 2 * t + n % 2], on)


def run(ptx: str, grid: Sequence[int], threads: int, params: Sequence[bytes], memory: Memory, seed: int = 0,
        shared: int = 100 * 1024) -> None:
    """执行整个网格；params 是各参数的字节。Run every block; raises what the kernel does wrong."""
    program, rng = parse(ptx), random.Random(seed)
    with np.errstate(all="ignore"):
        for block in np.ndindex(*grid[::-1]):
            space = np.full(shared, 0xFF, np.uint8)                      # NaN
            warps = [Warp(program, block[::-1], n, space, params, memory) for n in range(threads // 32)]
            while warps:
                rng.shuffle(warps)
                ended = [w.run() for w in warps]                         # 各走到下一个屏障
                if any(ended) and not all(ended):
                    raise RuntimeError("some warps left while others wait at a barrier")
                warps = [] if all(ended) else warps
