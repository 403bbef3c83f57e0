"""Wait for what other processes do."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition came to hold within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
