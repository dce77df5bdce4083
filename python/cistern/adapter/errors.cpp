// errors.cpp: what a program sees when memory cannot be allocated, and the way there.
#include "adapter.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <mutex>

namespace cistern_torch {

std::atomic<int64_t> quiet_ooms[kMaxDevices];

namespace {

struct Observers {
  std::mutex mutex;
  std::vector<cca::OutOfMemoryObserver> list;
};
Observers& observers = *new Observers; // never destroyed: they may hold Python objects

// As in "CUDA_ERROR_ILLEGAL_ADDRESS" and "cudaErrorIllegalAddress", which are one error: only letters and digits, lower case.
std::string squeezed(const char* s, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; i++)
    if (std::isalnum(static_cast<unsigned char>(s[i])))
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(s[i])));
  return out;
}

// The CUDA error that the words name, cudaSuccess if none. Few names of the driver's errors differ from the runtime's.
cudaError_t named_error(const std::string& words) {
  const size_t at = words.find("CUDA_ERROR_");
  if (at == std::string::npos)
    return cudaSuccess;
  size_t end = at;
  while (end < words.size() && (std::isupper(static_cast<unsigned char>(words[end])) ||
                                std::isdigit(static_cast<unsigned char>(words[end])) || words[end] == '_'))
    end++;
  const std::string name = squeezed(words.data() + at, end - at);
  static const struct {
    const char* name;
    cudaError_t code;
  } others[] = {{"cudaerroroutofmemory", cudaErrorMemoryAllocation},
                {"cudaerrorlaunchfailed", cudaErrorLaunchFailure},
                {"cudaerrornotinitialized", cudaErrorInitializationError},
                {"cudaerrordeinitialized", cudaErrorCudartUnloading},
                {"cudaerrorinvalidhandle", cudaErrorInvalidResourceHandle},
                {"cudaerrorinvalidcontext", cudaErrorDeviceUninitialized}};
  for (const auto& o : others)
    if (name == o.name)
      return o.code;
  for (int c = 1; c < 1000; c++) {
    const char* n = cudaGetErrorName(static_cast<cudaError_t>(c));
    if (n != nullptr && squeezed(n, std::string(n).size()) == name)
      return static_cast<cudaError_t>(c);
  }
  return cudaErrorUnknown;
}

// What NVML says of the processes on the device, in PyTorch's words; empty where NVML cannot be asked.
std::string processes(int device) {
  // As versions 2 and 3 of the call have it; the call without a version has a shorter one.
  struct Process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
  };
  static void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (nvml == nullptr)
    return "";
  static auto const init = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
  static auto const find = reinterpret_cast<int (*)(const char*, void**)>(dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2"));
  static auto const list =
      reinterpret_cast<int (*)(void*, unsigned*, Process*)>(dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3"));
  if (init == nullptr || find == nullptr || list == nullptr)
    return "";
  static const bool started = init() == 0;
  char bus[64];
  void* handle = nullptr;
  if (!started || cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess || find(bus, &handle) != 0)
    return "";
  std::vector<Process> procs(8);
  unsigned n = 8;
  constexpr int too_small = 7;
  int got = list(handle, &n, procs.data());
  for (int tries = 0; got == too_small && tries < 4; tries++) {
    n += 8;
    procs.resize(n);
    got = list(handle, &n, procs.data());
  }
  if (got != 0)
    return "";
  std::string out;
  for (unsigned i = 0; i < n && i < procs.size(); i++) {
    if (procs[i].pid == static_cast<unsigned>(getpid()))
      out += "Including non-PyTorch memory, this process";
    else
      out += "Process " + std::to_string(procs[i].pid);
    out += " has " + c10::CachingDeviceAllocator::format_size(procs[i].used) + " memory in use. ";
  }
  return out;
}

// Cistern's own lines behind PyTorch's, which says already what the first of them does.
std::string findings(const std::string& words) {
  std::string out;
  for (size_t at = words.find('\n'); at != std::string::npos;) {
    const size_t end = words.find('\n', at + 1);
    out += "\nCistern: " + words.substr(at + 1, end == std::string::npos ? end : end - at - 1);
    at = end;
  }
  return out.empty() ? " Cistern: " + words : out;
}

// Throws OutOfMemoryError for the request, with the library's message; observers are notified before.
[[noreturn]] void out_of_memory(const Request& r, const Context& context, const std::string& words, const cistern_oom& oom) {
  using c10::CachingDeviceAllocator::format_size;
  cistern_stats s;
  library_stats(r.device, &s);
  uint64_t device_free = oom.device_free, device_total = oom.device_total;
  if (device_total == 0)
    lib.mem_info(r.device, &device_free, &device_total);
  const uint64_t allowed = oom.limit != 0 ? oom.limit : device_total;

  record_oom(r, device_free, context);
  c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(r.size), s.allocated.all.current, s.reserved.all.current,
                                   c10::Device(c10::DeviceType::CUDA, r.device));
  std::vector<cca::OutOfMemoryObserver> tell;
  {
    std::lock_guard<std::mutex> lock(observers.mutex);
    tell = observers.list;
  }
  for (const auto& observer : tell)
    observer(r.device, r.size, allowed, device_free);

  const auto allocated = static_cast<uint64_t>(s.allocated.all.current);
  const auto reserved = static_cast<uint64_t>(s.reserved.all.current);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(r.size), ". GPU ",
      static_cast<int>(r.device), " has a total capacity of ", format_size(device_total), " of which ",
      format_size(device_free), " is free. ", processes(r.device),
      oom.limit != 0 ? format_size(oom.limit) + " allowed; " : std::string(), "Of the allocated memory ",
      format_size(allocated), " is allocated by PyTorch, ",
      oom.pinned != 0 ? "with " + format_size(oom.pinned) + " held by private pools (e.g., CUDA Graphs), " : std::string(),
      "and ", format_size(reserved > allocated ? reserved - allocated : 0),
      " is reserved by PyTorch but unallocated.", findings(words));
}

