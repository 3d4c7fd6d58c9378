# SPDX-License-Identifier: Apache-2.0
"""From files to parameters: finding a model, checking it whole, reading it straight into place."""
