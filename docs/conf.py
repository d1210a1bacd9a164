"""Sphinx configuration of the documentation. `make docs` builds it into build/docs/html."""

import sys
from pathlib import Path

import telegrad

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "Telegrad"
author = "The Telegrad authors"
project_copyright = author
version = release = telegrad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    # docs/_ext
    "llms_txt",
    "public_names",
    "diagrams",
    "charts",
    "tables",
]
exclude_patterns = ["_ext", "benchmarks/README.md"]

# Pages
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .go"

# API reference. A word in single backticks is a link if it names something public.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
suppress_warnings = ["ref.python"]  # a name that several modules have

# HTML. Nothing is loaded from other hosts.
html_theme = "furo"
html_title = f"Telegrad {version}"
html_static_path = ["_static"]
html_css_files = ["telegrad.css"]
html_copy_source = True
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b6e69",
        "color-brand-content": "#0b6e69",
        "color-brand-visited": "#0b6e69",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4fd1c5",
        "color-brand-content": "#4fd1c5",
        "color-brand-visited": "#4fd1c5",
    },
}