// The callback stage, before a request fails: PyTorch's own callbacks, which free what it keeps of tensors that were sent to other
// processes, for one.
extern "C" int run_callbacks(void*, int, uint64_t) {
  bool freed = false;
  try {
    auto* const registry = c10::FreeCudaMemoryCallbacksRegistry();
    for (const auto& name : registry->Keys()) {
      try {
        freed |= registry->Create(name)->Execute();
      } catch (const std::exception& e) {
        TORCH_WARN_ONCE("Cistern: the free-memory callback ", name, " failed: ", e.what());
      }
    }
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) { // it must not cross the library
  }
  return freed;
}

} // namespace

void stay() {
  for (;;)
    pause();
}

void callbacks_touch(DeviceIndex device) { check(lib.on_out_of_memory(device, run_callbacks, nullptr)); }

void add_observer(cca::OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> lock(observers.mutex);
  observers.list.push_back(std::move(observer));
}

std::string last_words(int* code) {
  char words[2048] = "";
  const int c = lib.last_error != nullptr ? lib.last_error(words, sizeof words) : CISTERN_OK;
  if (code != nullptr)
    *code = c;
  return words;
}

void raise(int code, const std::string& words) {
  if (code == CISTERN_FORKED)
    TORCH_CHECK(false,
                "Cannot use CUDA memory in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
                "start method. ",
                words.empty() ? "" : "Cistern: ", words);
  if (code == CISTERN_DRIVER) {
    cudaError_t err = named_error(words);
    if (err == cudaSuccess)
      err = cudaPeekAtLastError();
    if (err == cudaSuccess)
      err = cudaErrorUnknown;
    throw_cuda_error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, err,
                     std::string("CUDA error: ") + cudaGetErrorString(err) + "\nCistern: " + words +
                         "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
                         "stacktrace below might be incorrect.\nFor debugging consider passing "
                         "CUDA_LAUNCH_BLOCKING=1\n");
  }
  TORCH_CHECK(code != CISTERN_UNSUPPORTED, "Cistern cannot do this: ", words);
  TORCH_CHECK(false, "Cistern: ", words);
}

void check(int code) {
  if (C10_UNLIKELY(code != CISTERN_OK))
    raise(code, last_words());
}

void warn(int code, const char* what) {
  if (code != CISTERN_OK && code != CISTERN_DRIVER && code != CISTERN_FORKED)
    TORCH_WARN("Cistern: ", what, ": ", last_words());
}

void* refused(int code, const Request& r, const Context& context) {
  if (r.pooled)
    rethrow_custom();
  const std::string words = last_words();
  if (code != CISTERN_OUT_OF_MEMORY)
    raise(code, words);
  cistern_oom oom{};
  lib.last_oom(&oom);
  if (!r.pooled) {
    // Pools that may be used when everything else is exhausted. What fails there, whatever it is, is no failure of its own.
    for (const MempoolId_t& pool : pools_for_oom(r.device)) {
      Request again = r;
      again.pooled = true;
      again.pool = pool;
      void* p = nullptr;
      const bool recorded = mode.load(std::memory_order_acquire) & kHistory;
      const int got = recorded ? take_recorded(again, context, &p) : take_from_library(again, &p);
      forget_custom();
      if (got == CISTERN_OK || got == CISTERN_OUT_OF_MEMORY)
        quiet_ooms[r.device].fetch_add(1); // of the request, which is met after all, or of this attempt
      if (got == CISTERN_OK)
        return p;
    }
  }
  out_of_memory(r, context, words, oom);
}

} // namespace cistern_torch
