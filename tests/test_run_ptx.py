"""tools/run_ptx.py：小的 PTX 执行器；用它在 CPU 上执行 Triton 给 sm_80 编译的 flash2。"""
import functools
import inspect
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_book import flash1, flash2, ops, oracle, projection, standard
from attn_book.flash2 import accumulate
from attn_book.launch import _fma_chain, kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import test_ops  # noqa: E402
from run_ptx import Memory, parse, run  # noqa: E402


def entry(*lines, params="a_param_0"):
    return ".version 8.0\n.visible .entry a(.param .b64 a_param_0)\n{\n .reg .b32 %r<9>;\n" + "\n".join(lines) + "\n}\n"


START = ["ld.param.b64 %rd1, [a_param_0];", "mov.u32 %r1, %tid.x;", "mul.wide.u32 %rd2, %r1, 4;", "add.s64 %rd3, %rd1, %rd2;"]


def execute(*lines, threads=32, out=None):
    out = np.zeros(threads, np.int32) if out is None else out
    memory = Memory()
    at = memory.put(out)
    run(entry(*lines), (1, 1, 1), threads, [at.to_bytes(8, "little")], memory)
    return memory.get(at, out)


def test_branches_reconverge():
    got = execute(*START, "setp.lt.s32 %p1, %r1, 5;", "mov.b32 %r2, 1;", "@%p1 bra $L_a;", "mov.b32 %r2, 2;", "$L_a:",
                  "add.s32 %r2, %r2, -3;", "@!%p1 bra $L_b;", "shl.b32 %r2, %r2, 1;", "$L_b:", "st.global.b32 [%rd3], %r2;", "ret;")
    assert got.tolist() == [-4] * 5 + [-1] * 27


