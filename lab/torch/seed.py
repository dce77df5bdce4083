"""seed_script.py, the 60/70 KiB, MiB, GiB scenario, in its three modes: each exits 0 under Cistern.

    python seed.py [--native]     with --native also what native PyTorch does
"""
import argparse
import os
import sys

import common


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--native", action="store_true")
    p.add_argument("--cap-gib", type=float, default=80)
    args = p.parse_args()
    folder = common.scripts_folder()
    script = folder and os.path.join(folder, "seed_script.py")
    if not script or not os.path.isfile(script):
        print("seed: skipped, there is no seed_script.py: CISTERN_GPU_SCRIPTS names its folder")
        return 0
    c = common.Checks("seed")
    for mode in ("native", "cistern") if args.native else ("cistern",):
        for what in ("plain", "pool", "pool-empty-cache"):
            argv = common.command(mode, [sys.executable, script, what, "--cap-gib", str(args.cap_gib)])
            done = common.run(argv, env=common.environment(mode), timeout=60)
            ok = done.rc == 0 and done.out.rstrip().endswith("ok")
            c.add(f"{what} under {mode}", f"ok, {done.wall:.1f} s" if ok else done.why(), "ok" if mode == "cistern" else "", ok if mode == "cistern" else None)
            if not ok and mode == "cistern":
                print(done.out[-1500:], done.err[-3000:])
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
