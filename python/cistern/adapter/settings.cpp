// settings.cpp: PyTorch's allocator settings, and what becomes of them under Cistern.
//
// PyTorch reads them itself. Most steer how its own allocator cuts segments and have nothing to steer here; a message
// says which.
#include "adapter.h"

#include <cstdlib>
#include <cstring>

namespace cistern_torch {

namespace {

constexpr const char* no_fragments =
    "no effect: Cistern moves free chunks to where they are needed instead of keeping blocks whole";

const struct {
  const char* key;
  const char* what;
} known[] = {
    {"backend", "no effect: Cistern takes the place of either backend"},
    {"per_process_memory_fraction", "honoured, as a limit on what Cistern holds on each device"},
    {"expandable_segments",
     "no effect: memory is always mapped into larger ranges; for memory that is one segment of the driver's, "
     "as cudaIpcGetMemHandle needs it, set ipc:legacy in CISTERN_CONF"},
    {"expandable_segments_reserve", "no effect: Cistern reserves addresses by what is allocated"},
    {"expandable_segments_reserve_by_class", "no effect: as expandable_segments_reserve"},
    {"throw_on_cudamalloc_oom", "no effect: a request fails after all other ways to meet it, with the same error"},
    {"max_split_size_mb", no_fragments},
    {"max_non_split_rounding_mb", no_fragments},
    {"roundup_power2_divisions", no_fragments},
    {"large_segment_size_mb", "no effect: Cistern chooses the size of its chunks by what is asked for"},
    {"garbage_collection_threshold",
     "no effect: cached memory is moved to where it is needed before more is asked from the driver; to reserve less, set limit in "
     "CISTERN_CONF"},
    {"release_lock_on_cudamalloc",
     "no effect: requests that the cache meets do not wait for another stream's calls of the driver"},
    {"graph_capture_record_stream_reuse",
     "honoured: a capture reuses memory of several streams once it has joined them"},
};

std::string meaning(const std::string& key) {
  if (key.compare(0, 7, "pinned_") == 0)
    return "honoured by PyTorch, for host memory, which Cistern leaves alone";
  for (const auto& k : known)
    if (key == k.key)
      return k.what;
  return "unknown to Cistern";
}

// "a:1,b:[x:1,y:2]" → (a, 1), (b, [x:1,y:2])
std::vector<std::pair<std::string, std::string>> split(const char* s) {
  std::vector<std::pair<std::string, std::string>> out;
  std::string key, value;
  bool in_value = false;
  int depth = 0;
  for (;; s++) {
    if (*s == '\0' || (*s == ',' && depth == 0)) {
      if (!key.empty())
        out.emplace_back(std::move(key), std::move(value));
      key.clear();
      value.clear();
      in_value = false;
      if (*s == '\0')
        return out;
    } else if (*s == ':' && !in_value) {
      in_value = true;
    } else if (std::strchr(" \t\n", *s) == nullptr) {
      depth += *s == '[' ? 1 : *s == ']' ? -1 : 0;
      (in_value ? value : key) += *s;
    }
  }
}

} // namespace

namespace {

std::string describe(const std::string& name, const char* settings) {
  std::string out;
  for (const auto& [key, value] : split(settings))
    out += name + key + ":" + value + ": " + meaning(key) + "\n";
  return out;
}

} // namespace

std::string settings_report() {
  std::string out;
  // The first that is set is the one that PyTorch reads.
  for (const char* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const char* s = secure_getenv(name);
    if (s == nullptr)
      continue;
    out = describe(std::string(name) + " ", s);
    break;
  }
  const char* off = secure_getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
  if (off != nullptr && *off != '\0' && std::strcmp(off, "0") != 0)
    out += "PYTORCH_NO_CUDA_MEMORY_CACHING: honoured: each tensor comes from cudaMalloc, and Cistern holds nothing\n";
  return out;
}

} // namespace cistern_torch

// What becomes of settings that the program gives while it runs, a line each.
extern "C" __attribute__((visibility("default"))) const char* cistern_torch_settings_of(const char* settings) {
  thread_local std::string answer;
  try {
    answer = settings != nullptr ? cistern_torch::describe("", settings) : "";
    return answer.c_str();
  } catch (...) {
    return "";
  }
}
