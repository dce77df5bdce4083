// upstream.h: where the memory of a pool comes from when it is not the device's own: between pools.cpp and upstream.cpp.
#pragma once

#include "adapter.h"

#include <atomic>
#include <string>

namespace cistern_torch {

// PoolWanted is what cistern._pools says of a pool for which PyTorch has no word. Its fields are those of a C struct there.
struct PoolWanted {
  cistern_pool_options options; // size and flags as in cistern.h
  uint32_t bare;                // alloc and free take no ctx: they are as torch.cuda.memory.CUDAPluggableAllocator has them
  uint32_t reserved;
  void (*dropped)(void* token); // called once, when none of the functions above is called any more; NULL: none
  void* token;
};

// Spec is a copy of it, kept as long as its functions may be called.
struct Spec {
  explicit Spec(const PoolWanted& w);
  ~Spec();
  Spec(const Spec&) = delete;
  Spec& operator=(const Spec&) = delete;
  PoolWanted wanted;

 private:
  std::string upstream, spill;
};

// Source is what the library calls for a pool of one device, through C functions. It lives as long as the pool or any memory
// of it.
struct Source {
  MempoolId_t pool;
  Pointer allocator; // or
  std::shared_ptr<const Spec> spec;
  std::atomic<int64_t> refs{1}; // the pool's, and one for each segment
  void unref();
};

// make_source writes what is wanted of the pool into the library's options; the Source that they name, or null where they name
// none.
Source* make_source(MempoolId_t pool, Pointer allocator, std::shared_ptr<const Spec> spec,
                    cistern_pool_options* out);

// What was said of the pool, wherever it is used; its home is the device for which PyTorch made it, and with which it goes.
void remember_spec(DeviceIndex home, MempoolId_t pool, std::shared_ptr<const Spec> spec);
std::shared_ptr<const Spec> spec_of(MempoolId_t pool);
void forget_spec(DeviceIndex home, MempoolId_t pool);

// is_asking says whether the calling thread is in the pool's callback for out of memory, where it must not be given memory of
// the pool.
bool is_asking(DeviceIndex device, MempoolId_t pool);

} // namespace cistern_torch
