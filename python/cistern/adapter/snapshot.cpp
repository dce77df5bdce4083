// snapshot.cpp: all memory and what is in it, as torch.cuda.memory_snapshot shows it.
#include "adapter.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace cistern_torch {

namespace {

struct Snapshot {
  cistern_snapshot* p = nullptr;
  ~Snapshot() {
    if (p != nullptr)
      lib.snapshot_free(p);
  }
};

struct Order {
  std::mutex mutex;
  int32_t last = 0;
  std::map<uint64_t, int32_t> numbers[kMaxDevices];
  int32_t of(DeviceIndex device, uint64_t addr) {
    int32_t& n = numbers[device][addr];
    return n != 0 ? n : n = ++last;
  }
};
Order& order = *new Order; // never destroyed: see Adapter

// Segments of one device, or of one pool of it, appended; returns the bytes in use.
size_t add_segments(DeviceIndex device, MempoolId_t pool, std::vector<SegmentInfo>* out) {
  const bool all = pool.first == 0 && pool.second == 0;
  if (!touched[device].load())
    return 0;
  Snapshot snap;
  const Ids ids(pool);
  const int code = lib.snapshot_take(device, all ? nullptr : static_cast<const uint64_t*>(ids), &snap.p);
  if (!all && code == CISTERN_INVALID)
    return 0; // no such pool there, nor memory that one has left
  check(code);
  size_t active = 0;
  std::vector<SegmentInfo> segments;
  segments.reserve(snap.p->num_segments);
  for (size_t i = 0; i < snap.p->num_segments; i++) {
    const cistern_segment& g = snap.p->segments[i];
    SegmentInfo info;
    info.device = device;
    info.address = g.addr;
    info.total_size = g.size;
    set_stream(&info, g.stream);
    info.is_large = g.large != 0;
    info.is_expandable = g.expandable != 0;
    info.owner_private_pool_id = {g.pool[0], g.pool[1]};
    info.context_when_allocated = segment_context(device, g.addr);
    info.blocks.reserve(g.blocks);
    for (size_t j = g.first_block; j < g.first_block + g.blocks; j++) {
      const cistern_block& b = snap.p->blocks[j];
      cca::BlockInfo block;
      block.size = b.size;
      block.requested_size = b.requested;
      block.allocated = b.state == CISTERN_BLOCK_USED;
      block.active = b.state != CISTERN_BLOCK_FREE;
      if (block.allocated)
        info.allocated_size += b.size;
      if (block.active) {
        info.active_size += b.size;
        info.requested_size += b.requested;
        block.context_when_allocated = block_context(device, b.addr);
      }
      info.blocks.push_back(std::move(block));
    }
    active += info.active_size;
    segments.push_back(std::move(info));
  }
  std::stable_sort(segments.begin(), segments.end(),
                   [](const SegmentInfo& a, const SegmentInfo& b) { return a.address < b.address; });
  {
    std::lock_guard<std::mutex> lock(order.mutex);
    std::map<uint64_t, int32_t> seen;
    for (SegmentInfo& info : segments)
      set_order(&info, seen[info.address] = order.of(device, info.address));
    if (all) // what is not among them is gone
      order.numbers[device].swap(seen);
  }
  std::move(segments.begin(), segments.end(), std::back_inserter(*out));
  return active;
}

} // namespace

void segment_made(DeviceIndex device, void* ptr) {
  std::lock_guard<std::mutex> lock(order.mutex);
  order.numbers[device][reinterpret_cast<uint64_t>(ptr)] = ++order.last;
}

void segment_gone(DeviceIndex device, void* ptr) {
  std::lock_guard<std::mutex> lock(order.mutex);
  order.numbers[device].erase(reinterpret_cast<uint64_t>(ptr));
}

SnapshotInfo Adapter::take_snapshot(MempoolId_t pool, bool include_traces) {
  SnapshotInfo out;
  if (initialized() && !(mode.load() & kForked)) {
    if (include_traces)
      copy_traces(&out);
    for (int d = 0; d < device_count; d++) {
      const auto device = static_cast<DeviceIndex>(d);
      const size_t active = add_segments(device, pool, &out.segments);
      record_snapshot(device, active, pool);
    }
  }
  describe_settings(&out.config_metadata);
  return out;
}

std::vector<ExpandableSize> Adapter::expandable_sizes(DeviceIndex device) {
  check_device(device);
  std::vector<SegmentInfo> segments;
  add_segments(device, {0, 0}, &segments);
  std::map<std::pair<void*, bool>, size_t> sums; // by stream and size class
  for (const SegmentInfo& s : segments)
    if (s.is_expandable && s.address != 0)
      sums[{s.stream, !s.is_large}] += s.total_size;
  std::vector<ExpandableSize> out;
  for (const auto& [key, size] : sums)
    out.push_back({static_cast<cudaStream_t>(key.first), key.second, size});
  return out;
}

} // namespace cistern_torch