def test_signed_and_unsigned():
    got = execute(*START, "sub.s32 %r2, %r1, 20;", "shr.s32 %r3, %r2, 1;", "div.s32 %r4, %r2, 3;", "max.u32 %r5, %r2, 7;",
                  "add.s32 %r6, %r3, %r4;", "xor.b32 %r6, %r6, %r5;", "st.global.b32 [%rd3], %r6;", "ret;")
    x = np.arange(32, dtype=np.int32) - 20
    want = ((x >> 1) + (np.sign(x) * (abs(x) // 3))) ^ np.maximum(x.view(np.uint32), np.uint32(7)).view(np.int32)
    assert got.tolist() == want.astype(np.int32).tolist()


def test_shuffle_and_floats():
    got = execute(*START, "cvt.rn.f32.s32 %r2, %r1;", "shfl.sync.bfly.b32 %r3|%p1, %r2, 2, 31, -1;", "fma.rn.f32 %r4, %r3, 0f40000000, %r2;",
                  "ex2.approx.ftz.f32 %r5, %r4;", "st.global.b32 [%rd3], %r5;", "ret;", out=np.zeros(32, np.float32))
    lane = np.arange(32)
    assert np.array_equal(got, np.exp2((2 * (lane ^ 2) + lane).astype(np.float32)))


MMA = [*START, "mul.wide.u32 %rd4, %r1, 16;", "add.s64 %rd5, %rd1, %rd4;", "shl.b32 %r2, %r1, 4;",
       "cp.async.ca.shared.global [%r2], [%rd5], 16, 16;", "cp.async.ca.shared.global [%r2+512], [%rd5+512], 16, 16;",
       "cp.async.commit_group;", "cp.async.wait_group 0;", "bar.sync 0;",
       "and.b32 %r3, %r1, 15;", "shl.b32 %r3, %r3, 5;", "shr.u32 %r4, %r1, 4;", "shl.b32 %r4, %r4, 4;", "add.s32 %r3, %r3, %r4;",
       "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r3];",
       "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r21, %r22, %r23, %r24}, [%r3+512];",
       "mov.b32 %r9, 0;",
       "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r31, %r32, %r33, %r34}, {%r11, %r12, %r13, %r14}, {%r21, %r22}, {%r9, %r9, %r9, %r9};",
       "shr.u32 %r5, %r1, 2;", "and.b32 %r6, %r1, 3;", "shl.b32 %r5, %r5, 5;", "shl.b32 %r6, %r6, 3;", "add.s32 %r5, %r5, %r6;",
       "cvt.u64.u32 %rd6, %r5;", "add.s64 %rd7, %rd1, %rd6;", "st.global.b32 [%rd7+1024], %r31;", "st.global.b32 [%rd7+1028], %r32;",
       "st.global.b32 [%rd7+1280], %r33;", "st.global.b32 [%rd7+1284], %r34;", "ret;"]


def product(lines):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (16, 16)).astype(np.float16) for _ in range(2))
    raw = np.concatenate([np.frombuffer(x.tobytes(), np.uint8) for x in (a, b, np.zeros((16, 8), np.float32))])
    got = execute(*lines, out=raw)[1024:].view(np.float32).reshape(16, 8)
    return got, (a.astype(np.float32) @ b.astype(np.float32))[:, :8]


def test_matrix_product_through_shared_memory():
    got, want = product(MMA)
    assert np.array_equal(got, want)


def test_data_do_not_arrive_before_the_wait():
    got, want = product([x for x in MMA if "wait_group" not in x])
    assert np.isnan(got).all() and not np.isnan(want).any()


def test_what_a_kernel_must_not_do():
    with pytest.raises(IndexError, match="out of bounds"):
        execute(*START, "st.global.b32 [%rd3+128], %r1;", "ret;")
    with pytest.raises(RuntimeError, match="divergent"):
        execute(*START, "setp.lt.s32 %p1, %r1, 5;", "@%p1 bra $L_a;", "bar.sync 0;", "$L_a:", "ret;")
    with pytest.raises(RuntimeError, match="some warps left"):
        execute(*START, "setp.lt.s32 %p1, %r1, 32;", "@%p1 bra $L_a;", "bar.sync 0;", "$L_a:", "ret;", threads=64)
    with pytest.raises(NotImplementedError, match="sin.approx.f32"):
        execute(*START, "sin.approx.f32 %r2, %r1;", "ret;")


def test_labels_and_guards():
    code, labels = parse(entry("$L_x:", "@!%p1 bra $L_x;", "ret;"))
    assert labels == {"$L_x": 0} and code == [((True, "%p1"), "bra", ["$L_x"]), (None, "ret", [])]


def test_sixteen_bits():
    got = execute(*START, "cvt.rn.f32.s32 %r2, %r1;", "mul.f32 %r2, %r2, 0f3EAAAAAB;", "cvt.rn.f16.f32 %rs1, %r2;",
                  "cvt.rn.bf16.f32 %rs2, %r2;", "mov.b32 %r3, {%rs1, %rs2};", "mov.b32 {%rs3, _}, %r3;",
                  "cvt.f32.f16 %r4, %rs3;",
                  "cvt.f32.bf16 %r5, %rs2;", "sub.f32 %r6, %r4, %r5;", "st.global.b32 [%rd3], %r6;", "ret;",
                  out=np.zeros(32, np.float32))
    x = torch.arange(32) * torch.tensor(0x3EAAAAAB, dtype=torch.int32).view(torch.float32)
    assert torch.equal(torch.tensor(got), x.half().float() - x.bfloat16().float()) and got.any()


def test_fields_and_shifts():
    got = execute(*START, "sub.s32 %r2, %r1, 9;", "bfe.s32 %r3, %r2, 1, 3;", "bfe.u32 %r4, %r2, 30, 2;",
                  "cvt.u16.u32 %rs1, %r1;",
                  "shl.b16 %rs2, %rs1, 13;", "shr.u16 %rs2, %rs2, 12;", "cvt.u32.u16 %r5, %rs2;",
                  "mad.lo.s32 %r6, %r4, 100, %r3;",
                  "mad.lo.s32 %r6, %r5, 1000, %r6;", "st.global.b32 [%rd3], %r6;", "ret;")
    x = np.arange(32)
    field = (x - 9 >> 1) % 8
    assert got.tolist() == (np.where(field > 3, field - 8, field) + 300 * (x < 9) + 1000 * (x % 8 * 2)).tolist()


def test_high_half_and_remainder():
    got = execute(*START, "mul.lo.s32 %r2, %r1, -1000000007;", "mul.hi.u32 %r3, %r2, %r2;", "mul.hi.s32 %r4, %r2, %r2;",
                  "rem.s32 %r5, %r2, 7;", "xor.b32 %r6, %r3, %r4;", "xor.b32 %r6, %r6, %r5;", "st.global.b32 [%rd3], %r6;", "ret;")
    x = (np.arange(32) * -1000000007).astype(np.int32).astype(object)
    want = [(a % 2 ** 32) ** 2 >> 32 ^ a * a >> 32 ^ int(np.fmod(a, 7)) for a in x]
    assert [a % 2 ** 32 for a in got.tolist()] == [a % 2 ** 32 for a in want]


def test_lanes_add_to_one_address_one_after_another():
    got = execute(*START, "cvt.rn.f32.s32 %r2, %r1;", "atom.global.gpu.acq_rel.add.f32 %r3, [%rd1+128], %r2;",
                  "st.global.b32 [%rd3], %r3;", "ret;", out=np.zeros(33, np.float32))
    assert got.tolist() == [n * (n - 1) // 2 for n in range(33)]


def test_nan_and_subnormals():
    got = execute(*START, "setp.lt.s32 %p0, %r1, 16;", "selp.f32 %r2, 0f7FC00000, 0f00000001, %p0;",
                  "setp.ne.f32 %p1, %r2, %r2;",
                  "setp.neu.f32 %p2, %r2, %r2;", "add.f32 %r3, %r2, %r2;", "add.ftz.f32 %r4, %r2, %r2;",
                  "setp.gt.f32 %p3, %r3, 0f00000000;", "setp.gt.f32 %p4, %r4, 0f00000000;", "selp.b32 %r5, 1, 0, %p1;",
                  "selp.b32 %r6, 2, %r5, %p2;", "selp.b32 %r7, 4, 0, %p3;", "selp.b32 %r8, 8, %r7, %p4;",
                  "add.s32 %r9, %r6, %r8;",
                  "st.global.b32 [%rd3], %r9;", "ret;")
    assert got.tolist() == [2] * 16 + [4] * 16


@pytest.mark.parametrize("wait", [True, False])
def test_asynchronous_copies_fill_with_zeros(wait):
    got = execute(*START, "and.b32 %r2, %r1, 1;", "shl.b32 %r2, %r2, 2;", "shl.b32 %r3, %r1, 2;", "add.s64 %rd4, %rd3, 4096;",
                  "setp.ne.s32 %p1, %r2, 0;", "selp.b64 %rd4, %rd3, %rd4, %p1;",                     # 源长 0：地址在外面也不读
                  "cp.async.ca.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x4, %r2;", "cp.async.commit_group;",
                  *["cp.async.wait_group 0;"] * wait, "ld.shared.b32 %r4, [%r3];", "st.global.b32 [%rd3+128], %r4;", "ret;",
                  out=np.arange(64, dtype=np.int32))
    assert got[32:].tolist() == [x % 2 * x if wait else -1 for x in range(32)]


@pytest.mark.parametrize("lines, message", [
    (["mul24.lo.u32 %r2, %r1, %r1;"], "mul24.lo.u32"), (["add.sat.s32 %r2, %r1, %r1;"], "add.sat.s32"),
    (["cvt.rni.s32.f32 %r2, %r1;"], "cvt"),
    (["sqrt.approx.f32 %r2, %r1;"], "sqrt"), (["fma.rz.f32 %r2, %r1, %r1, %r1;"], "fma.rz"),
    (["mov.u32 %r2, %laneid;"], "%laneid"),
    (["add.s32 %r2, %r1, %r7;"], "%r7"), (["add.s64 %rd4, %rd3, %r1;"], "read as s64"), (["bar.sync 1, 64;"], "bar.sync 1"),
    (["shfl.sync.bfly.b32 %r2, %r1, 1, 7, -1;"], "shfl"), (["mov.b32 %r2, one;", "mov.b32 %r3, two;"], "several variables")])
def test_what_is_not_known_is_refused(lines, message):
    with pytest.raises(NotImplementedError, match=message):
        execute(*START, *lines, "ret;")


def test_misaligned_accesses_are_refused():
    with pytest.raises(IndexError, match="misaligned"):
        execute(*START, "ld.global.v2.b32 {%r2, %r3}, [%rd3];", "ret;", out=np.zeros(33, np.int32))


# ---- Triton 给 sm_80 编译的内核

NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32",
         torch.int64: "*i64"}


class Compiled:
    """代替一个 Triton 内核：编译给 sm_80，在 run_ptx 上执行，结果写回 CPU 张量。

    Specialised to its arguments as Triton's launcher does: 1 is a constant, multiples of 16 are known to be such.
    edit: changes the PTX first. fill: bytes of shared memory at the start (0xFF: NaN).
    launches: (grid, arguments by name) of every launch.
    """

    def __init__(self, kernel, edit=lambda ptx: ptx, fill=0xFF):
        self.kernel, self.edit, self.fill, self.launches = kernel, edit, fill, []

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *args, **named):
        options = {n: named.pop(n) for n in ("num_warps", "num_stages") if n in named}
        named = inspect.signature(self.kernel.fn).bind(*args, **named).arguments
        self.launches.append((grid, named))
        memory, storage, types, fixed, aligned, params = Memory(), {}, {}, {}, {}, []
        for i, p in enumerate(self.kernel.params):
            x = named[p.name]
            if p.is_constexpr or type(x) is int and x == 1:
                types[p.name], fixed[i,] = "constexpr", x
                continue
            if isinstance(x, torch.Tensor):
                raw = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()
                if x.untyped_storage().data_ptr() not in storage:
                    storage[x.untyped_storage().data_ptr()] = memory.put(raw), raw
                types[p.name], form = NAMES[x.dtype], "<Q"
                x = storage[x.untyped_storage().data_ptr()][0] + x.storage_offset() * x.itemsize
            else:
                types[p.name], form = ("fp32", "<f") if isinstance(x, float) else ("i32", "<i")
            params.append(struct.pack(form, x))
            if form != "<f" and x % 16 == 0:
                aligned[i,] = [["tt.divisibility", 16]]
        made = triton.compile(ASTSource(fn=self.kernel, signature=types, constexprs=fixed, attrs=aligned),
                              target=GPUTarget("cuda", 80, 32), options=options)
        run(self.edit(made.asm["ptx"]), (*grid, 1, 1)[:3], 32 * made.metadata.num_warps, [*params, bytes(8), bytes(8)], memory,
            shared=made.metadata.shared, fill=self.fill)
        for at, raw in storage.values():
            raw[:] = memory.get(at, raw)


