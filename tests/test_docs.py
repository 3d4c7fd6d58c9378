# SPDX-License-Identifier: Apache-2.0
"""The generated pages are those that the code would generate now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["configuration", "cli"])
def test_a_generated_page_is_up_to_date(page):
    made = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))[page]()
    committed = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert committed == made, "run scripts/make_docs.py"
