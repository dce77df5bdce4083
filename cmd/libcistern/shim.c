//go:build linux && cgo

/* The functions of cistern.h. Each stands in front of a Go function and does what Go cannot: it refuses in a child of fork,
 * where Go would hang, and it answers what needs no Go at all. cistern.h documents the functions. */
#include "magazine.h"
#include "shim.h"
#include "shim_guard.h"
#include "stack.h"
#include "_cgo_export.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

PUBLIC const char *cistern_version(void) { return CISTERN_VERSION; }

PUBLIC int cistern_init(const char *conf) {
  GUARD;
  return coreInit((char *)conf);
}

PUBLIC int cistern_device_count(void) {
  if (!ALIVE()) {
    forked();
    return -1;
  }
  if (!shim_ready())
    return -1;
  return coreDeviceCount();
}

PUBLIC int cistern_last_error(char *buf, size_t n) {
  const shim_thread *t = shim_self;
  if (buf != NULL && n > 0)
    snprintf(buf, n, "%s", t ? t->words : "");
  return t ? t->code : CISTERN_OK;
}

PUBLIC int cistern_last_oom(cistern_oom *out) {
  NEED(out);
  if (shim_self == NULL || !shim_self->has_oom)
    return invalid("the thread's last failure was not out of memory");
  *out = shim_self->oom;
  return CISTERN_OK;
}

PUBLIC size_t cistern_last_report(char *buf, size_t n) {
  const char *report = shim_self != NULL && shim_self->report != NULL ? shim_self->report : "";
  if (buf != NULL && n > 0)
    snprintf(buf, n, "%s", report);
  return strlen(report);
}

/* Memory. */

/* failed has a request that has just failed written down, with the stack from which it came. */
static __attribute__((cold, noinline)) void failed(void) {
  shim_thread *t = shim_self;
  if (t == NULL || t->failed == 0)
    return;
  uintptr_t which = t->failed;
  t->failed = 0;
  stack_origin by;
  stack_take_failed(&by);
  coreFailed(which, &by);
}

/* alloc is for what the default pool is asked for without a tag: most of all there is. */
static inline int alloc(void **out, size_t size, int device, void *stream) {
  int known;
  *out = magazine_take(size, device, stream, &known);
  if (*out != NULL)
    return CISTERN_OK;
  READY;
  uint64_t turn = magazine_turn();
  uint32_t token = 0;
  int code = coreAllocMagazine((uintptr_t *)out, size, device, (uintptr_t)stream, &token);
  if (token != 0) {
    magazine_know(*out, size, token, turn);
    if (!known)
      magazine_know_stream(device, stream, token);
  }
  if (__builtin_expect(code != CISTERN_OK, 0))
    failed();
  return code;
}

/* plain reports whether a request says no more than its size and stream. */
static inline int plain(const cistern_alloc_options *o, uint32_t tag) {
  return (o->pool[0] | o->pool[1] | o->flags | o->library | o->reserved | tag) == 0;
}

/* request_watched is request where threads or stacks of callers are recorded. */
static int request_watched(void **out, size_t size, int device, void *stream, cistern_alloc_options *o, uint32_t tag) {
  READY;
  if (stack_watched() & WATCH_START)
    coreStart(); /* what goes wrong then does so again in the request, which says it */
  uint32_t watch = stack_watched() & ~(uint32_t)WATCH_START;
  stack_origin by;
  by.n = 0;
  if (watch != 0)
    stack_take(&by, watch, size);
  if (by.n == 0 && !(watch & WATCH_EVENTS) && plain(o, tag))
    return alloc(out, size, device, stream);
  int code = coreAlloc((uintptr_t *)out, size, device, (uintptr_t)stream, o, tag, watch != 0 ? &by : NULL);
  if (code != CISTERN_OK)
    failed();
  return code;
}

/* usual reports whether nothing more is recorded of the calling thread's requests. */
static inline int usual(void) { return __builtin_expect((stack_watched() | shim_tag()) == 0, 1); }

static int request(void **out, size_t size, int device, void *stream, cistern_alloc_options *o) {
  uint32_t tag = shim_tag();
  if (stack_watched() != 0)
    return request_watched(out, size, device, stream, o, tag);
  if (plain(o, tag))
    return alloc(out, size, device, stream);
  READY;
  int code = coreAlloc((uintptr_t *)out, size, device, (uintptr_t)stream, o, tag, NULL);
  if (code != CISTERN_OK)
    failed();
  return code;
}

