# SPDX-License-Identifier: Apache-2.0
"""Measuring a start on the machine at hand: checkpoints of the real sizes, reads, whole runs."""
