# 《从 W_K 到 FlashAttention-4》：两条命令是 make book 与 make test，其余见 make help。
# 开发环境的版本：torch 与 triton 必须配对（torch 2.13.0 的 CUDA 版只认 triton 3.7.1）。
TORCH  := 2.13.0
TRITON := 3.7.1
# 支持范围的两端：tests/test_triton_versions.py 用它们再跑一遍解释器与编译
TRITON_ALSO := 3.6.0 3.9.0
# 没有 NVIDIA 显卡时，torch 的 CPU 版从这里取（省几 GB）；置空则用 pip 默认源里的版本。
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTHON ?= python3

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory --no-builtin-rules
unexport PYTHONPATH PYTHONHOME IN_TEST
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PATH := $(CURDIR)/.venv/bin:$(PATH)

PY      := .venv/bin/python
# 目录一旦搬家，.venv 里的绝对路径就失效：时间戳文件名带上目录的校验和，搬家即重建。
STAMP   := .venv/.ready-$(shell pwd | cksum | cut -d' ' -f1)
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)

.PHONY: help setup book preview test sync sync-check nbtest pytest lab gpu-check bench clean distclean

help: ## 列出所有目标
	@echo "《从 W_K 到 FlashAttention-4》"
	grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | while IFS= read -r line; do
	  printf '  make %-11s %s\n' "$${line%%:*}" "$${line##*## }"
	done

setup: $(STAMP) ## 建 .venv 并安装一切（只在第一次或 pyproject.toml 变动后做事）

$(STAMP): pyproject.toml
	@if [ "$$(uname -s)" != Linux ]; then
	  echo "错误：Triton 只有 Linux 版。Windows 请用 WSL2，macOS 请用 Linux 容器或云主机。" >&2; exit 1
	fi
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
	  echo "错误：需要 Python 3.10 以上；可用 make setup PYTHON=python3.11 指定。" >&2; exit 1; }
	if [ -d .venv ] && compgen -G '.venv/.ready-*' >/dev/null && [ ! -e $(STAMP) ]; then
	  echo "目录搬过家，重建 .venv"; rm -rf .venv
	fi
	if [ ! -x $(PY) ]; then
	  echo "== 建立 .venv"
	  $(PYTHON) -m venv .venv || { rm -rf .venv
	    echo "错误：venv 建不起来。Debian/Ubuntu 请先 apt-get install python3-venv。" >&2; exit 1; }
	fi
	pip="$(PY) -m pip install"; if [ ! -t 1 ]; then pip="$$pip -qq"; fi   # 终端里看进度，日志里只看错误
	echo "== 安装 torch $(TORCH)"
	if ! $(PY) -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null; then
	  cpu='torch==$(TORCH)+cpu'
	  if [ -n "$(HAS_GPU)" ] || [ -z "$(TORCH_INDEX)" ]; then
	    $$pip --no-deps 'torch==$(TORCH)'
	  elif $$pip --no-deps "$$cpu" 2>/dev/null; then :
	  elif $$pip --no-deps --index-url '$(TORCH_INDEX)' --timeout 20 --retries 1 "$$cpu"; then :
	  else
	    echo "取不到 CPU 版，改装默认版本（会带上几 GB 的 CUDA 库）"
	    $$pip --no-deps 'torch==$(TORCH)'
	  fi
	fi
	echo "== 安装 triton $(TRITON)、本库与开发工具"
	$$pip 'torch==$(TORCH)' 'triton==$(TRITON)' -e '.[dev]'
	$(PY) -c 'import torch, triton, nbdev'
	if [ -d .git ]; then $(install-hooks); else echo "没有 .git 目录，不装 git 钩子"; fi
	rm -f .venv/.ready-*
	touch $(STAMP)

# nbdev 的钩子只进本仓库：它顺手写用户主目录里的 Jupyter 配置，所以给它一个临时的 HOME；
# 它假定 nbdev 命令在 PATH 上，所以改成 .venv 里的路径。
define install-hooks
if [ -e .git/hooks/post-merge ] && ! grep -q nbdev_trust .git/hooks/post-merge; then
  echo "已有自己的 post-merge 钩子，不装 nbdev 的钩子"
