"""Uses all of the public API as a checked program would. mypy checks it (test_typing.py), and core() runs over the simulated device."""

import pathlib
from typing import Dict, List, Optional

import cistern
import cistern.cuda_core
import cistern.cupy
import cistern.fleet
import cistern.lightning
import cistern.node
import cistern.numba
import cistern.rmm
import cistern.tensorboard
import cistern.torch
import cistern.transformers
import cistern.wandb
from cistern.hints import DeviceStats, Groups, Keep, MemoryStats, ObjectInfo, PauseResult, PoolStats, Removable, StackUse, Stats, Value


def core(folder: pathlib.Path) -> None:
    stats: Stats = cistern.stats()
    devices: List[DeviceStats] = stats["devices"]
    for device in devices:
        groups: Groups = device["reserved"]
        value: Value = groups["all"]
        peaks: Dict[str, int] = {tag["name"]: tag["requested"] for tag in device["tags"]}
        blocks: int = sum(library["blocks"] for library in device["libraries"]) + value["peak"] + len(peaks)
        limits: List[int] = [pool["limit"] + pool["pool"][0] for pool in device["pools"]] + [blocks]
        print(device["name"], limits)
    flat: MemoryStats = cistern.memory_stats("cuda:0")
    sizes: List[int] = [cistern.memory_allocated(), cistern.max_memory_allocated(0), cistern.memory_reserved("cuda"),
                        cistern.max_memory_reserved(), flat.get("num_ooms", 0)]
    print(sizes, stats["version"], stats["settings"], cistern.version)
    cistern.reset_peak_memory_stats()
    cistern.reset_accumulated_memory_stats(0)
    with cistern.attribution("python", sample="1MiB", history=1000) as kept:
        cistern.write_trace(folder / "now.cistern")
    kept.remove()
    uses: List[StackUse] = cistern.stack_usage()
    frames: List[str] = [frame for use in uses for frame in use["frames"]]
    cistern.snapshot(folder / "now.pickle")
    cistern.report(str(folder / "oom"), child=True)
    cistern.report(None)
    page: cistern.Report = cistern.Report(folder / "now.cistern")
    page.save(folder / "now.html")
    text: str = page.text + page.html + str(page)
    registration: Removable = cistern.on_out_of_memory(lambda device, missing: device == missing, "cuda:0")
    registration.remove()
    keep: Keep = "disk"
    paused: PauseResult = cistern.pause(tag=cistern.tag("weights"), keep=keep, dir=folder)
    resumed: PauseResult = cistern.resume("weights", pool=(0, 0), device=0)
    cistern.pause_buffers("1MiB")
    cistern.pause_buffers(0)
    cistern.fleet.describe(dp=3, tp=1, pp=2)
    cistern.step()
    with cistern.node.allow_pause(tag="x", keep="drop", device=0, auto=True):
        pass
    free: int = cistern.node.available(0) + cistern.node.available()
    print(free)
    cistern.trim()
    cistern.empty_cache()
    print(paused["physical"], resumed["kept"], frames, len(text))


@cistern.tag("step")
def step(n: int) -> int:
    with cistern.tag("inner"):
        return n


def named_objects(path: pathlib.Path) -> int:
    cistern.node.put("weights/x", {"w": b"bytes"}, mode=0o640, ttl=60, labels={"model": "x"}, checksum=True)
    with cistern.node.get("weights/x", "cuda:0", user=None, generation=0) as found:
        found.verify()
        names: List[str] = list(found)
        array: cistern.node.Array = found.array("w")
        info: ObjectInfo = found.info
    loaded: cistern.node.Object = cistern.node.load_safetensors(path, device=0)
    listed: List[ObjectInfo] = cistern.node.objects("weights/x")
    cistern.node.remove("weights/x")
    return len(names) + array.ptr + info["bytes"] + len(loaded) + sum(o["readers"] for o in listed)


def errors() -> List[str]:
    found: List[str] = []
    try:
        cistern.resume()
    except cistern.OutOfMemoryError as e:
        found.append(str(e))
    except cistern.SettingsError as e:
        found.append(str(e))
    except cistern.CisternError as e:
        found.append(str(e))
    return found


def pytorch() -> int:
    mode = cistern.torch.enable("limit:70GiB")
    if mode == "plain":
        print(cistern.torch.why_plain())
    again: Optional[str] = cistern.torch.mode()
    upstream: cistern.torch.External = cistern.torch.External.library(pathlib.Path("libarena.so"), "alloc", "free")
    functions: cistern.torch.External = cistern.torch.PythonAllocator(lambda size, device, stream: None, lambda ptr, size, device, stream: None)
    cistern.torch.enable("limit:70GiB", upstream=functions)
    pool: cistern.torch.MemPool = cistern.torch.MemPool("chunks", upstream=upstream, limit="2GiB", on_oom=lambda missing: missing > 0)
    mine: PoolStats = pool.cistern_stats()
    all_pools: PoolStats = cistern.torch.pool_stats((0, 0), "cuda:0")
    named: PoolStats = cistern.torch.pool_stats(pool, device=0)
    cistern.pause(pool=pool)
    cooperation: Removable = cistern.torch.cooperate()
    cooperation.remove()
    return mine["reserved"] + all_pools["peak_reserved"] + named["blocks"] + len(again or "")


def loggers(writer: object, run: object) -> None:
    board: cistern.tensorboard.MemoryLogger = cistern.tensorboard.MemoryLogger(writer)
    board.log(7)
    row: cistern.wandb.MemoryLogger = cistern.wandb.MemoryLogger(run)
    row.log()


def libraries() -> int:
    cistern.cupy.enable()
    cistern.cupy.disable()
    cistern.numba.enable()
    cistern.numba.disable()
    cistern.rmm.enable()
    for cooperation in (cistern.cupy.cooperate(), cistern.numba.cooperate()):
        removable: Removable = cooperation
        removable.remove()
    return step(1)