/* freeing is the calling thread's number where threads of frees are recorded. */
static inline uint32_t freeing(void) { return stack_watched() & WATCH_EVENTS ? stack_thread() : 0; }

PUBLIC void *cistern_malloc(ssize_t size, int device, void *stream) {
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (size < 0) {
    invalid("size is negative");
    return NULL;
  }
  void *p = NULL;
  if (usual()) {
    alloc(&p, (size_t)size, device, stream);
    return p;
  }
  cistern_alloc_options o = {0};
  request(&p, (size_t)size, device, stream, &o);
  return p;
}

PUBLIC void cistern_free(void *ptr, ssize_t size, int device, void *stream) {
  (void)size, (void)device, (void)stream;
  if (ptr == NULL)
    return;
  if (!ALIVE()) {
    forked();
    return;
  }
  if (magazine_put(ptr))
    return;
  if (shim_ready())
    coreFree((uintptr_t)ptr, freeing());
}

PUBLIC int cistern_alloc(void **out, size_t size, int device, void *stream, const uint64_t pool[2]) {
  NEED(out);
  *out = NULL;
  GUARD_FORK;
  uint64_t pool0 = pool ? pool[0] : 0, pool1 = pool ? pool[1] : 0;
  if ((pool0 | pool1) == 0 && usual())
    return alloc(out, size, device, stream);
  cistern_alloc_options o = {.pool = {pool0, pool1}};
  return request(out, size, device, stream, &o);
}

PUBLIC int cistern_alloc_with(void **out, size_t size, int device, void *stream, const cistern_alloc_options *options) {
  NEED(out);
  *out = NULL;
  GUARD_FORK;
  cistern_alloc_options o = {0};
  if (options != NULL)
    SIZED(o, options, reserved);
  return request(out, size, device, stream, &o);
}

PUBLIC void *cistern_source_malloc(void *source, size_t size, int device) {
  const cistern_source *from = source;
  if (from == NULL) {
    invalid("source is NULL: expected a cistern_source");
    return NULL;
  }
  void *p = NULL;
  cistern_alloc_with(&p, size, device, from->stream, &from->options);
  return p;
}

PUBLIC void cistern_source_free(void *source, void *ptr, int device) {
  (void)source;
  cistern_free(ptr, 0, device, NULL);
}

PUBLIC uint32_t cistern_library(const char *name) {
  if (!ALIVE()) {
    forked();
    return 0;
  }
  if (name == NULL) {
    invalid("name is NULL: expected the library's name");
    return 0;
  }
  if (!shim_ready())
    return 0;
  return coreLibrary((char *)name);
}

PUBLIC const char *cistern_library_name(uint32_t library) {
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (!shim_ready())
    return NULL;
  return coreLibraryName(library);
}

PUBLIC int cistern_library_default(const char *name) {
  GUARD;
  if (name == NULL)
    return invalid("name is NULL: expected the library's name");
  return coreLibraryDefault((char *)name);
}

PUBLIC int cistern_library_usage(int device, cistern_library_use *out, size_t cap, size_t *n) {
  NEED(n);
  *n = 0;
  if (cap > 0)
    NEED(out);
  GUARD;
  return coreLibraryUsage(device, out, cap, n);
}

PUBLIC int cistern_release(void *ptr) {
  if (ptr == NULL)
    return CISTERN_OK;
  GUARD_FORK;
  if (magazine_put(ptr))
    return CISTERN_OK;
  READY;
  return coreFree((uintptr_t)ptr, freeing());
}

PUBLIC int cistern_release_on(void *ptr, void *stream) {
  if (ptr == NULL)
    return CISTERN_OK;
  GUARD_FORK;
  if (magazine_put_on(ptr, stream))
    return CISTERN_OK;
  READY;
  return coreFreeOn((uintptr_t)ptr, (uintptr_t)stream, freeing());
}

PUBLIC int cistern_record_stream(void *ptr, void *stream) {
  if (ptr == NULL)
    return CISTERN_OK;
  GUARD;
  magazine_forget(ptr);
  return coreRecordStream((uintptr_t)ptr, (uintptr_t)stream);
}

PUBLIC void *cistern_base(void *ptr, size_t *size) {
  if (size != NULL)
    *size = 0;
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (!shim_ready())
    return NULL;
  return coreBase((uintptr_t)ptr, size) ? ptr : NULL;
}

