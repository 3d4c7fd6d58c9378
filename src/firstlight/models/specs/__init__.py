# SPDX-License-Identifier: Apache-2.0
"""What each network consists of: its architecture and its parameters. Imports no jax."""
