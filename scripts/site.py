"""Hooks of mkdocs (mkdocs.yml): documents of the root folder become pages of the site, and links to other files of the tree
lead to the repository."""

import os
import posixpath
import re

from mkdocs.structure.files import File

# Documents that are in the root folder, where hosts of repositories look for them.
PAGES = {"ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def on_files(files, config):
    root = os.path.dirname(config["config_file_path"])
    for source, page in PAGES.items():
        if source != "README.md":
            with open(os.path.join(root, source), encoding="utf-8") as f:
                files.append(File.generated(config, page, content=_relinked(f.read(), "", page, config)))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri in PAGES.values() and page.file.src_uri != "index.md":
        return markdown  # relinked above
    return _relinked(markdown, posixpath.dirname("docs/" + page.file.src_uri), page.file.src_uri, config)


def _relinked(markdown, folder, page, config):
    """The text of a file in a folder of the tree, with links that are right in a page of the site."""

    def target(match):
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        if path in PAGES or path.startswith("docs/"):
            to = PAGES.get(path) or path[len("docs/"):]
            to = posixpath.relpath(to, posixpath.dirname(page) or ".")
        else:
            to = "%s/blob/main/%s" % (config["repo_url"], path)
        return match[1] + to + match[3]

    return LINK.sub(target, markdown)
