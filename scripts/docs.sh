#!/bin/sh
# docs.sh : builds the site of the documents into bin/site, by mkdocs in an environment of its own, bin/mkdocs. A broken link is a
# failure.
set -eu
scripts/need.sh python3
if ! cmp -s docs/requirements.txt bin/mkdocs/requirements.txt; then
  rm -rf bin/mkdocs
  # Debian has the module in a package of its own.
  python3 -c 'import ensurepip, venv' 2>/dev/null || scripts/need.sh --try python3-venv 2>/dev/null
  python3 -m venv bin/mkdocs
  bin/mkdocs/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
  cp docs/requirements.txt bin/mkdocs/requirements.txt
fi
# Not --quiet: what is not printed is no failure to --strict.
NO_MKDOCS_2_WARNING=1 bin/mkdocs/bin/mkdocs build --strict --clean
echo "the site: bin/site/index.html"
