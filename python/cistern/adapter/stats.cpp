// stats.cpp: the figures that PyTorch reports, and limits.
#include "adapter.h"

#include <cmath>
#include <mutex>

namespace cistern_torch {

namespace {

using c10::CachingDeviceAllocator::Stat;
using c10::CachingDeviceAllocator::StatArray;

Stat stat(const cistern_value& v) {
  Stat s;
  s.current = v.current;
  s.peak = v.peak;
  s.allocated = v.added;
  s.freed = v.removed;
  return s;
}

StatArray stats(const cistern_grouped& g) { return {stat(g.all), stat(g.small), stat(g.large)}; }

// Fractions that were set before the device was used; negative: none.
struct Fractions {
  std::mutex mutex;
  double wanted[kMaxDevices];
  uint64_t own[kMaxDevices]; // the limit of Cistern's settings, 0 none
  Fractions() {
    for (double& w : wanted)
      w = -1;
    for (uint64_t& o : own)
      o = 0;
  }
};
Fractions& fractions = *new Fractions;

// limit puts a fraction in force. What Cistern's own settings limit stays limited. The caller holds the mutex.
void limit(DeviceIndex device, double fraction) {
  uint64_t bytes = fractions.own[device];
  if (fraction < 1) {
    // 0 would mean no limit, and no chunk is as small as one byte.
    const auto share = static_cast<uint64_t>(fraction * static_cast<double>(total_memory(device)));
    bytes = bytes == 0 ? std::max<uint64_t>(share, 1) : std::min(bytes, std::max<uint64_t>(share, 1));
  }
  Recorded recorded(nullptr, nullptr);
  check(lib.set_limit(device, bytes));
}

} // namespace

void library_stats(DeviceIndex device, cistern_stats* out) {
  *out = cistern_stats{};
  out->size = sizeof *out;
  if (lib.get_stats != nullptr && lib.get_stats(device, out) != CISTERN_OK)
    *out = cistern_stats{};
}

size_t total_memory(DeviceIndex device) {
  uint64_t free_bytes = 0, total = 0;
  check(lib.mem_info(device, &free_bytes, &total));
  return total;
}

void limit_touch(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(fractions.mutex);
  lib.get_limit(device, &fractions.own[device]);
  double wanted = fractions.wanted[device];
  if (wanted < 0)
    wanted = wanted_fraction(); // of PYTORCH_CUDA_ALLOC_CONF
  if (wanted < 1)
    limit(device, wanted);
}

DeviceStats Adapter::getDeviceStats(DeviceIndex device) {
  check_device(device);
  cistern_stats s;
  library_stats(device, &s);
  DeviceStats d;
  d.allocation = stats(s.allocations);
  d.segment = stats(s.segments);
  d.active = stats(s.active);
  d.inactive_split = stats(s.inactive);
  d.allocated_bytes = stats(s.allocated);
  d.reserved_bytes = stats(s.reserved);
  d.active_bytes = stats(s.active_bytes);
  d.inactive_split_bytes = stats(s.inactive_bytes);
  d.requested_bytes = stats(s.requested);
  d.num_alloc_retries = s.retries;
  d.num_ooms = s.ooms - quiet_ooms[device].load();
  d.num_sync_all_streams = s.stream_syncs;
  d.num_device_alloc = s.device_allocs;
  d.num_device_free = s.device_frees;
  d.max_split_size = static_cast<int64_t>(Settings::max_split_size());
  set_pool_stats(&d, [&] { return touched[device].load() ? pools_known(device) : std::vector<MempoolId_t>(); },
                 [&](MempoolId_t pool, Stat* reserved) {
                   cistern_pool_stats p{};
                   p.size = sizeof p;
                   if (lib.pool_get_stats(device, Ids(pool), &p) != CISTERN_OK)
                     return;
                   reserved->current = static_cast<int64_t>(p.reserved);
                   reserved->peak = static_cast<int64_t>(p.peak_reserved);
                 });
  // oversize_allocations and oversize_segments stay 0: no block is exempt from being split.
  return d;
}

void Adapter::resetAccumulatedStats(DeviceIndex device) {
  check_device(device);
  if (!touched[device].load())
    return;
  check(lib.reset_accumulated(device));
  quiet_ooms[device] = 0;
}

void Adapter::resetPeakStats(DeviceIndex device) {
  check_device(device);
  if (touched[device].load())
    check(lib.reset_peaks(device));
}

double Adapter::getMemoryFraction(DeviceIndex device) {
  check_device(device);
  if (!touched[device].load()) {
    std::lock_guard<std::mutex> lock(fractions.mutex);
    const double wanted = fractions.wanted[device];
    return wanted >= 0 ? wanted : wanted_fraction();
  }
  uint64_t bytes = 0;
  check(lib.get_limit(device, &bytes));
  return bytes == 0 ? 1.0 : std::min(1.0, static_cast<double>(bytes) / static_cast<double>(total_memory(device)));
}

void Adapter::setMemoryFraction(double fraction, DeviceIndex device) {
  check_device(device);
  TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction, ". Please set within [0, 1].");
  std::lock_guard<std::mutex> lock(fractions.mutex);
  fractions.wanted[device] = fraction;
  if (touched[device].load())
    limit(device, fraction);
}

// The largest request that would be met now: cuDNN's benchmark asks before it picks an algorithm's workspace. PyTorch's own
// answer, given 0, is what is free on the device, or the largest cached block; a limit holds here as well.
void Adapter::cacheInfo(DeviceIndex device, size_t* largest) {
  check_device(device);
  if (*largest == 0) {
    size_t free_bytes = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    cistern_stats s;
    library_stats(device, &s);
    if (s.limit != 0) {
      const auto reserved = static_cast<uint64_t>(s.reserved.all.current);
      free_bytes = std::min<size_t>(free_bytes, s.limit > reserved ? s.limit - reserved : 0);
    }
    *largest = free_bytes;
  }
  if (!touched[device].load())
    return;
  uint64_t cached = 0;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  if (lib.largest_free(device, stream, &cached) == CISTERN_OK && cached > *largest)
    *largest = cached;
}

} // namespace cistern_torch
