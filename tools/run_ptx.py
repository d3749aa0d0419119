"""小的 PTX 执行器：在 CPU 上逐条执行一个内核的 PTX，只认得 mma.sync 一代的几十种指令，遇到别的就报错。

Execute the PTX of one kernel on NumPy: warps of 32 lanes in lockstep, reconverging at the smallest program counter;
warps take turns at random and wait for each other at barriers. cp.async lands at the wait, not before; shared memory
starts as NaN. Knows what Triton (sm_80) and CuTe-DSL make of an attention kernel with mma.sync, ldmatrix and cp.async;
any other instruction, qualifier or operand raises NotImplementedError.

    memory = Memory(); a = memory.put(array)                     # 地址
    run(ptx, grid=(4, 1, 1), threads=128, params=[bytes, ...], memory=memory)
"""
from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence

import numpy as np

U16, U32, U64, I64, F32 = np.uint16, np.uint32, np.uint64, np.int64, np.float32
EXITED = 1 << 40
Instruction = tuple["tuple[bool, str] | None", str, list[str]]          # (谓词, 操作码, 操作数)


class Memory:
    """显存：一段字节，put 放进去，get 取出来。Global memory; addresses start at 4096, allocations are apart."""

    def __init__(self, size: int = 1 << 24, name: str = "global") -> None:
        self.bytes, self.used, self.name = np.zeros(size, np.uint8), {}, name

    def put(self, x: np.ndarray) -> int:
        raw = np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)
        at = 4096 + max((-(-end // 4096) * 4096 for end in self.used.values()), default=0)
        self.bytes[at:at + raw.size], self.used[at] = raw, at + raw.size
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(self.bytes[at:at + like.nbytes].tobytes(), like.dtype).reshape(like.shape)

    def index(self, at: np.ndarray, size: int, align: int) -> np.ndarray:
        "从各地址起的 size 个字节的下标。Indices (lanes, size); raises out of bounds or off alignment."
        inside = np.zeros(at.shape, bool)
        for start, end in self.used.items():
            inside |= (start <= at) & (at + size <= end)
        for ok, what in ((inside, "out of bounds"), (at % align == 0, "misaligned")):
            if not ok.all():
                raise IndexError(f"{self.name} access {what}: address {at[~ok][0]}, {size} bytes")
        return at[:, None] + np.arange(size)


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """PTX → (指令, 标号)。Instructions of the first entry, and where labels point."""
    body = re.sub(r"//.*|^\s*\.loc.*$", "", ptx[ptx.index(".entry"):], flags=re.M)
    body, depth = body[body.index("{"):], 0
    end = next(x.end() for x in re.finditer("[{}]", body) if (depth := depth + (x[0] == "{") - (x[0] == "}")) == 0)
    body, code, labels = re.sub(r"(\$\w+:)", r"\1;", body[1:end - 1]), [], {}
    for text in (" ".join(x.split()) for x in body.split(";")):
        if text.endswith(":"):
            labels[text[:-1]] = len(code)
        elif text and not text.startswith("."):
            guard = re.match(r"@(!?)(%\w+) ", text)
            op, _, rest = (text[guard.end():] if guard else text).partition(" ")
            code.append(((bool(guard[1]), guard[2]) if guard else None, op, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)))
    operands = " ".join(x for _, op, a in code if not op.startswith("ld.param") for x in a)
    symbols = set(re.findall(r"(?<![%$\w])[A-Za-z_]\w+", operands))
    if len(symbols) > 1:                                                 # 只有一个，从 0 开始
        raise NotImplementedError(f"several variables: {sorted(symbols)}")
    return code, labels


_KNOWN = re.compile(r"""
    mov\.(pred|f32|[bus](16|32|64)) | selp\.(f32|[bus](16|32|64)) | ld\.param(\.v[24])?\.(f32|[bus](8|16|32|64))
    | (ld|st)\.(global|shared)(\.v[24])?\.(f32|[bus](8|16|32|64)) | (and|or|xor|not)\.(pred|b(16|32|64))
    | setp\.((eq|ne|lt|le|gt|ge)\.[bus](16|32|64)|(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)\.f32)
    | cvt\.([us](16|32|64)\.[us](16|32|64)|rn\.f32\.[us]32|f32\.b?f16|rn\.b?f16(x2)?\.f32)
    | (add|sub|mul)(\.rn)?\.f32(x2)? | fma\.rn\.f32(x2)? | (add|sub|mul|fma\.rn|neg|abs|min|max)(\.ftz)?\.f32
    | (min|max)(\.ftz)?\.NaN\.f32 | div\.(full|approx|rn)(\.ftz)?\.f32 | rcp\.rn\.f32 | (ex2|lg2|rcp)\.approx(\.ftz)?\.f32
    | (add|sub|min|max)\.[us](16|32|64) | (mul|mad)\.(lo\.[us](16|32|64)|wide\.[us]32) | mul\.hi\.[us]32 | (div|rem)\.[us](32|64) | neg\.s(16|32|64)
    | (shl|shr)\.[bus](16|32|64) | bfe\.[us](32|64) | shfl\.sync\.(bfly|idx)\.b32 | redux\.sync\.(min|max)\.[us]32
    | ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16
    | mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16\.f16|bf16\.bf16)\.f32
    | cp\.async\.((ca|cg)\.shared\.global|commit_group|wait_group) | atom\.global\.gpu\.(acq_rel|relaxed)\.add\.f32 | bra(\.uni)? | ret | bar\.(warp\.)?sync""", re.X)
_TYPE = {f"{letter}{size}": np.dtype(f"{of}{size // 8}") for letter, of in zip("bus", "uui") for size in (8, 16, 32, 64)}
_TYPE |= {"pred": np.dtype(bool), "f32": np.dtype(F32), "f16": np.dtype(U16), "bf16": np.dtype(U16), "f32x2": np.dtype(U64)}


@functools.cache
def _parts(op: str) -> list[str]:
    if not _KNOWN.fullmatch(op):
        raise NotImplementedError(f"PTX instruction {op}")
    return op.split(".")


def _round(x: np.ndarray, kind: str) -> np.ndarray:
    "fp32 → 16 位的位。Bits of bf16 or f16, round to nearest even."
    if kind == "f16":
        return x.astype(np.float16).view(U16)
    u = x.view(U32)
    return np.where(np.isnan(x), U32(0x7FC0), (u + U32(0x7FFF) + (u >> U32(16) & U32(1))) >> U32(16)).astype(U16)


def _float(bits: np.ndarray, kind: str) -> np.ndarray:
    "16 位的位 → fp32。Floats of bf16 or f16 bits."
    return (bits.astype(U32) << U32(16)).view(F32) if kind == "bf16" else bits.view(np.float16).astype(F32)


def _names(operand: str) -> list[str]:
    return re.findall(r"[^{}|,\s]+", operand)


def _flush(x: np.ndarray) -> np.ndarray:
    "ftz：次正规数当作 0。"
    return np.where(abs(x) < F32(2.0 ** -126), np.copysign(F32(0), x), x)


def _compare(how: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    "setp；浮点的 eq、ne……遇到 NaN 为假，equ、neu……为真。"
    unordered = (x != x) | (y != y)
    if how in ("nan", "num"):
        return unordered if how == "nan" else ~unordered
    f = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
         "ge": np.greater_equal}[how[:2]]
    return f(x, y) | unordered if how[2:] else f(x, y) & ~unordered


_FLOAT: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax, "ex2": np.exp2,
    "min.NaN": np.minimum, "max.NaN": np.maximum, "lg2": np.log2, "rcp": lambda x: 1 / x, "neg": np.negative, "abs": np.abs,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(F32)}
_INT: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda x, y, z: x * y + z, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "min": np.minimum, "max": np.maximum, "neg": lambda x: 0 - x,
    "div": lambda x, y: (np.sign(x) * np.sign(y) * (abs(x) // abs(y))).astype(x.dtype) if x.dtype.kind == "i" else x // y,
    "rem": np.fmod}
# mma：（寄存器, 通道, 半个）在哪一格
_G, _T, _N = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4 * 2 + np.arange(2), np.arange(4)[:, None, None]
_A, _B, _C = (_G + _N % 2 * 8, _T + _N // 2 * 8), (_T + 8 * _N[:2], _G), (_G + 8 * _N[:2], _T)

class Warp:
    """32 个通道：寄存器、程序计数器、在途的 cp.async。One warp."""

    def __init__(self, program, block: Sequence[int], index: int, shared: Memory, params, memory: Memory) -> None:
        (self.code, self.labels), self.params, self.spaces = program, params, {"shared": shared, "global": memory}
        self.pc, self.groups = np.zeros(32, np.int64), [[]]
        self.r = {"%tid.x": np.arange(32, dtype=U32) + U32(32 * index)}
        self.r |= {f"%ctaid.{d}": np.full(32, x, U32) for d, x in zip("xyz", block)}

    def value(self, name: str, kind: str, narrow: bool = False) -> np.ndarray:
        "操作数的值，按类型解释；寄存器的宽度要相同，narrow：也可以更宽，取低位。"
        dtype = _TYPE[kind]
        if name in self.r:
            x = self.r[name]
        elif name.startswith("0f"):
            x = np.full(32, int(name[2:], 16), U32)
        elif name[0] in "-0123456789" and kind == "pred":
            x = np.full(32, int(name, 0) != 0)
        elif name[0] != "%":                                             # 立即数；共享内存从 0 开始
            number = int(name, 0) if name[0] in "-0123456789" else 0
            x = np.full(32, number % 2 ** (8 * dtype.itemsize), f"u{dtype.itemsize}")
        else:
            raise NotImplementedError(f"{name} is not known, or read before it is written")
        if narrow and x.dtype.itemsize > dtype.itemsize:
            x = x.astype(f"u{dtype.itemsize}")
        if x.dtype.itemsize != dtype.itemsize or (x.dtype == bool) != (kind == "pred"):
            raise NotImplementedError(f"{name} has type {x.dtype}, read as {kind}")
        return x.view(F32).reshape(32, 2) if kind == "f32x2" else x.view(dtype)

    def load(self, name: str, x: np.ndarray, on: np.ndarray) -> None:
        "ld：寄存器可以更宽，按符号扩展。"
        size = max({"%rs": 2, "%r": 4, "%rd": 8}.get(name.rstrip("0123456789"), 0), x.itemsize)
        self.put(name, x.astype(f"{x.dtype.kind}{size}"), on)

    def put(self, name: str, x: np.ndarray, on: np.ndarray) -> None:
        "写寄存器；没写过的通道是 NaN。"
        if name == "_":
            return
        if x.dtype != bool:
            x = np.ascontiguousarray(x).view(f"u{x.nbytes // 32}").reshape(32)
        if not on.all():
            x = np.where(on, x, self.r.get(name, np.full_like(x, -1 if x.dtype == bool else np.iinfo(x.dtype).max)))
        self.r[name] = x

    def address(self, operand: str) -> np.ndarray:
        name, offset = re.match(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand.replace(" ", "")).groups()
        wide = name in self.r and self.r[name].dtype == U64
        return self.value(name, "b64" if wide else "b32").astype(I64) + int(offset or 0)

    def run(self) -> bool:
        "走到下一个屏障或结束；结束返回 True。"
        while (at := int(self.pc.min())) < EXITED:
            here = self.pc == at
            guard, op, a = self.code[at]
            on = here & (self.value(guard[1], "pred") ^ guard[0]) if guard else here
            self.pc = np.where(here, at + 1, self.pc)
            part = _parts(op)
            if part[0] == "bra":
                self.pc = np.where(on, self.labels[a[0]], self.pc)
            elif op == "ret":
                self.pc = np.where(on, EXITED, self.pc)
            elif op == "bar.sync":
                if a != ["0"]:
                    raise NotImplementedError(f"bar.sync {', '.join(a)}")
                if not on.all():
                    raise RuntimeError("bar.sync in divergent code")
                return False
            else:
                self.step(op, part, a, on)
        return True

    def together(self, op: str, on: np.ndarray, known: bool = True) -> None:
        "整个 warp 一起做的指令。"
        if not on.all():
            raise RuntimeError(f"{op} in divergent code")
        if not known:
            raise NotImplementedError(f"{op}: not with a full mask")

    def step(self, op: str, part: list[str], a: list[str], on: np.ndarray) -> None:
        kind, base = part[-1], part[0]
        values = lambda: [self.value(x, kind) for x in a[1:]]
        if op.startswith("ld.param"):
            number, offset = re.search(r"_param_(\d+)(?:\+(\d+))?\]", a[1]).groups()
            names, raw = _names(a[0]), self.params[int(number)][int(offset or 0):]
            for name, x in zip(names, np.frombuffer(raw, _TYPE[kind], len(names))):
                self.load(name, np.full(32, x), on)
        elif base == "mov" and a[0].startswith("{"):
            names, x = _names(a[0]), self.value(a[1], kind)
            for name, piece in zip(names, x.view(f"u{x.itemsize // len(names)}").reshape(32, -1).T):
                self.put(name, piece, on)
        elif base == "mov" and a[1].startswith("{"):
            names = _names(a[1])
            self.put(a[0], np.stack([self.value(x, f"b{int(kind[1:]) // len(names)}") for x in names], 1), on)
        elif base == "mov":
            self.put(a[0], *values(), on)
        elif base == "setp":
            self.put(a[0], _compare(part[1], *values()), on)
        elif base == "selp":
            self.put(a[0], np.where(self.value(a[3], "pred"), self.value(a[1], kind), self.value(a[2], kind)), on)
        elif base == "cvt" and part[-2] in ("bf16x2", "f16x2"):
            self.put(a[0], np.stack([_round(x, part[-2][:-2]) for x in values()[::-1]], 1), on)
        elif base == "cvt" and part[-2] in ("bf16", "f16"):
            self.put(a[0], _round(*values(), part[-2]), on)
        elif base == "cvt" and kind in ("bf16", "f16"):
            self.put(a[0], _float(*values(), kind), on)
        elif base == "cvt":
            self.put(a[0], self.value(a[1], kind, narrow=True).astype(_TYPE[part[-2]]), on)
        elif kind in ("f32", "f32x2") and base in _FLOAT:
            x, f = values(), _FLOAT[base + ".NaN" * ("NaN" in part)]
            x = [_flush(y) for y in x] if "ftz" in part else x
            y = f(f(*x[:2]), x[2]) if base in ("max", "min") and len(x) == 3 else f(*x)
            self.put(a[0], _flush(y) if "ftz" in part else y, on)
        elif part[1:2] == ["wide"]:
            x, y = (self.value(n, kind).astype(_TYPE[kind[0] + "64"]) for n in a[1:3])
            self.put(a[0], x * y if base == "mul" else x * y + self.value(a[3], kind[0] + "64"), on)
        elif part[1:2] == ["hi"]:
            x, y = (self.value(n, kind).astype(_TYPE[kind[0] + "64"]) for n in a[1:])
            self.put(a[0], (x * y >> np.array(32, x.dtype)).astype(_TYPE[kind]), on)
        elif base in ("shl", "shr"):
            x, n = self.value(a[1], kind), self.value(a[2], "u32")
            self.put(a[0], (np.left_shift if base == "shl" else np.right_shift)(x, np.minimum(n, U32(64)).astype(x.dtype)), on)
        elif base == "bfe":
            x, at, n = self.value(a[1], kind), *(self.value(y, "u32").astype(I64) for y in a[2:])
            left = 8 * x.itemsize - n - at
            if ((n == 0) | (left < 0))[on].any():
                raise NotImplementedError(f"{op}: field outside the register")
            self.put(a[0], x << left.astype(x.dtype) >> (left + at).astype(x.dtype), on)
        elif base in _INT:
            self.put(a[0], _INT[base](*values()), on)
        elif base == "shfl":
            self.together(op, on, a[3:] == ["31", "-1"])
            source = self.value(a[2], "b32").astype(I64)
            source = np.arange(32) ^ source if "bfly" in part else source
            self.put(_names(a[0])[0], self.value(a[1], "b32")[source & 31], on)
        elif base == "redux":
            self.together(op, on, bool((self.value(a[2], "b32") == U32(0xFFFFFFFF)).all()))
            self.put(a[0], np.full(32, {"max": np.max, "min": np.min}[part[2]](self.value(a[1], kind)), _TYPE[kind]), on)
        elif op == "bar.warp.sync":                                      # 各通道本来就同步
            self.together(op, on, a == ["-1"])
        elif base == "ldmatrix":
            self.together(op, on)
            at, shared = self.address(a[1]), self.spaces["shared"]
            for n, name in enumerate(_names(a[0])):
                tile = shared.bytes[shared.index(at[8 * n:8 * n + 8], 16, 16)].view(U16)
                self.put(name, np.ascontiguousarray(tile.T if "trans" in part else tile).reshape(32, 2), on)
        elif base == "mma":
            self.together(op, on)
            self.mma(part[-2], *map(_names, a), on)
        elif op == "cp.async.commit_group":
            self.groups.append([])
        elif op == "cp.async.wait_group":
            done = max(len(self.groups) - 1 - int(a[0]), 0)
            for to, source in (pair for group in self.groups[:done] for pair in group):
                self.spaces["shared"].bytes[to] = 0                      # 没有源的字节补 0
                self.spaces["shared"].bytes[to[:, :source.shape[1]]] = self.spaces["global"].bytes[source]
            self.groups = self.groups[done:]
        elif base == "cp" and len(a) in (3, 4):
            self.copy(int(a[2], 0), *map(self.address, a[:2]), self.value(a[-1], "u32"), on)
        elif base == "atom":                                             # 各通道依次加
            where, old = self.spaces["global"].index(self.address(a[1])[on], 4, 4), np.full(32, np.nan, F32)
            for lane, at, x in zip(np.flatnonzero(on), where, self.value(a[2], kind)[on]):
                old[lane] = self.spaces["global"].bytes[at].view(F32)[0]
                self.spaces["global"].bytes[at] = (old[lane:lane + 1] + x).view(np.uint8)
            self.put(a[0], old, on)
        elif base in ("ld", "st"):
            self.move(base, self.spaces[part[1]], kind, *(a if base == "ld" else a[::-1]), on)
        else:
            raise NotImplementedError(f"PTX instruction {op} {', '.join(a)}")

    def copy(self, size: int, to: np.ndarray, source: np.ndarray, count: np.ndarray, on: np.ndarray) -> None:
        "cp.async：size 个字节，其中 count 个来自 source。Recorded; wait_group carries it out."
        for n in np.unique(count[on]).tolist():
            lanes = on & (count == n)
            if n > size or size not in (4, 8, 16):
                raise RuntimeError(f"cp.async of {n} of {size} bytes")
            there = self.spaces["global"].index(source[lanes], n, size) if n else np.zeros((lanes.sum(), 0), I64)
            self.groups[-1].append((self.spaces["shared"].index(to[lanes], size, size), there))

    def move(self, base: str, space: Memory, kind: str, registers: str, at: str, on: np.ndarray) -> None:
        "ld、st：一个或几个相邻的数。Each lane moves its registers to or from adjacent addresses."
        names, size = _names(registers), _TYPE[kind].itemsize
        where = space.index(self.address(at)[on], size * len(names), size * len(names))
        if base == "ld":
            found = np.zeros((32, len(names)), _TYPE[kind])
            found[on] = space.bytes[where].view(_TYPE[kind])
            for name, x in zip(names, found.T):
                self.load(name, x, on)
        else:
            values = np.stack([self.value(x, kind, narrow=True) for x in names], 1)
            space.bytes[where] = values[on].view(np.uint8)

    def mma(self, kind: str, d: list[str], a: list[str], b: list[str], c: list[str], on: np.ndarray) -> None:
        "m16n8k16：寄存器的布局见 PTX 手册。"
        A, B, C = np.zeros((16, 16), F32), np.zeros((16, 8), F32), np.zeros((16, 8), F32)
        pairs = lambda names: _float(np.stack([self.value(x, "b32") for x in names]).view(U16).reshape(-1, 32, 2), kind)
        A[_A], B[_B] = pairs(a), pairs(b)
        C[_C] = np.stack([self.value(x, "f32") for x in c]).reshape(2, 2, 32).transpose(0, 2, 1)
        D = (A.astype(np.float64) @ B + C).astype(F32)[_C].transpose(0, 2, 1).reshape(4, 32)
        for name, x in zip(d, D):
            self.put(name, x, on)


def run(ptx: str, grid: Sequence[int], threads: int, params: Sequence[bytes], memory: Memory, seed: int = 0,
        shared: int = 100 * 1024, fill: int = 0xFF) -> None:
    """执行整个网格；params 是各参数的字节，shared 是共享内存的大小，起初每个字节是 fill：NaN。

    Run every block; raises what the kernel does wrong.
    """
    program, rng = parse(ptx), random.Random(seed)
    with np.errstate(all="ignore"):
        for block in np.ndindex(*grid[::-1]):
            space = Memory(shared, "shared")
            space.bytes[:], space.used = fill, {0: shared}
            warps = [Warp(program, block[::-1], n, space, params, memory) for n in range(threads // 32)]
            while warps:
                rng.shuffle(warps)
                ended = [w.run() for w in warps]                         # 各走到下一个屏障
                if any(ended) and not all(ended):
                    raise RuntimeError("some warps left while others wait at a barrier")
                warps = [] if all(ended) else warps