def compiled(monkeypatch, module, **options):
    """module 的内核都换成编译的，块大小取 sm_80 的。Replace the kernels of a module; returns them by name."""
    found = {n: Compiled(k.kernel if isinstance(k, Compiled) else k, **options)
             for n, k in vars(module).items() if n.endswith("_kernel")}
    for name, k in found.items():
        monkeypatch.setattr(module, name, k)
    monkeypatch.setattr(module, "_capability", lambda x: (8, 0), raising=False)
    return found


@pytest.fixture
def nan_in_new_tensors():
    torch.use_deterministic_algorithms(True)                             # torch.empty 给出 NaN：漏写的看得出来
    yield
    torch.use_deterministic_algorithms(False)


def inputs(dtype, D, Lq, Lk, H=4, H_kv=2):
    return [torch.randn(1, h, n, D).to(dtype) for h, n in ((H, Lq), (H_kv, Lk), (H_kv, Lk), (H, Lq))]


def model(Lq, Lk):
    return dict(steps=-(-Lk // 16), steps_q=-(-Lq // 16), chained=True, acc=oracle.FP32)


@pytest.mark.parametrize("dtype, D, Lq, Lk, causal", [
    (torch.float32, 32, 37, 53, True), (torch.float32, 64, 21, 37, True), (torch.float16, 64, 37, 101, True),
    (torch.bfloat16, 64, 37, 101, True), (torch.float16, 32, 37, 150, False)])
def test_compiled_flash2(monkeypatch, nan_in_new_tensors, dtype, D, Lq, Lk, causal):
    q, k, v, do = inputs(dtype, D, Lq, Lk)
    kernels = compiled(monkeypatch, flash2)
    options = dict(scale=D ** -0.5, right=0 if causal else -1)
    o, lse = flash2.flash2_forward(q, k, v, **options)
    actual = (o, lse, *flash2.flash2_backward(do, None, q, k, v, o, lse, **options)[:3])
    share = ops.error_share(actual, q, k, v, do, model=model(Lq, Lk), causal=causal)
    assert 0 < share <= 1
    (grid, named), = kernels["flash2_delta_kernel"].launches
    delta = torch.full_like(named["delta_ptr"], torch.nan)
    kernels["flash2_delta_kernel"].kernel[grid](**named | dict(delta_ptr=delta))
    assert named["BLOCK_M"] == (16 if dtype == torch.float32 else 64) and torch.equal(named["delta_ptr"], delta)
    if dtype != torch.float32:
        compiled(monkeypatch, flash2, fill=0x4B)                         # 共享内存起初是有限的数：没有靠 NaN 触发重走
        assert all(map(torch.equal, flash2.flash2_forward(q, k, v, **options), (o, lse)))


FLAGS = [dict(window=(5, 3)), dict(softcap=3.0, causal=True), dict(alibi=torch.tensor([0.5, 0.25, 0.125, 0.1])),
         dict(bias=torch.linspace(-2, 2, 4 * 20 * 37).reshape(4, 20, 37)), dict(bias=torch.arange(20 * 37).reshape(20, 37) % 3 > 0)]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda x: "-".join(x))
def test_compiled_switches_of_the_operator(monkeypatch, nan_in_new_tensors, flags):
    compiled(monkeypatch, flash2)
    assert 0 < test_ops.worst(*test_ops.given(1, 4, 2, 20, 37, 24, 24, torch.float16), torch.randn(1, 4, 20), **flags) <= 1


@pytest.mark.parametrize("dtype, D", [(torch.float32, 64), (torch.float32, 128), (torch.float16, 64), (torch.bfloat16, 128)])
def test_compiled_row_with_one_key_is_exact(monkeypatch, nan_in_new_tensors, dtype, D):
    "dP 与 D 次序相同：dQ = dK = 0，O = V，dV = dO"
    q, k, v, do = inputs(dtype, D, 20, 20, 1, 1)
    compiled(monkeypatch, flash2)
    o, lse = flash2.flash2_forward(q, k, v, scale=D ** -0.5, left=0, right=0)
    dq, dk, dv = flash2.flash2_backward(do, None, q, k, v, o, lse, scale=D ** -0.5, left=0, right=0)[:3]
    assert torch.equal(o, v) and torch.equal(dv, do) and not dq.any() and not dk.any()


def test_compiled_dropout(monkeypatch, nan_in_new_tensors):
    compiled(monkeypatch, flash2)
    tensors = test_ops.given(1, 2, 1, 20, 37)
    torch.manual_seed(5)
    seed = int(torch.randint(0, 2 ** 62, (1,)))
    torch.manual_seed(5)
    actual = test_ops.run(*tensors, dropout_p=0.5)
    keep = flash1.dropout_mask((1, 2, 20, 37), 0.5, seed)                    # 解释执行
    assert 0 < ops.error_share(actual, *tensors, dropout=keep.double() / 0.5) <= 1


def test_compiled_packed_and_paged_layouts(monkeypatch, nan_in_new_tensors):
    compiled(monkeypatch, flash2)
    test_ops.test_varlen_meets_the_oracle((1, 9, 0), (33, 5, 2), torch.bfloat16, dict(causal=True))
    test_ops.test_paged_cache_meets_the_oracle((7, 4), 1, 8, 5, dict(causal=True), torch.bfloat16)


def test_compiled_atomic_backward(monkeypatch, nan_in_new_tensors):
    q, k, v, do = inputs(torch.float16, 32, 20, 37)
    compiled(monkeypatch, flash2)
    o, lse = flash2.flash2_forward(q, k, v, scale=0.2, right=0)
    actual = (o, lse, *flash2.flash2_backward(do, None, q, k, v, o, lse, scale=0.2, right=0, atomic=True)[:3])
    assert 0 < ops.error_share(actual, q, k, v, do, model=model(20, 37), causal=True, scale=0.2) <= 1


def test_compiled_splits_are_merged(monkeypatch, nan_in_new_tensors):
    q, k, v, _ = inputs(torch.bfloat16, 32, 5, 150)
    compiled(monkeypatch, flash2)
    actual = flash2.flash2_forward(q, k, v, scale=32 ** -0.5, splits=2)
    assert 0 < ops.error_share(actual, q, k, v, model=model(5, 150) | dict(steps=12)) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("attention, arithmetic", [
    (standard.standard_attention, dict(materialised=True)), (flash1.flash1, dict(step_roundings=8))])
def test_compiled_attention_of_chapters_2_and_3(monkeypatch, nan_in_new_tensors, dtype, attention, arithmetic):
    q, k, v, do = inputs(dtype, 32, 21, 37)
    compiled(monkeypatch, sys.modules[attention.__module__])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, causal=True, return_lse=True)
    actual = (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do))
    assert 0 < ops.error_share(actual, q, k, v, do, model=model(21, 37) | arithmetic, causal=True) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_projection(monkeypatch, nan_in_new_tensors, dtype):
    x, w = torch.randn(20, 70).to(dtype), torch.randn(70, 40).to(dtype)
    compiled(monkeypatch, projection)
    bound = oracle.matmul_bound(x, w, dtype, acc=oracle.FP32)
    assert 0 < oracle.ratio(projection.project(x, w), x.double() @ w.double(), bound) <= 1


