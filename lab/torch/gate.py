"""Runs a script of real work on command: imports what it will need, says READY, waits for a line on standard
input, starts CUDA, and says what the process holds before the script and after it.

    python gate.py SCRIPT NAME        then, on standard input: {"argv": ["NAME", "--steps", "40"]}

So several processes can import at once and then work one after the other, undisturbed.
"""
import json
import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import common


def prepare(name):
    import torch  # noqa: F401
    if name == "gpt2_varlen":
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401
    elif name == "generate_serving":
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
    elif name == "detection":
        import torchvision  # noqa: F401
    elif name == "multistream_prefetch":
        import timm  # noqa: F401


def held():
    """Of the device, by this process: what NVML says, else what is gone from the whole device."""
    import torch
    torch.cuda.synchronize()
    own = common.device_use()
    free, total = torch.cuda.mem_get_info()
    return {"own": own, "taken": total - free, "reserved": torch.cuda.memory_reserved()}


def main():
    script, name = sys.argv[1:3]
    prepare(name)
    print("READY", flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return 0  # it is not needed any more
    import torch
    torch.cuda.init()
    torch.cuda.current_stream()
    common.require_cistern()
    print("CONTEXT " + json.dumps(held()), flush=True)
    sys.argv = [script, *json.loads(line)["argv"]]
    runpy.run_path(script, run_name="__main__")
    end = held()
    stats = torch.cuda.memory_stats()
    end["num_sync_all_streams"] = stats["num_sync_all_streams"]
    print("END " + json.dumps(end), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
