"""The docs site: Sphinx with MyST and furo. `make docs` builds it, and a reference that leads nowhere fails the build.

Pages are Markdown that a forge shows too. `extensions/` makes what the package knows: settings, flags, API.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

import zero_offload  # noqa: E402

project = "zero_offload"
author = "the contributors of zero_offload"
version = release = zero_offload.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "claims",
    "docstrings",
    "generated",
    "links",
    "reading_ease",
    "words",
]
exclude_patterns = ["extensions"]
nitpicky = True
smartquotes = False

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]  # the class of notes below claims
myst_links_external_new_tab = True
suppress_warnings = ["myst.header"]  # a page may begin a part with a table

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Tools of others need not be installed for the site.
autodoc_mock_imports = ["accelerate", "lightning", "pytorch_lightning", "transformers", "trl"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"zero_offload {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def setup(app):
    """Decisions are read by those who change the code: a reader's search leads to pages."""
    app.connect("doctree-read", _leave_out_of_search)


def _leave_out_of_search(app, _):
    if app.env.docname.startswith("decisions/"):
        app.env.metadata[app.env.docname]["nosearch"] = True
