# SPDX-License-Identifier: Apache-2.0
"""The three networks as pure functions over parameter trees."""
