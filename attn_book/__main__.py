"""`python -m attn_book` 与命令 `attn-book` 相同。Same as the command `attn-book`."""
from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
