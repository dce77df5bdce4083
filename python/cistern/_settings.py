"""CISTERN_CONF as this package changes it: settings that a program asks for before the library starts, which reads them then.

"key:value,key:value"; of several with one key the last counts. Processes that this one starts get the same, as they do from
cistern.torch.enable(conf).
"""

import os
from typing import Dict, Optional

VARIABLE = "CISTERN_CONF"

# What was asked for: a value for each key, None where the key is to be left out.
_wanted: Dict[str, Optional[str]] = {}


def parse(conf: str) -> Dict[str, str]:
    """The settings by key; what is no setting is left to the library to complain about."""
    found: Dict[str, str] = {}
    for item in conf.split(","):
        key, colon, value = item.strip().partition(":")
        if colon:
            found[key] = value
    return found


def current() -> Dict[str, str]:
    """The settings that the library will have, or was started with."""
    return parse(os.environ.get(VARIABLE, ""))


def merged(conf: str) -> str:
    """Settings with what was asked for in place of their own."""
    items = [item for item in conf.split(",") if item.strip() and item.strip().partition(":")[0] not in _wanted]
    return ",".join(items + ["%s:%s" % (key, value) for key, value in _wanted.items() if value is not None])


def want(settings: Dict[str, Optional[str]]) -> None:
    """Has the library start with these; a value of None leaves a key out."""
    _wanted.update(settings)
    conf = merged(os.environ.get(VARIABLE, ""))
    if conf or VARIABLE in os.environ:
        os.environ[VARIABLE] = conf