@pytest.mark.parametrize("right, wrong", [
    (r"cp\.async\.wait_group\s+\d+;", ""), (r"cp\.async\.wait_group\s+2;", "cp.async.wait_group 4;"), (r"bar\.sync\s+0;", ""),
    (r"cp\.async\.commit_group;", ""), (r"(shfl\.sync\.bfly\.b32.*?), 1, 31", r"\1, 2, 31"),
    ("f32.f16.f16.f32", "f32.bf16.bf16.f32")])
def test_faults_planted_in_compiled_flash2_are_caught(monkeypatch, nan_in_new_tensors, right, wrong):
    q, k, v, _ = inputs(torch.float16, 64, 37, 150, 1, 1)
    counts = []
    def edit(ptx):
        ptx, n = re.subn(right, wrong, ptx)
        counts.append(n)
        return ptx
    compiled(monkeypatch, flash2, edit=edit)
    actual = flash2.flash2_forward(q, k, v, scale=0.125)
    assert counts[0] > 0 and not ops.error_share(actual, q, k, v, model=model(37, 150)) <= 1


@kernel
def chained_kernel(a_ptr, b_ptr, c_ptr, K: tl.constexpr):
    m, k = tl.arange(0, 32), tl.arange(0, K)
    a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * 32 + m[None, :])
    at = c_ptr + m[:, None] * 32 + m[None, :]
    tl.store(at, tl.load(at) + tl.dot(a, b, input_precision="ieee"))


@kernel
def segment_kernel(a_ptr, b_ptr, c_ptr, K: tl.constexpr):
    m, k = tl.arange(0, 32), tl.arange(0, K)
    a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * 32 + m[None, :])
    at = c_ptr + m[:, None] * 32 + m[None, :]
    tl.store(at, accumulate(tl.load(at), a, b))


@pytest.mark.parametrize("K", [32, 64])
def test_accumulate_starts_a_segment_at_zero(K):
    "acc + tl.dot 编译成从 acc 起的一条链，accumulate 不会。四段以上，编译的另取次序：(P0 + P2) + (P1 + P3)。"
    a, b, c = torch.randn(32, K), torch.randn(K, 32), torch.randn(32, 32)
    chain, segment, on_cpu = c.clone(), c.clone(), c.clone()
    Compiled(chained_kernel)[(1,)](a, b, chain, K=K)
    Compiled(segment_kernel)[(1,)](a, b, segment, K=K)
    segment_kernel[(1,)](a, b, on_cpu, K=K)
    assert np.array_equal(chain.numpy(), _fma_chain(a.numpy(), b.numpy(), c.numpy()))
    assert torch.equal(segment, on_cpu) and not torch.equal(segment, chain)
