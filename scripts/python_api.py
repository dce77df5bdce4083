#!/usr/bin/env python3
"""python_api.py [--check]: writes docs/python-api.md from the docstrings of the Python package. --check: prints what differs, and
ends with status 1, in place of writing.

A docstring has a summary, paragraphs, and then sections of Args, Returns, Raises and Example, each indented.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "python-api.md")

# Modules with public names. Names that are classes of another library are described by the class that they share.
MODULES = ("cistern", "cistern.torch", "cistern.cupy", "cistern.numba", "cistern.rmm", "cistern.cuda_core", "cistern.fleet",
           "cistern.node", "cistern.lightning", "cistern.transformers", "cistern.tensorboard", "cistern.wandb")
MIXINS = {"cistern.torch.MemPool": "cistern._pools.MemPoolMixin", "cistern.lightning.MemoryCallback": "cistern.lightning.MemoryCallbackMixin",
          "cistern.transformers.MemoryCallback": "cistern.transformers.MemoryCallbackMixin"}

HEAD = """# Python API

This page is made from the docstrings of the package by `scripts/python_api.py`; `help(cistern)` has the same text. `import cistern` does no work and imports neither PyTorch nor the library. The package runs on Python 3.9 and newer.

The functions have type annotations, which a checker such as mypy reads. [Types](#types) lists the names in `cistern.hints`. A *device* is a number, `"cuda:1"`, a `torch.device` or a `cupy.cuda.Device`. A *size* is bytes, or text such as `"2GiB"`.

"""


def find(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def entries(module):
    """The public names of a module that are described: the objects with their full names."""
    for name in sorted(importlib.import_module(module).__all__, key=str.lower):
        full = module + "." + name
        found = find(MIXINS.get(full, full))
        if callable(found):
            yield full, found


def signature(name, found):
    """The name with parameters and their defaults, without types."""
    target = found.__init__ if inspect.isclass(found) else found
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(target).parameters.values()]
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    shown = str(inspect.Signature(parameters)).replace("'", '"')
    return name + shown


def sections(doc):
    """The text before the sections, and each section with its name."""
    parts = re.split(r"^(Args|Returns|Raises|Example):\n", inspect.cleandoc(doc), flags=re.M)
    return parts[0].strip(), list(zip(parts[1::2], (textwrap.dedent(p).strip() for p in parts[2::2])))


def items(text):
    """The entries of Args and Raises: the names with their descriptions."""
    return [(name, " ".join(words.split())) for name, words in
            re.findall(r"^(\w+): (.*(?:\n .*)*)", text, flags=re.M)]


def paragraphs(text):
    return "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", text))


def described(doc, arguments):
    """A docstring as Markdown. All arguments have to be described, where some are."""
    text, parts = sections(doc)
    lines = [paragraphs(text)]
    for title, body in parts:
        if title == "Returns":
            lines.append("Returns: " + paragraphs(body))
        elif title == "Example":
            lines.append("```python\n%s\n```" % body)
        else:
            found = items(body)
            if title == "Args" and [name for name, _ in found] != arguments:
                raise ValueError("the arguments are %s, described are %s" % (arguments, [name for name, _ in found]))
            heading = "Arguments" if title == "Args" else "Raises"
            lines.append(heading + ":\n\n" + "\n".join("- `%s`: %s" % item for item in found))
    return "\n\n".join(lines)


def function(name, found, level):
    target = found.__init__ if inspect.isclass(found) else found
    arguments = [n for n in inspect.signature(target).parameters if n not in ("self", "cls")]
    if not found.__doc__:
        raise ValueError("%s has no docstring" % name)
    try:
        words = described(found.__doc__, arguments)
    except ValueError as e:
        raise ValueError("%s: %s" % (name, e)) from None
    return "%s %s\n\n```py\n%s\n```\n\n%s\n" % (level, name, signature(name, found), words)


def methods(name, found):
    """The public methods and properties of a class that have docstrings."""
    for attribute, value in sorted(vars(found).items()):
        if attribute.startswith("_") or not getattr(value, "__doc__", None):
            continue
        if isinstance(value, property):
            yield "#### %s.%s\n\n%s\n" % (name, attribute, paragraphs(value.__doc__))
        else:
            yield function(name + "." + attribute, getattr(found, attribute), "####")


def errors():
    package = importlib.import_module("cistern")
    yield "## Errors\n\n`TypeError` and `ValueError` are for arguments of a wrong type or value.\n"
    for name in ("CisternError", "OutOfMemoryError", "SettingsError"):
        yield "### cistern.%s\n\n%s\n" % (name, paragraphs(inspect.cleandoc(getattr(package, name).__doc__)))


def hints():
    """The types: those of dictionaries with their keys, and the others with what follows them in the source."""
    module = importlib.import_module("cistern.hints")
    source = inspect.getsource(module)
    yield "## Types\n\nThese names are in `cistern.hints`.\n"
    rows = []
    for name in module.__all__:
        found = getattr(module, name)
        comment = re.search(r'^%s = .*\n"""(.*)"""$' % name, source, flags=re.M)
        words = comment[1] if comment else paragraphs(inspect.cleandoc(found.__doc__))
        fields = list(getattr(found, "__annotations__", {}))
        rows.append("- `%s`: %s%s" % (name, words, " Keys: " + ", ".join("`%s`" % f for f in fields) + "." if fields else ""))
    yield "\n".join(rows) + "\n"


def plugin():
    # Its module imports pytest, which need not be there.
    with open(os.path.join(ROOT, "python", "cistern", "pytest.py"), encoding="utf-8") as f:
        doc = re.match(r'"""(.*?)"""', f.read(), flags=re.S)[1]
    return "## The pytest plugin\n\n%s\n" % narrated(doc)


def narrated(doc):
    """The docstring of a module: indented paragraphs are code."""
    blocks = re.split(r"\n\n(?=\S)", inspect.cleandoc(doc))
    out = []
    for block in blocks:
        text, code = re.split(r"\n\n(?= )", block, maxsplit=1) if "\n\n " in block else (block, "")
        out.append(paragraphs(text))
        if code:
            out.append("```python\n%s\n```" % textwrap.dedent(code).strip())
    return "\n\n".join(out)


def page():
    found = [HEAD.rstrip() + "\n"]
    for module in MODULES:
        found.append("## %s\n" % module)
        for name, thing in entries(module):
            if inspect.isclass(thing) and issubclass(thing, Exception):
                continue
            found.append(function(name, thing, "###"))
            if inspect.isclass(thing):
                found.extend(methods(name, thing))
    found.extend(errors())
    found.append(plugin())
    found.extend(hints())
    return "\n".join(found)


def main():
    sys.path.insert(0, os.path.join(ROOT, "python"))
    wanted = page()
    if "--check" not in sys.argv[1:]:
        with open(PAGE, "w", encoding="utf-8") as f:
            f.write(wanted)
        return 0
    with open(PAGE, encoding="utf-8") as f:
        differs = list(difflib.unified_diff(f.read().splitlines(), wanted.splitlines(), "docs/python-api.md", "docstrings", lineterm=""))
    print("\n".join(differs))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
