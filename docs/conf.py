"""Configure the site. `make docs` builds it into site/html, and nothing on it is fetched from elsewhere."""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

from fedheal.version import __version__

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

NAVIGATION = {
    "Tutorials": {
        "Compare methods": "start-research",
        "Help a federation": "start-federation",
        "Your own training loop": "start-library",
        "Notebook: quickstart": "../examples/quickstart",
        "Notebook: training loop": "../examples/training_loop",
    },
    "How-to guides": {
        "Use your own data": "data",
        "Add a method": "add-a-method",
        "Use Flower": "flower",
        "Use NVFLARE": "nvflare",
        "Operate a federation": "operate",
        "Use secure aggregation": "secure",
        "Read reports and diagnoses": "report",
        "Reproduce the paper": "reproduce",
        "Track runs": "track",
    },
    "Reference": {
        "Methods": "methods",
        "Commands, fields and parameters": "reference",
        "Python API": "api/index",
        "Performance": "performance",
        "Reliability": "reliability",
        "Dependencies": "dependencies",
    },
    "Explanation": {
        "Concepts": "concepts",
        "Findings": "findings",
        "Statistics": "statistics",
        "Search plan": "search-plan",
        "Design": "design",
        "Questions": "faq",
    },
}

project, author, release = "fedheal", "The fedheal developers", __version__
project_copyright = "The fedheal developers, Apache License 2.0"
extensions = ["myst_nb", "site_math", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# The source is the whole repository: a link from a page to a notebook is then the same on the site and in the repository.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/*.ipynb"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in ("docs", "examples")]
html_additional_pages = {"index": "redirect.html"}

myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are committed with their outputs; the tests execute them
html_math_renderer = "picture"

autodoc_default_options = {"imported-members": True, "member-order": "bysource", "members": True}
autodoc_typehints_format = "short"
default_role = "code"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # without types, which have long names
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "fedheal"
html_static_path = ["_static"]
html_context = {"default_mode": "auto"}
html_css_files = ["site.css"]
html_sidebars = {"**": ["navigation.html"]}
html_show_sourcelink = html_copy_source = False
templates_path = ["_templates"]
html_theme_options = {
    "footer_end": [],
    "footer_start": ["copyright"],
    "logo": {"text": "fedheal"},
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
}


def setup(app: Any) -> None:
    """Register what follows."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-signature", shorten_signature)


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Add the navigation to the first page here, because a directive there would be shown as code in the repository."""
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(f"{title} <{target}>" for title, target in pages.items())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def shorten_signature(app: Any, what: str, name: str, value: Any, *_: Any) -> tuple[str, None] | None:
    """Show the fields of a dataclass by name: types and factories would fill lines, and its docstring describes them."""
    if not (inspect.isclass(value) and dataclasses.is_dataclass(value)):
        return None
    parameters = inspect.signature(value).parameters.values()
    names = [p.name if p.default is p.empty else f"{p.name}=..." for p in parameters]
    return f"({', '.join(names)})", None
