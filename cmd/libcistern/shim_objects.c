//go:build linux && cgo

/* The functions of cistern.h about named objects, as those in shim.c. */
#include "shim.h"
#include "shim_guard.h"
#include "_cgo_export.h"

#include <stddef.h>

#define NEED_NAME                                              \
  if (name == NULL)                                            \
    return invalid("name is NULL: expected the name of an object")

PUBLIC int cistern_node_build(int device, const char *name, uint64_t bytes, const cistern_object_options *options, void **ptr) {
  NEED(ptr);
  *ptr = NULL;
  NEED_NAME;
  GUARD;
  cistern_object_options o = {0};
  if (options != NULL)
    SIZED(o, options, ttl);
  uintptr_t p = 0;
  int code = coreNodeBuild(device, (char *)name, bytes, o.mode, (char *)o.layout, (char *)o.labels, o.ttl, &p);
  *ptr = (void *)p;
  return code;
}

PUBLIC int cistern_node_commit(void *ptr, const char *sha256) {
  GUARD;
  return coreNodeCommit((uintptr_t)ptr, (char *)sha256);
}

PUBLIC int cistern_node_abandon(void *ptr) {
  GUARD;
  return coreNodeAbandon((uintptr_t)ptr);
}

PUBLIC int cistern_node_open(int device, const char *name, int64_t user, uint64_t generation, void **ptr) {
  NEED(ptr);
  *ptr = NULL;
  NEED_NAME;
  GUARD;
  uintptr_t p = 0;
  int code = coreNodeOpen(device, (char *)name, user, generation, &p);
  *ptr = (void *)p;
  return code;
}

PUBLIC int cistern_node_close(void *ptr) {
  GUARD;
  return coreNodeClose((uintptr_t)ptr);
}

PUBLIC int cistern_node_write(void *ptr, uint64_t offset, const void *src, uint64_t bytes, void *stream) {
  GUARD;
  return coreNodeCopy((uintptr_t)ptr, offset, (uintptr_t)src, bytes, (uintptr_t)stream, 1);
}

PUBLIC int cistern_node_read(void *ptr, uint64_t offset, void *dst, uint64_t bytes, void *stream) {
  GUARD;
  return coreNodeCopy((uintptr_t)ptr, offset, (uintptr_t)dst, bytes, (uintptr_t)stream, 0);
}

PUBLIC char *cistern_node_describe(void *ptr) {
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (!shim_ready())
    return NULL;
  return coreNodeDescribe((uintptr_t)ptr);
}

PUBLIC char *cistern_node_objects(const char *name, int64_t user) {
  if (!ALIVE()) {
    forked();
    return NULL;
  }
  if (!shim_ready())
    return NULL;
  return coreNodeObjects((char *)name, user);
}

PUBLIC int cistern_node_remove(const char *name, int64_t user, uint64_t generation) {
  NEED_NAME;
  GUARD;
  return coreNodeRemove((char *)name, user, generation);
}