PUBLIC int cistern_segment_base(void *ptr, void **base, size_t *size) {
  uintptr_t at = 0;
  size_t bytes = 0;
  NEED(base);
  *base = NULL;
  if (size != NULL)
    *size = 0;
  GUARD;
  int code = coreSegmentBase((uintptr_t)ptr, &at, &bytes);
  *base = (void *)at;
  if (size != NULL)
    *size = bytes;
  return code;
}

PUBLIC int cistern_find(void *ptr, cistern_block *out) {
  NEED(out);
  memset(out, 0, sizeof *out);
  GUARD;
  return coreFind((uintptr_t)ptr, out);
}

PUBLIC int cistern_stream_durable(int device, void *stream) {
  GUARD;
  return coreStreamDurable(device, (uintptr_t)stream);
}

PUBLIC int cistern_trim(int device) {
  GUARD;
  return coreTrim(device);
}

PUBLIC int cistern_set_limit(int device, uint64_t bytes) {
  GUARD;
  return coreSetLimit(device, bytes);
}

PUBLIC int cistern_get_limit(int device, uint64_t *bytes) {
  NEED(bytes);
  *bytes = 0;
  GUARD;
  return coreGetLimit(device, bytes);
}

PUBLIC int cistern_mem_info(int device, uint64_t *free_bytes, uint64_t *total_bytes) {
  NEED(free_bytes);
  NEED(total_bytes);
  *free_bytes = *total_bytes = 0;
  GUARD;
  return coreMemInfo(device, free_bytes, total_bytes);
}

PUBLIC int cistern_node_available(int device, uint64_t *bytes) {
  NEED(bytes);
  *bytes = 0;
  GUARD;
  return coreNodeAvailable(device, bytes);
}

PUBLIC int cistern_largest_free(int device, void *stream, uint64_t *bytes) {
  NEED(bytes);
  *bytes = 0;
  GUARD;
  return coreLargestFree(device, (uintptr_t)stream, bytes);
}

PUBLIC int cistern_peer(int device, int peer) {
  GUARD;
  return corePeer(device, peer);
}

PUBLIC int cistern_on_out_of_memory(int device, int (*fn)(void *, int, uint64_t), void *ctx) {
  GUARD;
  if (fn == NULL)
    return invalid("fn is NULL: expected the function to call");
  return coreOnOutOfMemory(device, (uintptr_t)fn, (uintptr_t)ctx);
}

PUBLIC int cistern_off_out_of_memory(int device, int (*fn)(void *, int, uint64_t), void *ctx) {
  GUARD;
  if (fn == NULL)
    return invalid("fn is NULL: expected the function that was registered");
  if (shim_self != NULL && shim_self->calling)
    return invalid("cistern_off_out_of_memory was called by an out-of-memory function, whose end it would wait for");
  return coreOffOutOfMemory(device, (uintptr_t)fn, (uintptr_t)ctx);
}

PUBLIC int cistern_on_unmap(int device, void (*fn)(void *, int, void *, size_t), void *ctx) {
  GUARD;
  return coreOnUnmap(device, (uintptr_t)fn, (uintptr_t)ctx);
}

PUBLIC int cistern_on_map(int device, void (*fn)(void *, int, void *, size_t), void *ctx) {
  GUARD;
  return coreOnMap(device, (uintptr_t)fn, (uintptr_t)ctx);
}

/* Statistics. */

PUBLIC int cistern_get_stats(int device, cistern_stats *out) {
  NEED(out);
  GUARD;
  /* A caller compiled against another header wants as many fields as its struct has. */
  uint32_t size = out->size;
  if (size < offsetof(cistern_stats, allocations) || size > 1 << 16)
    return invalid("out->size: set it to sizeof(cistern_stats)");
  cistern_stats s;
  memset(&s, 0, sizeof s);
  int code = coreGetStats(device, &s);
  if (code != CISTERN_OK)
    return code;
  s.size = size;
  s.device = device;
  memset(out, 0, size);
  memcpy(out, &s, size < sizeof s ? size : sizeof s);
  return CISTERN_OK;
}

PUBLIC int cistern_reset_peaks(int device) {
  GUARD;
  return coreResetPeaks(device);
}

PUBLIC int cistern_reset_accumulated(int device) {
  GUARD;
  return coreResetAccumulated(device);
}

PUBLIC char *cistern_stats_json(void) {
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (!shim_ready())
    return NULL;
  return coreStatsJSON();
}

PUBLIC void cistern_string_free(char *s) { free(s); }

/* Tags. */

