// adapter.h: PyTorch's CUDA allocator on Cistern.
//
// PyTorch calls the Adapter (compat.h). It has no blocks and no cache. Everything that PyTorch hands to an allocator (filters of pools,
// observers, trackers, contexts, custom allocators) is C++ and stays here. The library behind the table sees integers and C
// functions that catch everything, because no exception may cross Go frames. The object is made once and never destroyed:
// tensors are freed as late as in exit handlers.
//
// One word, mode, says whether history is recorded, memory is tracked, a pool is allocated from, or caching is off. While it
// is 0 a request is one call of the library (allocator.cpp).
//
// History is the library's list of events. While it is on, each thread notes the requests it makes of the library, with their
// stacks, so that every event gets its stack, whichever thread reads it (history.cpp).
//
// PyTorch opens a scope right before a capture begins. The adapter announces the capture then, and streams that join later when
// they first allocate. An announcement belongs to the thread that made it until the capture is seen. A scope belongs to the
// thread that opened it, or to the capture that it was opened for (pools.cpp).
//
// A thread that Python ends while it is in a function that the library called stays there (stay), because Go frames cannot be
// unwound.
//
// Locks: Python's interpreter lock, then one of those here, then the library's. None of those here is held while a context
// is gathered, an observer called, a custom allocator asked or a capture announced, which may wait for the GPU. None is held
// while the library works for a request under history. Trackers are notified under a lock of their device's alone, as by
// PyTorch's own allocator.
#pragma once

#include "compat.h"
#include "table.h"

#include <cxxabi.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace cistern_torch {

// Why a request cannot take the fast path; mode is 0 where it can.
enum Mode : uint32_t {
  kNotReady = 1, // CUDA has not been started
  kForked = 2,   // this is a child of fork, and the parent's allocator is not usable
  kHistory = 4,  // history is recorded, or segments are tracked
  kScopes = 8,   // some thread allocates from a pool, or a capture is announced
  kUncached = 16 // caching is off, or was: some memory comes from cudaMalloc
};
extern std::atomic<uint32_t> mode;
void set_mode(uint32_t bit, bool on);

constexpr int kMaxDevices = 64;

// Request is one allocation on its way.
struct Request {
  size_t size;
  DeviceIndex device;
  cudaStream_t stream;
  bool pooled = false; // from the pool below, not from the default one
  MempoolId_t pool{0, 0};
};

extern Adapter* adapter;

// ---- allocator.cpp

extern int device_count;
extern std::atomic<bool> touched[kMaxDevices]; // devices whose memory PyTorch has used

// touch makes the device ready, starting its context, before PyTorch first uses memory there.
void touch(DeviceIndex device);
// check_device throws where the allocator knows no such device.
void check_device(DeviceIndex device);
// take_from_library is one request, without retries: the library's code, and *out.
int take_from_library(const Request& r, void** out);
// is_ours says whether ptr came from cudaMalloc while caching was off.
bool is_uncached(void* ptr);

// ---- errors.cpp

// last_words is what the library says of this thread's last failure.
std::string last_words(int* code = nullptr);
// raise throws what PyTorch would for a failure of the library other than out of memory.
[[noreturn]] void raise(int code, const std::string& words);
// check throws if code is not CISTERN_OK.
void check(int code);
// warn says so if code is not CISTERN_OK, for what destructors call and must not throw. Errors of the driver it leaves alone:
// after one that broke the context, or at exit when the driver is gone, there would be one for every tensor.
void warn(int code, const char* what);
// refused deals with a request that the library refused with the code: returns memory that was found elsewhere after all, or
// throws.
void* refused(int code, const Request& r, const Context& context);
void add_observer(cca::OutOfMemoryObserver observer);
// stay keeps the calling thread where it is, without end: in a function that the library called when Python, which is over, ended the
// thread. Up to 3.13 it does that by unwinding the thread's frames (pthread_exit), and those of Go cannot be unwound; from 3.14 on
// such threads stay where they are. No lock may be held.
[[noreturn]] void stay();
void callbacks_touch(DeviceIndex device); // what touch does for PyTorch's free-memory callbacks
// Failed requests that were no out-of-memory error of PyTorch's, to be taken off the library's count.
extern std::atomic<int64_t> quiet_ooms[kMaxDevices];

// ---- pools.cpp

void pools_init(int devices);
// route finds the pool that the calling thread's request comes from.
void route(Request* r);
// pools_for_oom are the pools that may be used when everything else is exhausted.
std::vector<MempoolId_t> pools_for_oom(DeviceIndex device);
bool pool_known(DeviceIndex device, MempoolId_t pool);
std::vector<MempoolId_t> pools_known(DeviceIndex device);
bool is_capturing(cudaStream_t stream);
// ids is a pool as the library names it.
struct Ids {
  uint64_t v[2];
  explicit Ids(MempoolId_t p) : v{p.first, p.second} {}
  operator const uint64_t*() const { return v; }
};

// ---- upstream.cpp

// What a custom allocator threw during the calling thread's request waits until that is over: forget_custom before it,
// rethrow_custom after it failed.
void forget_custom();
void rethrow_custom();

// ---- history.cpp

// gather asks PyTorch for the stack if history wants it at this level. No lock may be held.
Context gather(cca::RecordContext level);

// Call is what a thread asks of the library at the moment.
struct Call {
  Context context;
  const void* freed = nullptr; // what it gives back, if that is one block
  std::string compiled = "N/A", metadata{};
};

// Recorded brackets a call of the library: while history is on, what the calling thread causes meanwhile is the call's doing. No
// lock is held for it. On a device, or with -1 on all, events are read when it begins and when it ends.
class Recorded {
 public:
  explicit Recorded(cca::RecordContext level);
  Recorded(Context context, const void* freed, DeviceIndex device = -1);
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  const DeviceIndex device_;
  const bool on_;
};

// Unrecorded is for the time in which the library calls other code: what the thread causes then does not belong to the call that
// it makes of the library.
struct Unrecorded {
  Recorded none{Context(), nullptr};
};
int take_recorded(const Request& r, const Context& context, void** out);
int release_recorded(void* ptr);
void history_touch(DeviceIndex device); // what touch does for history
void record_oom(const Request& r, size_t device_free, const Context& context);
bool tracked(); // a tracker follows segments, to register them with NCCL
void copy_traces(SnapshotInfo* out);
void record_snapshot(DeviceIndex device, size_t active, MempoolId_t pool);
// What history knows of the memory at addr.
Context block_context(DeviceIndex device, uint64_t addr);
Context segment_context(DeviceIndex device, uint64_t addr);

// ---- stats.cpp

// library_stats asks for the statistics; zeros where they are not available, as in a child of fork.
void library_stats(DeviceIndex device, cistern_stats* out);
size_t total_memory(DeviceIndex device);
void limit_touch(DeviceIndex device); // what touch does for limits

// ---- upstream.cpp

// start_upstream has all pools that name no memory of their own, the default pool among them, get it from the functions that
// cistern_torch_upstream was given, if any. The library has started and no device of it.
void start_upstream();

// ---- snapshot.cpp

// The order in which segments came, which NCCL takes for the same in all ranks: of those that a custom allocator makes it is
// known, others are numbered when they are first seen.
void segment_made(DeviceIndex device, void* ptr);
void segment_gone(DeviceIndex device, void* ptr);

// ---- settings.cpp

std::string settings_report();

} // namespace cistern_torch
