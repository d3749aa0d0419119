"""tools/run_ptx.py：小的 PTX 执行器。"""
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
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
