"""What of the documented names is left: missing ones with the issue that brings them, other parameters with
the reason, and words of the list that are no names.
"""

from __future__ import annotations

# name, or module with all in it -> (issue, reason)
MISSING: dict[str, tuple[str, str]] = {}

# name -> (difference, reason)
DIFFERENT: dict[str, tuple[str, str]] = {}

PROSE: set[str] = set()
