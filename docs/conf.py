"""Builds the documentation: `sphinx-build -W --keep-going -b html docs OUT`.

The front page is README.md, the reference is made of the docstrings, and nothing is
fetched from a network.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "jmp_rewrite"
author = "The jmp_rewrite authors"
copyright = "The jmp_rewrite authors, Apache License 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "py:obj"  # a single backtick: a link where there is something to link

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["jmp_rewrite.css"]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings say it in words
napoleon_numpy_docstring = False
napoleon_attr_annotations = False

myst_heading_anchors = 3

# README and the pages in here link to one another, and to other files, by their paths
# in the repository; README's links are absolute, because package indexes show it too.
# Files that are pages here become links to those. Other files become downloads where a
# page links to them by a path, and stay links into the repository where README does.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "benchmarks/NOTES.md": "benchmark_notes.md",
}
_REPOSITORY = "https://github.com/jmp-rewrite/jmp_rewrite/blob/main/"
_ABSOLUTE = re.compile(rf"\]\({re.escape(_REPOSITORY)}([^)#\s]+)([^)\s]*)\)")
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)([^)\s]*)\)")


def _as_seen_from_docs(text, folder):
    """Turns the links of a file in a folder into links of a page in `docs/`."""

    def turned(link):
        path = (folder / link[1]).resolve().relative_to(ROOT).as_posix()
        target = PAGES.get(path) or path.removeprefix("docs/")
        if target == path:
            target = f"../{path}"
        return f"]({target}{link[2]})"

    def made_relative(link):
        target = PAGES.get(link[1]) or link[1].removeprefix("docs/")
        is_page = (ROOT / "docs" / target).exists()
        return f"]({target}{link[2]})" if is_page else link[0]

    return _ABSOLUTE.sub(made_relative, _LINK.sub(turned, text))


def _on_read(app, name, content):
    if "/" not in name:
        content[0] = _as_seen_from_docs(content[0], ROOT / "docs")


def _on_include(app, path, name, content):
    content[0] = _as_seen_from_docs(content[0], (ROOT / "docs" / path).parent)


def _keep_colons(app, what, name, obj, options, lines):
    """Puts back together what Napoleon takes for a type: a line up to its colon."""
    taken = {":type: ": "", ":rtype: ": ":returns: "}
    for index, line in reversed([*enumerate(lines)]):
        for field, before in taken.items():
            if line.startswith(field):
                del lines[index]
                at = next((i for i, x in enumerate(lines) if x.startswith(before)), 0)
                text = f"{line.removeprefix(field)}: {lines[at].removeprefix(before)}"
                lines[at] = before + text


def _hide_constructors(app, what, name, obj, options, signature, returns):
    """Nobody but the library makes reports and states; policies are written out."""
    is_made_by_users = name.endswith(".Policy")
    return ("", None) if what == "class" and not is_made_by_users else None


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _keep_colons, priority=600)
    app.connect("autodoc-process-signature", _hide_constructors)
    app.connect("source-read", _on_read)
    app.connect("include-read", _on_include)
