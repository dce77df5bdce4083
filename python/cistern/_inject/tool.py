"""Runs a module of the package beside this folder, whatever Python it is run by: `python tool.py MODULE ARGUMENTS...`.
For the command cistern, which asks the Python of a program about PyTorch. The package is loaded by its place, so that
neither it nor what lies beside it has to be on the path."""

import os
import sys

if sys.version_info < (3, 9):
    sys.stderr.write("cistern: %s is Python %d.%d, and Cistern needs 3.9\n" % ((sys.executable,) + sys.version_info[:2]))
    sys.exit(2)


def main():
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    package = os.path.dirname(here)
    spec = importlib.util.spec_from_file_location("cistern", os.path.join(package, "__init__.py"),
                                                  submodule_search_locations=[package])
    module = importlib.util.module_from_spec(spec)
    sys.modules["cistern"] = module
    spec.loader.exec_module(module)
    return importlib.import_module("cistern." + sys.argv[1]).main(sys.argv[2:])


sys.exit(main())
