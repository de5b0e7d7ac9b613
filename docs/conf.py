"""Sphinx configuration. Reference pages and pictures are generated before every build."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import subquad  # noqa: E402  # after the path, like the two below

project = "subquad"
copyright = "the subquad contributors, Apache-2.0"
version = release = subquad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_generated"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

# In docstrings, `name` means code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries = False

html_theme = "furo"
html_title = "subquad"
html_static_path = ["_static"]
html_css_files = ["subquad.css"]
html_copy_source = False


LITERAL = re.compile(r"(``.+?``|`[^`]+`)")


def plain_formulas(app, what, name, obj, options, lines):
    """Docstrings are written for reading: |x| is a norm, an indented block is a formula.

    Runs after napoleon. Marks indented blocks as literal, so that their lines stay, and
    escapes bars elsewhere, which would mean a substitution.
    """
    result, literal, before, blank = [], None, "", True
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() and literal is not None and indent <= literal:
            literal = None
        if line.strip() and literal is None:
            above = len(before) - len(before.lstrip())
            starts = before.strip() and blank and indent >= above + 4
            if before.rstrip().endswith("::") and indent > above:
                literal = above
            elif starts and not before.lstrip().startswith(("..", ":", "-", "*")):
                result += [" " * above + "::", ""]
                literal = above
            elif not line.lstrip().startswith((">>>", "...")):
                parts = LITERAL.split(line)
                line = "".join(p if i % 2 else p.replace("|", "\\|") for i, p in enumerate(parts))
        result.append(line)
        blank = not line.strip()
        before = before if blank else line
    lines[:] = result


def generate(app):
    """Writes what is made from the registry, the package's code and the benchmarks."""
    import figures
    import generate as pages

    figures.main(HERE / "_static" / "generated")
    pages.main(HERE)


def setup(app):
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", plain_formulas, priority=600)
