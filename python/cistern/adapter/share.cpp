// share.cpp: memory seen from other devices and other processes.
//
// The handle of a shared tensor is a string that PyTorch carries to the other process. Cistern's own are printable; those of
// PyTorch's allocator begin with a version, 1 to 3, and are understood where they name memory from cudaMalloc.
#include "adapter.h"

#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace cistern_torch {

namespace {

// Mapped is memory of another process, mapped here.
struct Mapped {
  DeviceIndex device;
  void* ptr = nullptr;
  bool legacy = false; // opened by cudaIpcOpenMemHandle
};

// What is mapped, by handle: the same memory is mapped once, as a legacy handle can be opened but once.
struct Opened {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<void>> pointers;
};
Opened& opened = *new Opened; // never destroyed: tensors are freed as late as in exit handlers

// Whether the first device has been given access to all memory of the second.
std::atomic<bool> reaches[kMaxDevices][kMaxDevices];

void unmap(const Mapped& m) {
  if (mode.load() & kForked)
    return; // it is the parent's mapping
  int current = 0;
  if (C10_CUDA_ERROR_HANDLED(cudaGetDevice(&current)) == cudaErrorCudartUnloading)
    return; // the process ends, and CUDA was first
  c10::cuda::CUDAGuard guard(m.device);
  // Work that was queued on any stream may still read it.
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  if (m.legacy)
    C10_CUDA_CHECK(cudaIpcCloseMemHandle(m.ptr));
  else
    check(lib.close(m.ptr));
}

Mapped map(const std::string& handle, DeviceIndex device) {
  Mapped m{device};
  const auto first = handle.empty() ? 0 : static_cast<unsigned char>(handle[0]);
  constexpr size_t head = 2; // version and kind
  constexpr unsigned char newest = 3; // PyTorch 2.15's; the kind c is the same in all
  const bool headed = first >= 1 && first <= newest && handle.size() >= head;
  if (headed && handle[1] == 'c' && handle.size() >= head + CUDA_IPC_HANDLE_SIZE) {
    cudaIpcMemHandle_t h;
    std::memcpy(&h, handle.data() + head, sizeof h);
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(&m.ptr, h, cudaIpcMemLazyEnablePeerAccess));
    m.legacy = true;
    return m;
  }
  TORCH_CHECK(!headed,
              "The tensor was shared by a process that does not use Cistern, from memory of PyTorch's expandable segments: run "
              "it under Cistern too, or without expandable_segments");
  check(lib.open(handle.c_str(), device, &m.ptr));
  return m;
}

} // namespace

cca::ShareableHandle Adapter::shareIpcHandle(void* ptr) {
  TORCH_CHECK(initialized(), "invalid device pointer: ", ptr);
  if (is_uncached(ptr)) { // as PyTorch's own would have it, which every process understands
    cudaIpcMemHandle_t h;
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&h, ptr));
    return {0, std::string("\x01" "c") + std::string(reinterpret_cast<const char*>(&h), sizeof h)};
  }
  char handle[CISTERN_HANDLE_MAX];
  const int code = lib.share(ptr, handle, sizeof handle);
  TORCH_CHECK(code != CISTERN_INVALID, "invalid device pointer: ", ptr, ": ", last_words());
  check(code);
  return {0, handle};
}

std::shared_ptr<void> Adapter::getIpcDevPtr(std::string handle) {
  TORCH_CHECK(initialized() && !(mode.load() & kForked), "CUDA is not started in this process");
  std::lock_guard<std::mutex> lock(opened.mutex);
  const auto it = opened.pointers.find(handle);
  if (it != opened.pointers.end())
    if (std::shared_ptr<void> p = it->second.lock())
      return p;
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  const Mapped m = map(handle, device);
  std::shared_ptr<void> p(m.ptr, [m, handle](void*) {
    try {
      {
        std::lock_guard<std::mutex> erasing(opened.mutex);
        const auto mine = opened.pointers.find(handle);
        // Between the end of the last reference and here, another thread may have opened it anew.
        if (mine != opened.pointers.end() && mine->second.expired())
          opened.pointers.erase(mine);
      }
      unmap(m);
    } catch (const std::exception& e) {
      TORCH_WARN("Cistern: memory of another process stays mapped: ", e.what());
    }
  });
  opened.pointers[std::move(handle)] = p;
  return p;
}

void Adapter::enablePeerAccess(DeviceIndex dev, DeviceIndex dev_to_access) {
  check_device(dev);
  check_device(dev_to_access);
  {
    c10::cuda::CUDAGuard guard(dev);
    const cudaError_t err = C10_CUDA_ERROR_HANDLED(cudaDeviceEnablePeerAccess(dev_to_access, 0));
    if (err == cudaErrorPeerAccessAlreadyEnabled)
      C10_CUDA_CLEAR_ERROR();
    else
      C10_CUDA_CHECK(err);
  }
  // That was for memory from cudaMalloc. Mapped memory is made accessible range by range.
  check(lib.peer(dev_to_access, dev));
  reaches[dev][dev_to_access].store(true, std::memory_order_release);
}

// PyTorch notes that there is access before it calls enablePeerAccess, so another thread may come here first, or in the middle
// of it. A copy between cudaMalloc's memory gets by without access; of mapped memory it is an error. So that thread does the
// same work, which waits for a thread that is at it.
static bool can_reach(int device, int other) {
  if (C10_LIKELY(reaches[device][other].load(std::memory_order_acquire)))
    return true;
  try {
    adapter->enablePeerAccess(static_cast<DeviceIndex>(device), static_cast<DeviceIndex>(other));
    return true;
  } catch (const std::exception&) { // the caller that asked for it gets the error
    return false;
  }
}

cudaError_t Adapter::memcpyAsync(void* dst, int dst_device, const void* src, int src_device, size_t count,
                                 cudaStream_t stream, bool p2p_enabled) {
  if (src_device == dst_device || (p2p_enabled && can_reach(src_device, dst_device)))
    return cudaMemcpyAsync(dst, src, count, cudaMemcpyDeviceToDevice, stream);
  // Without peer access only this one knows how to copy mapped memory.
  return cudaMemcpyPeerAsync(dst, dst_device, src, src_device, count, stream);
}

} // namespace cistern_torch
