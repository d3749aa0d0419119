"""所有测试共用的设定。Shared pytest set-up."""
import os

os.environ.setdefault("MPLBACKEND", "Agg")  # 测试里画图不开窗口

import pytest
import torch
from hypothesis import settings

# 两个进程分两个核：各用一个线程，互不等待。
torch.set_num_threads(1)

# 每次跑同样的例子，也不因机器慢而失败。
settings.register_profile("book", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("book")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="也运行标了 slow 的测试")


def pytest_collection_modifyitems(config, items):
    no_gpu = pytest.mark.skip(reason="需要 NVIDIA GPU，这台机器没有")
    no_slow = pytest.mark.skip(reason="耗时长；加 --slow 运行")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(no_slow)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    "每个测试从同一个随机种子开始，先后次序不影响结果。"
    torch.manual_seed(0)