PUBLIC int cistern_tag_push(const char *name) {
  GUARD;
  if (name == NULL)
    return invalid("name is NULL: expected the tag's name");
  uint32_t tag;
  int code = coreTag((char *)name, &tag);
  if (code != CISTERN_OK)
    return code;
  static const char no_memory[] = "no host memory for the tag";
  shim_thread *t = shim_thread_get();
  if (t == NULL)
    return CISTERN_INTERNAL;
  if (t->num_tags == t->cap_tags) {
    size_t cap = t->cap_tags ? 2 * t->cap_tags : 16;
    uint32_t *tags = realloc(t->tags, cap * sizeof *tags);
    if (tags == NULL)
      return shim_fail(CISTERN_INTERNAL, no_memory, sizeof no_memory - 1);
    t->tags = tags;
    t->cap_tags = cap;
  }
  t->tags[t->num_tags++] = tag;
  return CISTERN_OK;
}

PUBLIC int cistern_tag_pop(void) {
  GUARD_FORK;
  shim_thread *t = shim_self;
  if (t == NULL || t->num_tags == 0)
    return invalid("no tag to pop: the thread has none");
  t->num_tags--;
  return CISTERN_OK;
}

PUBLIC const char *cistern_tag_name(uint32_t tag) {
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (!shim_ready())
    return NULL;
  return coreTagName(tag);
}

/* Callers of requests. */

PUBLIC int cistern_stacks(uint32_t kinds, uint64_t sample) {
  GUARD;
  return coreStacks(kinds, sample);
}

PUBLIC int cistern_stack_usage(int device, cistern_stack_use *out, size_t cap, size_t *n) {
  NEED(n);
  *n = 0;
  if (cap > 0)
    NEED(out);
  GUARD;
  return coreStackUsage(device, out, cap, n);
}

PUBLIC int cistern_stack_text(uint32_t stack, char *buf, size_t n) {
  if (n > 0) {
    NEED(buf);
    buf[0] = 0;
  }
  GUARD;
  return coreStackText(stack, buf, n);
}

PUBLIC int cistern_report(const char *dir, int child) {
  GUARD;
  return coreReport((char *)dir, child);
}

/* Snapshot and history. */

PUBLIC int cistern_trace_write(const char *path) {
  GUARD;
  if (path == NULL)
    return invalid("path is NULL: expected the name of a file");
  return coreTraceWrite((char *)path);
}

PUBLIC int cistern_snapshot_take(int device, const uint64_t pool[2], cistern_snapshot **out) {
  NEED(out);
  *out = NULL;
  GUARD;
  return coreSnapshotTake(device, pool != NULL, pool ? pool[0] : 0, pool ? pool[1] : 0, out);
}

PUBLIC void cistern_snapshot_free(cistern_snapshot *s) { free(s); /* one piece of memory */ }

PUBLIC int cistern_snapshot_write(const char *path) {
  GUARD;
  if (path == NULL)
    return invalid("path is NULL: expected the name of a file");
  return coreSnapshotWrite((char *)path);
}

PUBLIC int cistern_history(int device, size_t n) {
  GUARD;
  return coreHistory(device, n);
}

PUBLIC int cistern_history_hash(int device, uint64_t *hash) {
  NEED(hash);
  *hash = 0;
  GUARD;
  return coreHistoryHash(device, hash);
}

PUBLIC int cistern_history_drain(int device, cistern_event *buf, size_t cap, size_t *n, uint64_t *lost) {
  NEED(n);
  *n = 0;
  if (lost != NULL)
    *lost = 0;
  if (cap > 0)
    NEED(buf);
  GUARD;
  return coreHistoryDrain(device, buf, cap, n, lost);
}

/* Sharing. */

PUBLIC int cistern_share(void *ptr, char *handle, size_t cap) {
  GUARD;
  NEED(handle);
  if (cap > 0)
    handle[0] = 0;
  magazine_forget(ptr); /* its free ends the sharing, which Go must see */
  return coreShare((uintptr_t)ptr, handle, cap);
}

PUBLIC int cistern_open(const char *handle, int device, void **ptr) {
  NEED(ptr);
  *ptr = NULL;
  GUARD;
  if (handle == NULL)
    return invalid("handle is NULL: expected what cistern_share wrote");
  return coreOpen((char *)handle, device, (uintptr_t *)ptr);
}

PUBLIC int cistern_close(void *ptr) {
  GUARD;
  return coreClose((uintptr_t)ptr);
}
