// install.cpp: the C functions by which Python puts the adapter under PyTorch, and the loading of the library.
//
// None of them throws. What takes the place of PyTorch's allocator is looked up at run time in libtorch_cuda.so, which
// exports no other way in; an error names a version without it.
#include "adapter.h"

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <dlfcn.h>

namespace cistern_torch {

std::string Library::load(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return why != nullptr ? why : std::string("cannot load ") + path;
  }
#define CISTERN_LOOK_UP(fn)                                                        \
  fn = reinterpret_cast<decltype(fn)>(dlsym(handle, "cistern_" #fn));              \
  if (fn == nullptr)                                                               \
    return std::string(path) + " has no cistern_" #fn ": it is of another version of Cistern";
  CISTERN_FUNCTIONS(CISTERN_LOOK_UP)
#undef CISTERN_LOOK_UP
  return "";
}

namespace {

// The message for the calling thread; valid until its next call.
thread_local std::string answer;

using Change = void (*)(const std::shared_ptr<cca::CUDAAllocator>&);

Change find_change() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Change>(
      dlsym(torch != nullptr ? torch : RTLD_DEFAULT,
            "_ZN5torch4cuda22CUDAPluggableAllocator22changeCurrentAllocatorERKSt10shared_ptrIN3c104cuda20CUDACachingAllocator"
            "13CUDAAllocatorEE"));
}

// What c10 had for CUDA before the adapter; until PyTorch 2.8 nothing.
c10::Allocator* torchs_own = nullptr;

// put puts an allocator into c10's table, where torch.accelerator looks, with the lowest priority that it takes: PyTorch's own has
// 0, from 2.12 on 1.
void put(c10::Allocator* a) {
  for (int priority = 0; priority <= UINT8_MAX; priority++) {
    c10::SetAllocator(c10::DeviceType::CUDA, a, static_cast<uint8_t>(priority));
    if (c10::GetAllocator(c10::DeviceType::CUDA) == a)
      return;
  }
}

std::string install(const char* library, const char* conf) {
  if (adapter != nullptr)
    return "";
  const cca::CUDAAllocator* current = cca::get();
  if (current != nullptr && const_cast<cca::CUDAAllocator*>(current)->initialized())
    return "CUDA has been started already: enable Cistern before the first use of a GPU";
  const Change change = find_change();
  if (change == nullptr)
    return "this PyTorch has no torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator";
  // PyTorch parses its settings when they are first asked for, and takes one that names another backend than the allocator in
  // place for a mistake: so now, while that is its own. A bad setting is thrown again when CUDA starts, as ever.
  try {
    cca::CUDAAllocatorConfig::instance();
  } catch (...) {
  }
  auto* a = new Adapter(library != nullptr ? library : "libcistern.so", conf != nullptr ? conf : "", conf != nullptr);
  change(std::shared_ptr<cca::CUDAAllocator>(a, [](cca::CUDAAllocator*) {})); // never destroyed
  torchs_own = c10::GetAllocator(c10::DeviceType::CUDA);
  put(a);
  adapter = a;
  return "";
}

} // namespace
} // namespace cistern_torch

#define CISTERN_EXPORT extern "C" __attribute__((visibility("default")))

// cistern_torch_install makes PyTorch allocate through Cistern from the time CUDA starts, with libcistern.so at library and
// these settings (NULL: those of CISTERN_CONF). It returns NULL, or why not.
CISTERN_EXPORT const char* cistern_torch_install(const char* library, const char* conf) {
  using namespace cistern_torch;
  try {
    answer = install(library, conf);
    return answer.empty() ? nullptr : answer.c_str();
  } catch (const c10::Error& e) {
    answer = e.what_without_backtrace();
  } catch (const std::exception& e) {
    answer = e.what();
  } catch (...) {
    return "an unknown exception";
  }
  return answer.c_str();
}

// cistern_torch_replaced says that the program has put another allocator in the adapter's place. PyTorch does not tell c10 of
// that, so what is looked up there is again what it would be without Cistern.
CISTERN_EXPORT void cistern_torch_replaced(void) {
  using namespace cistern_torch;
  if (adapter != nullptr && c10::GetAllocator(c10::DeviceType::CUDA) == adapter)
    put(torchs_own);
}

// The version of PyTorch that the adapter was compiled for.
CISTERN_EXPORT const char* cistern_torch_abi(void) { return TORCH_VERSION; }

// cistern_torch_start starts Cistern as the start of CUDA does, for a self-test. It returns NULL, or why not.
CISTERN_EXPORT const char* cistern_torch_start(int devices) {
  using namespace cistern_torch;
  try {
    adapter->init(devices);
    return nullptr;
  } catch (const std::exception& e) {
    answer = e.what();
    return answer.c_str();
  }
}

// 1 once CUDA has started on Cistern in this process.
CISTERN_EXPORT int cistern_torch_started(void) {
  return cistern_torch::adapter != nullptr && cistern_torch::adapter->initialized() ? 1 : 0;
}

// What becomes of each of PyTorch's allocator settings that is given, a line each; "" where none is.
CISTERN_EXPORT const char* cistern_torch_settings(void) {
  using namespace cistern_torch;
  try {
    answer = settings_report();
    return answer.c_str();
  } catch (...) {
    return "";
  }
}
