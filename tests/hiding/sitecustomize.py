"""Python imports this when it starts, where its folder is in PYTHONPATH: what a test has named is not there to import.

PENSTOCK_HIDDEN: names of modules, with commas between them.
"""

import importlib.machinery
import os
import sys

HIDDEN = set(os.environ.get("PENSTOCK_HIDDEN", "").split(","))


class Hiding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hiding
