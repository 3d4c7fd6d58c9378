# SPDX-License-Identifier: Apache-2.0
"""The timeline of this process. Imported first, so that nothing of a start escapes it."""

from firstlight.timeline import Timeline

TIMELINE = Timeline.of_process()
