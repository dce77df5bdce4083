"""cistern.Report: what `cistern report` says of a file, as an object that a notebook shows."""

import html
import os
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING, Optional

from . import _command
from ._errors import CisternError

if TYPE_CHECKING:
    from .hints import Path


class Report:
    """A report on a recorded run or on a request that ran out of memory, as `cistern report` makes it.

    A notebook shows its HTML report, `print` its text. It is made once, by the command, when the object is made.

    Args:
        path: a recording, a file of `cistern.report`, or the folder of such files, of which the newest is explained; None:
            this process now, as `write_trace` writes it.

    Raises:
        CisternError: the file cannot be read, or Cistern does not run yet in this process.

    Example:
        report = cistern.Report("oom/oom-4711-1.cistern")
        print(report)
        report.save("oom.html")
    """

    def __init__(self, path: "Optional[Path]" = None) -> None:
        folder = tempfile.mkdtemp(prefix="cistern-")
        try:
            self._name = "this process" if path is None else os.fsdecode(path)
            self._text, self._html = _made(_now(folder) if path is None else os.fsdecode(path), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def text(self) -> str:
        """The report as text."""
        return self._text

    @property
    def html(self) -> str:
        """The HTML report: one page that opens without a network."""
        return self._html

    def save(self, path: "Path") -> None:
        """Writes the HTML report.

        Args:
            path: the file.

        Raises:
            OSError: it cannot be written.
        """
        with open(path, "w", encoding="utf-8") as f:
            f.write(self._html)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "<cistern.Report of %s>" % self._name

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame of its own, as its styles and scripts are for a whole page."""
        return ('<iframe title="Cistern report of %s" srcdoc="%s" style="width: 100%%; height: 720px; border: 0" '
                'sandbox="allow-scripts allow-downloads"></iframe>' % (html.escape(self._name), html.escape(self._html)))


def _now(folder: str) -> str:
    from . import _attribution

    file = os.path.join(folder, "now.cistern")
    _attribution.write(file)
    return file


def _made(path: str, folder: str) -> "tuple[str, str]":
    page = os.path.join(folder, "page.html")
    done = subprocess.run([_command.path(), "report", "--color", "never", "--html", page, "--", path], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    if done.returncode != 0 or not os.path.exists(page):
        words = done.stderr.strip()
        raise CisternError((words[len("cistern: "):] if words.startswith("cistern: ") else words) or "no report of " + path)
    with open(page, encoding="utf-8") as f:
        return done.stdout, f.read()
