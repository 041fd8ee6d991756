"""What the tests of memory that is kept look at: what the driver has given out, and what of it is kept."""

from __future__ import annotations

SHAPE = (4, 8)
UNIT = 512


def taken(driver):
    """The bytes that the driver has given out."""
    return sum(-(-size // UNIT) * UNIT for _, size, _ in driver.memory.values())


def kept(dev):
    """The blocks that are kept, and their bytes."""
    lists = list(dev.blocks._lists)
    return sum(len(each.bases) for each in lists), sum(len(each.bases) * each.nbytes for each in lists)


def room(dev):
    """The bytes that lists may keep."""
    return sum(each.capacity * each.nbytes for each in dev.blocks._lists if each.is_open)


def made_again(dev, where=None, shape=SHAPE):
    """The address of memory that is allocated on a stream, used there and let go of."""
    with where or dev.executor().stream:
        return dev.zeros(shape).ptr
