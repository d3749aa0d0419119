"""同一套仪器在别的 Triton 版本上也要成立。The instruments must hold on other Triton versions too.

`make test` 把这些版本各装进 .venv/triton-<版本>/，放在 PYTHONPATH 最前面就能换用。
"""
import os, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ["3.6.0", "3.9.0"]      # 支持范围的两端；开发环境是两者之间的 3.7.1
FILES = ["test_launch.py", "test_ledger.py", "test_aot.py", "test_machine.py"]
# 开发版本（3.7.1）上没有溢出，别的版本上已知的溢出指令条数；变多了要失败。Known spill instructions elsewhere.
SPILLS = {("3.9.0", "flash3_dq"): 24, ("3.9.0", "flash4_bwd"): 36}


def _run(version: str, *command: str) -> subprocess.CompletedProcess:
    where = ROOT / ".venv" / f"triton-{version}"
    assert (where / "triton").is_dir(), f"没有 {where}：请用 make test（它会装好），或 make {where.relative_to(ROOT)}/.ok"
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(where)})


@pytest.mark.parametrize("version", VERSIONS)
def test_that_version_is_really_used(version):
    out = _run(version, "-c", "import triton; print(triton.__version__)")
    assert out.stdout.strip() == version, out.stdout + out.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_instruments(version):
    out = _run(version, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{f}" for f in FILES))
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-1000:]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_compiles_without_spills(version):
    known = {name: n for (v, name), n in SPILLS.items() if v == version}
    code = ("import sys\n"
            "from attn_book.aot import kernels, report\n"
            "from attn_book.flash4 import flash4_guards\n"
            f"known = {known}\n"
            "for n, entry in sorted(kernels().items()):\n"
            "    home = sys.modules[entry.kernel.fn.__module__]\n"
            "    new = getattr(home, 'MIN_CAPABILITY', (8, 0)) >= (10, 0)\n"
            "    r = report(n, 'sm_100a' if new else 'sm_90')\n"
            "    assert r.spills <= known.get(n, 0) and r.fits, (n, r)\n"
            "    if n == 'flash4_fwd':                                   # 到达之前的屏障是编译器加的\n"
            "        assert flash4_guards(r) == dict(out_full=[True] * 2, out_free=[True] * 2), flash4_guards(r)\n"
            "    print(n, r.registers)\n")
    out = _run(version, "-c", code)
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout.count("\n") >= 1
