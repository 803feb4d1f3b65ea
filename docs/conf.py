"""Sphinx configuration; ``make docs`` builds with warnings as errors."""

import kvant

project = "kvant"
author = "the kvant authors"
copyright = "the kvant authors, Apache-2.0"
release = version = kvant.__version__

extensions = ["myst_parser", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "alabaster"
html_theme_options = {
    "description": "RTL for low-bit LLM inference, bit-exact with a PyTorch model",
    "page_width": "1100px",
    "fixed_sidebar": True,
}
html_static_path = []
