// checkpoint.cpp: the live allocations of a pool, listed and brought back, as torch.compile's CUDA graph trees need.
//
// A graph that is replayed makes tensors that no allocator was asked for. Before another graph is recorded behind it, the
// pool is put back into the state in which that graph left it: exactly the blocks that lived then are live again.
#include "adapter.h"

#include <mutex>

namespace cistern_torch {

namespace {

struct PoolState final : cca::AllocatorState {
  DeviceIndex device;
  MempoolId_t pool;
  std::vector<cistern_block> live;
};

std::vector<cistern_block> live_blocks(DeviceIndex device, MempoolId_t pool) {
  std::vector<cistern_block> blocks;
  if (!pool_known(device, pool))
    return blocks; // nothing was allocated from it
  size_t n = 0;
  do { // other threads may allocate between the calls
    blocks.resize(n + n / 8);
    check(lib.pool_blocks(device, Ids(pool), blocks.data(), blocks.size(), &n));
  } while (n > blocks.size());
  blocks.resize(n);
  return blocks;
}

} // namespace

bool Adapter::checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                       const std::unordered_set<void*>& expected) {
  check_device(device);
  const std::vector<cistern_block> live = live_blocks(device, pool);
  if (live.size() != expected.size())
    return false;
  for (const cistern_block& b : live)
    if (expected.count(reinterpret_cast<void*>(b.addr)) == 0)
      return false;
  return true;
}

std::shared_ptr<cca::AllocatorState> Adapter::getCheckpointState(DeviceIndex device, MempoolId_t pool) {
  getPoolUseCount(device, pool); // throws where there is no such pool
  auto state = std::make_shared<PoolState>();
  state->device = device;
  state->pool = pool;
  state->live = live_blocks(device, pool);
  return state;
}

cca::CheckpointDelta Adapter::setCheckpointPoolState(DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) {
  const auto* s = dynamic_cast<const PoolState*>(state.get());
  TORCH_CHECK(s != nullptr && s->device == device, "Expected the checkpoint of a pool of this device");
  getPoolUseCount(device, s->pool);
  cca::CheckpointDelta delta;
  if (s->live.empty() && !pool_known(device, s->pool))
    return delta;
  for (const cistern_block& b : live_blocks(device, s->pool))
    delta.ptrs_freed.push_back(reinterpret_cast<void*>(b.addr));
  {
    Recorded recorded(cca::RecordContext::STATE);
    check(lib.pool_restore(device, Ids(s->pool), s->live.data(), s->live.size()));
  }
  for (const cistern_block& b : s->live) {
    void* p = reinterpret_cast<void*>(b.addr);
    delta.dataptrs_allocd.emplace_back(p, p, raw_deleter(), c10::Device(c10::DeviceType::CUDA, device));
  }
  return delta;
}

} // namespace cistern_torch
