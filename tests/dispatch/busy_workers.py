"""What keeps a worker of a supervisor busy, breaks it, or is refused by it."""

import threading

from dispatch.errors import BadRequest

PATIENCE = 120  # seconds, on a machine that has other things to do


class Hold:
    """Keeps a worker busy from `entered` until `release`."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


def defect() -> None:
    raise ZeroDivisionError("a defect")


def refuse() -> None:
    raise BadRequest("a", "this", "that")
