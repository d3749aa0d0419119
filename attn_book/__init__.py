"""《从 W_K 到 FlashAttention-4》的库。Attention kernels and the operator `attn_book.attention`."""
__version__ = "0.1.0"

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ops import (attention, attention_paged, attention_varlen, merge_partials, register_transformers,
                      scaled_dot_product_attention)

__all__ = ["attention", "attention_paged", "attention_varlen", "merge_partials", "register_transformers",
           "scaled_dot_product_attention"]


def __getattr__(name: str):
    """算子在第一次使用时才导入：import attn_book 不带上 torch。Import the operator on first use (PEP 562)."""
    if name in __all__:
        from . import ops
        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
