# SPDX-License-Identifier: Apache-2.0
"""Says, once, why the comparisons with the reference were not collected."""

from __future__ import annotations

import pytest


@pytest.mark.parity
def test_reference_is_installed(missing):
    if missing:
        pytest.skip(
            f"no comparison with the reference: {', '.join(missing)} cannot be imported "
            "(pip install 'firstlight[parity]')"
        )
