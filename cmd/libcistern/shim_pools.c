//go:build linux && cgo

/* The functions of cistern.h about pools, captures and paused memory, as those in shim.c. */
#include "shim.h"
#include "shim_guard.h"
#include "_cgo_export.h"

#include <stddef.h>

/* Pools. */

#define NEED_POOL                                              \
  if (pool == NULL)                                            \
    return invalid("pool is NULL: expected its two numbers")

PUBLIC int cistern_pool_create(int device, const uint64_t pool[2], const cistern_pool_options *options) {
  NEED_POOL;
  GUARD;
  cistern_pool_options o = {0};
  if (options != NULL)
    SIZED(o, options, alloc);
  if ((o.alloc == NULL) != (o.free == NULL))
    return invalid("options.alloc and options.free: give both or neither");
  shim_pool p = {o.flags, (uintptr_t)o.alloc, (uintptr_t)o.free, (uintptr_t)o.ctx, o.upstream, o.spill, o.limit,
                 (uintptr_t)o.on_out_of_memory, (uintptr_t)o.on_out_of_memory_ctx};
  return corePoolCreate(device, pool[0], pool[1], &p);
}

PUBLIC int cistern_upstream_check(int device, const char *upstream) {
  GUARD;
  if (upstream == NULL)
    return invalid("upstream is NULL: expected its name");
  return coreUpstreamCheck(device, (char *)upstream);
}

PUBLIC int cistern_upstream_set(void *(*alloc)(void *ctx, size_t size, int device, void *stream),
                                void (*free)(void *ctx, void *ptr, size_t size, int device, void *stream), void *ctx) {
  NEED(alloc);
  NEED(free);
  GUARD;
  return coreUpstreamSet((uintptr_t)alloc, (uintptr_t)free, (uintptr_t)ctx);
}

PUBLIC int cistern_pool_set_limit(int device, const uint64_t pool[2], uint64_t bytes) {
  NEED_POOL;
  GUARD;
  return corePoolSetLimit(device, pool[0], pool[1], bytes);
}

PUBLIC int cistern_pool_get_stats(int device, const uint64_t pool[2], cistern_pool_stats *out) {
  NEED_POOL;
  NEED(out);
  GUARD;
  uint32_t size = out->size;
  if (size < offsetof(cistern_pool_stats, reserved) || size > 1 << 16)
    return invalid("out->size: set it to sizeof(cistern_pool_stats)");
  cistern_pool_stats s;
  memset(&s, 0, sizeof s);
  int code = corePoolGetStats(device, pool[0], pool[1], &s);
  if (code != CISTERN_OK)
    return code;
  s.size = size;
  memset(out, 0, size);
  memcpy(out, &s, size < sizeof s ? size : sizeof s);
  return CISTERN_OK;
}

PUBLIC int cistern_pool_begin(int device, const uint64_t pool[2], void *stream) {
  NEED_POOL;
  GUARD;
  return corePoolBegin(device, pool[0], pool[1], (uintptr_t)stream);
}

PUBLIC int cistern_pool_end(int device, void *stream) {
  GUARD;
  return corePoolEnd(device, (uintptr_t)stream);
}

PUBLIC int cistern_capture_begin(int device, const uint64_t pool[2], void *stream) {
  NEED_POOL;
  GUARD;
  return coreCaptureBegin(device, pool[0], pool[1], (uintptr_t)stream);
}

PUBLIC int cistern_capture_end(int device, void *stream) {
  GUARD;
  return coreCaptureEnd(device, (uintptr_t)stream);
}

PUBLIC int cistern_capture_reuse(int device, int on) {
  GUARD;
  return coreCaptureReuse(device, on);
}

PUBLIC int cistern_pool_release(int device, const uint64_t pool[2]) {
  NEED_POOL;
  GUARD;
  return corePoolRelease(device, pool[0], pool[1]);
}

PUBLIC int cistern_pool_trim(int device, const uint64_t pool[2]) {
  NEED_POOL;
  GUARD;
  return corePoolTrim(device, pool[0], pool[1]);
}

PUBLIC int cistern_pool_blocks(int device, const uint64_t pool[2], cistern_block *out, size_t cap, size_t *n) {
  NEED_POOL;
  NEED(n);
  *n = 0;
  if (cap > 0)
    NEED(out);
  GUARD;
  return corePoolBlocks(device, pool[0], pool[1], out, cap, n);
}

PUBLIC int cistern_pool_restore(int device, const uint64_t pool[2], const cistern_block *blocks, size_t n) {
  NEED_POOL;
  GUARD;
  if (n > 0 && blocks == NULL)
    return invalid("blocks is NULL: expected the blocks to restore");
  if ((pool[0] | pool[1]) != 0)
    return corePoolRestore(device, pool[0], pool[1], (cistern_block *)blocks, n);
  magazine_hold(); /* some are freed, whose addresses other threads may be given before they are forgotten */
  int code = corePoolRestore(device, pool[0], pool[1], (cistern_block *)blocks, n);
  magazine_forget_all();
  magazine_release();
  return code;
}

/* Pause and resume. */

PUBLIC int cistern_pause(int device, const cistern_pause_options *options, cistern_pause_report *out) {
  if (out != NULL)
    memset(out, 0, sizeof *out);
  GUARD;
  cistern_pause_options o = {0};
  if (options != NULL)
    SIZED(o, options, pool);
  if (o.reserved != 0)
    return invalid("options.reserved: expected 0");
  magazine_hold();
  int code = corePause(device, o.pool != NULL, o.pool ? o.pool[0] : 0, o.pool ? o.pool[1] : 0, (char *)o.tag, o.keep, o.flags,
                       (char *)o.dir, out);
  magazine_release();
  return code;
}

PUBLIC int cistern_node_allow_pause(int device, const cistern_pause_options *options) {
  GUARD;
  cistern_pause_options o = {0};
  if (options != NULL)
    SIZED(o, options, pool);
  if (o.reserved != 0)
    return invalid("options.reserved: expected 0");
  return coreNodeAllowPause(device, o.pool != NULL, o.pool ? o.pool[0] : 0, o.pool ? o.pool[1] : 0, (char *)o.tag, o.keep, o.flags,
                            (char *)o.dir);
}

PUBLIC int cistern_node_deny_pause(int device) {
  GUARD;
  return coreNodeDenyPause(device);
}

PUBLIC int cistern_resume(int device, const cistern_pause_options *options, cistern_pause_report *out) {
  if (out != NULL)
    memset(out, 0, sizeof *out);
  GUARD;
  cistern_pause_options o = {0};
  if (options != NULL)
    SIZED(o, options, pool);
  return coreResume(device, o.pool != NULL, o.pool ? o.pool[0] : 0, o.pool ? o.pool[1] : 0, (char *)o.tag, out);
}

PUBLIC int cistern_pause_buffers(int device, uint64_t bytes) {
  GUARD;
  return corePauseBuffers(device, bytes);
}
