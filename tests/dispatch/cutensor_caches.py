"""cuTENSOR's caches on disk and its incremental autotune, as its documentation has them: a part of the stand-in.

Of a file that it did not write itself the stand-in makes an AssertionError, as the library might crash.
"""

import json
import os

INVALID, IO_ERROR = 7, 24


class Caches:
    """The functions of caches; the stand-in of the library derives from it."""

    def __init__(self):
        self.kernels, self.tried, self.plans_kept = set(), {}, 64  # compiled ones; by operation; of plans
        self.broken = False  # whether reading fails, as of another driver's version
        self.reads = True  # whether anything may be read

    def tries(self, chosen, key):
        """The kernel of the next plan of an operation: another one each time, and in the end the second best."""
        count = self.tried.setdefault(key, 0)
        self.tried[key] = min(count + 1, chosen.count)
        chosen.rank = count if count < chosen.count else 1
        return chosen

    def _HandleResizePlanCache(self, library, count):
        assert self.alive[library.value].kind == "handle"
        self.tried, self.plans_kept = {}, count

    def _HandleWritePlanCacheToFile(self, library, path):
        return self._written(path, "plans", self.tried)

    def _HandleReadPlanCacheFromFile(self, library, path, count):
        found = self._found(path, "plans")
        if found is None:
            return INVALID
        assert len(found) <= self.plans_kept
        self.tried, count._obj.value = dict(found), len(found)
        return 0

    def _WriteKernelCacheToFile(self, library, path):
        return self._written(path, "kernels", sorted(self.kernels)) if self.kernels else 0

    def _ReadKernelCacheFromFile(self, library, path):
        found = self._found(path, "kernels")
        if found is None:
            return INVALID
        self.kernels |= set(found)
        return 0

    @staticmethod
    def _written(path, kind, things):
        assert os.path.isabs(path)
        try:
            with open(path, "wb") as file:
                file.write(json.dumps([kind, things]).encode())
        except OSError:
            return IO_ERROR
        return 0

    def _found(self, path, kind):
        assert self.reads, "the library was given a file that is none"
        with open(path, "rb") as file:
            stored = json.loads(file.read())
        assert stored[0] == kind
        return None if self.broken else stored[1]
