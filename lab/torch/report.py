"""One table of what the programs of this folder measured, from the results folder.

    python report.py [FOLDER...]
"""
import json
import os
import sys

import common


def rows(folder):
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith("checks-") and name.endswith(".jsonl"):
            with open(path) as f:
                yield from map(json.loads, f)
        elif name.startswith("fidelity-") and name.endswith(".jsonl"):
            with open(path) as f:
                cases = [json.loads(line) for line in f]
            ran = [c for c in cases if not c.get("skip")]
            bad = [c["case"] for c in ran if not c["ok"]]
            yield {"program": "fidelity", "what": f"{name[:-6]}: cases that pass", "got": f"{len(ran) - len(bad)} of {len(ran)}, {len(cases) - len(ran)} skipped",
                   "want": "all", "ok": not bad}


def main():
    found = [r for folder in (sys.argv[1:] or [common.out_folder()]) for r in rows(folder)]
    if found:
        print(common.checks_table([{**r, "what": f"{r['program']}: {r['what']}" if r["program"] != "fidelity" else r["what"]} for r in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
