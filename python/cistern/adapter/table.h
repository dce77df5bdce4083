// table.h: libcistern.so as a table of functions.
//
// It is filled when CUDA starts and never before: the Go runtime that the library carries has threads, which a fork would
// lose, and programs fork before they start CUDA (a DataLoader's workers do).
#pragma once

#include <cistern.h>

#include <string>

#define CISTERN_FUNCTIONS(X)                                                                                     \
  X(version) X(init) X(last_error) X(last_oom) X(malloc) X(free) X(alloc) X(release) X(record_stream) X(segment_base)    \
  X(find) X(stream_durable) X(trim) X(set_limit) X(get_limit) X(mem_info) X(largest_free) X(peer)               \
  X(on_out_of_memory) X(on_map) X(on_unmap) X(pool_create) X(capture_begin) X(capture_end) X(capture_reuse)              \
  X(pool_release) X(pool_trim)                                                                                  \
  X(upstream_set) X(pool_get_stats) X(pool_blocks) X(pool_restore) X(get_stats) X(reset_peaks) X(reset_accumulated) X(snapshot_take)              \
  X(snapshot_free) X(history) X(history_drain) X(share) X(open) X(close) X(library_default)

namespace cistern_torch {

struct Library {
#define CISTERN_POINTER(name) decltype(&::cistern_##name) name = nullptr;
  CISTERN_FUNCTIONS(CISTERN_POINTER)
#undef CISTERN_POINTER

  // load opens the library at path and fills the table; it returns what went wrong in words, empty on success.
  std::string load(const char* path);
};

extern Library lib;

} // namespace cistern_torch
