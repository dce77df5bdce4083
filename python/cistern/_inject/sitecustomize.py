# Run by every Python that a program under `cistern run` or `cistern record` starts, as the first of its path: see the
# module cistern._injected for what it is for. It steps out of the way, has PyTorch's import noticed, and hands over to
# the program's own sitecustomize. Any Python may come by, so this is in the language of all of them; those too old for
# the package are left alone.
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


class _Finder(object):
    """Notices the import of `torch`, and finds the package `cistern` beside this folder, whose siblings stay unseen."""

    def __init__(self, package):
        self.package = package
        self.seen = False

    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not self.seen:
            return self.noticed(self.others(name, path, target))
        if name == "cistern" and path is None:
            theirs = self.others(name, path, target)
            return theirs if self.is_other(theirs) else self.ours(name)
        return None

    def others(self, name, path, target):
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec = find(name, path, target)
                if spec is not None:
                    return spec
        return None

    def noticed(self, spec):
        loader = getattr(spec, "loader", None)
        run = getattr(loader, "exec_module", None)
        if run is None:
            return spec

        def exec_module(module):
            try:
                del loader.exec_module
            except AttributeError:
                pass
            run(module)
            if not self.seen:
                self.seen = True
                self.imported(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            sys.stderr.write("cistern: torch is imported in a way that cannot be followed, and left alone\n")
        return spec

    def is_other(self, spec):
        """Whether a package of this name is the program's own, and not another copy of this one."""
        origin = getattr(spec, "origin", None)
        return bool(origin) and not os.path.isdir(os.path.join(os.path.dirname(origin), "_inject"))

    def ours(self, name):
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, os.path.join(self.package, "__init__.py"),
                                       submodule_search_locations=[self.package])

    def imported(self, module):
        try:
            self.load().torch_imported(module)
        except Exception as e:
            sys.stderr.write("cistern: PyTorch is left alone: %s: %s\n" % (type(e).__name__, e))

    def load(self):
        """The module cistern._injected; under another name where the program has a `cistern` of its own."""
        import importlib

        name = "cistern"
        there = sys.modules.get(name)
        if self.is_other(getattr(there, "__spec__", None) if there else self.others(name, None, None)):
            name = "_cistern"
        if name not in sys.modules:
            from importlib.util import module_from_spec

            spec = self.ours(name)
            module = module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return importlib.import_module(name + "._injected")


sys.path[:] = [p for p in sys.path if not (isinstance(p, str) and p and os.path.abspath(p) == _here)]
sys.path_importer_cache.pop(_here, None)
if sys.version_info >= (3, 9) and os.environ.get("_CISTERN_INJECT"):
    sys.meta_path.insert(0, _Finder(os.path.dirname(_here)))

# The program's own sitecustomize, which the import system finds now and leaves in place of this module. Without one it
# is as if there had been none at all: Python asks for it, and takes that it is not there.
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402,F401
