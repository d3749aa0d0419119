"""Quarto 的 post-render：把 MathJax 换成随书的文件，书就不需要网络。

Quarto's post-render step: point MathJax at a local copy, so that the book needs no network.
"""
import os
import re
import shutil
from importlib.metadata import files
from pathlib import Path


def localise(out: Path) -> None:
    """就地改写 out 里的每一页。 Rewrite every page under `out` in place."""
    folder = out / "site_libs" / "mathjax"
    folder.mkdir(parents=True, exist_ok=True)
    script = next(f for f in files("django-static-mathjax") if str(f).endswith("es5/tex-svg-full.js")).locate()
    shutil.copy(script, folder)
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        local = os.path.relpath(folder / script.name, page.parent)
        text = re.sub(r"https://[^\"' ]*/mathjax@3[^\"' ]*\.js", local, text)
        text = re.sub(r"<script[^>]*src=\"https://[^\"]*polyfill[^\"]*\"[^>]*></script>", "", text)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    localise(Path(os.environ.get("QUARTO_PROJECT_OUTPUT_DIR", "_book")))