else
  tmp=$$(mktemp -d)
  GIT_CONFIG_GLOBAL="$${GIT_CONFIG_GLOBAL:-$$HOME/.gitconfig}" HOME=$$tmp nbdev_install_hooks
  rm -rf "$$tmp"
  sed -i 's#driver = nbdev_merge#driver = .venv/bin/nbdev_merge#' .gitconfig
  sed -i 's#^nbdev_trust#.venv/bin/nbdev_trust#' .git/hooks/post-merge
fi
endef

book: setup ## 执行各章并成书，入口是 _book/index.html
	@$(PY) tools/book.py build

preview: setup ## 在本机浏览器里看书
	@$(PY) tools/book.py preview

test: sync-check nbtest pytest ## 跑全部测试：生成物同步 → 笔记本 → pytest

# 先删后生成：没有了笔记本的模块不会留下来。
clear-generated = find attn_book -name '*.py' ! -name __init__.py ! -name __main__.py -delete

sync: setup ## 由笔记本重新生成 attn_book/ 与 tests/，并清掉笔记本里的输出
	@$(clear-generated)
	nbdev_export
	nbdev_clean
	$(PY) tools/extract_tests.py

# 在副本里重新生成一遍，再按内容比较：与 git 的状态无关，没提交的改动照样能测。
sync-check: setup
	@echo "== 生成物与笔记本是否一致"
	tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT
	cp -r settings.ini pyproject.toml nbs attn_book tests tools "$$tmp/"
	cd "$$tmp"
	$(clear-generated)
	nbdev_export
	nbdev_clean
	"$(CURDIR)/$(PY)" tools/extract_tests.py
	cd "$(CURDIR)"
	bad=0
	for d in attn_book nbs tests; do
	  diff -r -x __pycache__ -x .ipynb_checkpoints -x .last_checked "$$d" "$$tmp/$$d" || bad=1
	done
	if [ $$bad = 1 ]; then
	  echo "错误：上面列出的文件与笔记本不一致（左：现有；右：应有）。运行 make sync。" >&2; exit 1
	fi

nbtest: setup
	@echo "== 逐本执行笔记本"
	compgen -G 'nbs/*.ipynb' >/dev/null || { echo "错误：nbs/ 里没有笔记本" >&2; exit 1; }
	if [ -n "$(HAS_GPU)" ]; then flags=gpu; else flags=
	  n=$$({ grep -hoE '^ *"#\| *gpu' nbs/*.ipynb || true; } | wc -l)
	  echo "没有 GPU：跳过 $$n 个 #| gpu 单元"
	fi
	nbdev_test --n_workers 1 --do_print --timing --flags "$$flags"

ALSO := $(TRITON_ALSO:%=.venv/triton-%/.ok)
$(ALSO): .venv/triton-%/.ok: | $(STAMP)
	@echo "== 另装 triton $*"
	$(PY) -m pip install -q --no-deps --upgrade --target .venv/triton-$* 'triton==$*'
	touch $@

pytest: setup $(ALSO)
	@echo "== pytest"
	$(PY) -m pytest -n 2 --dist loadfile

lab: setup ## 打开 JupyterLab
	@$(PY) -m jupyter lab --notebook-dir=.

gpu-check: setup ## 在 GPU 上对照 oracle 检验所有内核，结果写进 results/（没有 GPU：退出码 2）
	@$(PY) -m attn_book check --out results/

bench: setup ## 在 GPU 上计时，与 PyTorch、官方 FlashAttention 并排，结果写进 results/（没有 GPU：退出码 2）
	@$(PY) -m attn_book bench --out results/

clean: ## 删除成书与缓存（保留 .venv）
	@rm -rf _build _book build dist .pytest_cache .hypothesis *.egg-info.tmp
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## 再删掉 .venv
	@rm -rf .venv *.egg-info
