/*
 * cistern.h: the C API of Cistern, a caching allocator of GPU memory that every library of a process can share.
 *
 *     #include <cistern.h>
 *     #include <stdio.h>
 *
 *     int main(void) {
 *       void *p = cistern_malloc(64 << 20, 0, NULL); // 64 MiB on device 0, for work queued on its default stream
 *       if (p == NULL) {
 *         char message[2048];
 *         cistern_last_error(message, sizeof message); // what was tried, the top allocations, what would help
 *         fprintf(stderr, "%s\n", message);
 *         return 1;
 *       }
 *       // Queue kernels and copies that use p. They need not be done when p is released.
 *       return cistern_release(p);
 *     }
 *
 * Compile: cc prog.c $(pkg-config --cflags --libs cistern). In CMake: find_package(cistern), target Cistern::cistern.
 * Run without a GPU: CISTERN_CONF=driver:sim:8GiB ./a.out
 *
 * Arguments: sizes are bytes, devices are CUDA ordinals. A stream is a CUstream or cudaStream_t; 0 and 1 are the legacy
 * default stream of the device, 2 is the calling thread's per-thread default stream. The library knows streams by context and
 * id: a handle that was destroyed and is in use for a new stream is another stream. Addresses are aligned to 512 bytes.
 *
 * Results: functions that return int return a CISTERN_ code, 0 for success. After any other code, cistern_last_error in the
 * same thread has the message.
 *
 * Settings: CISTERN_CONF ("key:value,key:value") is read when the library is first used; cistern_init before that replaces
 * it. A program with more rights than its user (setuid, setgid, file capabilities) gets no settings from the environment, and
 * no file, program or library that a variable names is used. docs/settings.md and docs/environment.md list both.
 *
 * Threads: all functions may be called from any thread. They leave the thread's CUDA context as it was.
 *
 * Fork: in a child of fork, functions fail with CISTERN_FORKED or NULL and frees do nothing, unless the child was the first
 * to load the library.
 *
 * Signals: a handler must not call the library. It may run on a thread that is in the library, with or without SA_ONSTACK,
 * and use 200 KiB of stack. The first call of a thread gives the thread an alternate signal stack unless it has one.
 *
 * Descriptors: a program may close descriptors that it did not open. The library then opens its own again, or returns an error.
 */
#ifndef CISTERN_H
#define CISTERN_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CISTERN_OK = 0,
  CISTERN_OUT_OF_MEMORY = 1, /* every reclaim stage failed; cistern_last_oom has the figures */
  CISTERN_INVALID = 2,       /* a bad argument: unknown pointer, pool, device or setting */
  CISTERN_DRIVER = 3,        /* the CUDA driver failed; the message names its error */
  CISTERN_FORKED = 4,        /* this process is a child of fork and cannot use the parent's allocator */
  CISTERN_UNSUPPORTED = 5,   /* this device or this memory does not support it */
  CISTERN_INTERNAL = 6       /* a bug in Cistern: the message says where */
};

/* ---- the library ---------------------------------------------------------------------------------------------- */

/* The version of this header. CISTERN_VERSION_NUMBER is for #if: version 1.2.3 is 10203. */
#define CISTERN_VERSION "0.4.0"
#define CISTERN_VERSION_MAJOR 0
#define CISTERN_VERSION_MINOR 4
#define CISTERN_VERSION_PATCH 0
#define CISTERN_VERSION_NUMBER (CISTERN_VERSION_MAJOR * 10000 + CISTERN_VERSION_MINOR * 100 + CISTERN_VERSION_PATCH)

/* The version of the library, "1.2.3", as a constant string. */
const char *cistern_version(void);

/* cistern_init starts the library with these settings; NULL means those of CISTERN_CONF. It is optional: every other function
 * starts the library with those of CISTERN_CONF. CISTERN_INVALID: bad settings, or the library was started with others. */
int cistern_init(const char *conf);

/* The number of devices, or -1. */
int cistern_device_count(void);

/* cistern_last_error writes the message of the calling thread's last failure into buf and returns its code; CISTERN_OK and ""
 * if there was none. It writes at most n bytes, the final 0 included, and cuts longer messages. Success does not clear the
 * message. It is one line; after CISTERN_OUT_OF_MEMORY up to two more name the top allocations and what would help. */
int cistern_last_error(char *buf, size_t n);

/* The figures of the calling thread's last CISTERN_OUT_OF_MEMORY, in bytes. */
typedef struct cistern_oom {
  int32_t device;
  uint32_t tried;      /* reclaim stages: 1 fit, 2 collect, 4 remap, 8 grow, 16 lend, 32 callback, 128 node, 64 spill */
  uint64_t pool[2];
  uint64_t requested;  /* by the caller */
  uint64_t reserved;   /* physical memory of all pools of the device */
  uint64_t allocated;  /* live allocations, rounded */
  uint64_t pending;    /* freed, but other streams still use it */
  uint64_t pinned;     /* free, but pinned by graphs or of another kind of memory */
  uint64_t largest;    /* largest free block of the request's own pool and stream */
  uint64_t limit;      /* the limit in force, 0 for none */
  uint64_t device_free, device_total; /* as the driver reports them, 0 if unknown */
} cistern_oom;
int cistern_last_oom(cistern_oom *out);

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* cistern_malloc returns memory that work queued on the stream from now on may use, NULL on failure and for size 0. The
 * stream must exist until the memory is freed; it may be destroyed right after that. */
void *cistern_malloc(ssize_t size, int device, void *stream);

/* cistern_release frees what any allocating function here returned; NULL is nothing to free. The memory is reused on the
 * stream that it was allocated on at once, on other streams when the GPU's order allows it. CISTERN_INVALID for an unknown
 * pointer. */
int cistern_release(void *ptr);

/* cistern_free is cistern_release in the form that PyTorch's CUDAPluggableAllocator calls. It ignores size, device and stream,
 * which the library knows. After an unknown pointer cistern_last_error has the message. */
void cistern_free(void *ptr, ssize_t size, int device, void *stream);

/* cistern_alloc is cistern_malloc that returns a code and takes a pool. {0, 0} or NULL is the pool that the stream was routed
 * to (cistern_pool_begin), else the default pool of the device. */
int cistern_alloc(void **out, size_t size, int device, void *stream, const uint64_t pool[2]);

/* cistern_alloc_with is cistern_alloc with options; NULL is none. */
typedef struct cistern_alloc_options {
  uint32_t size;     /* sizeof(cistern_alloc_options) */
  uint32_t flags;    /* CISTERN_ALLOC_ */
  uint64_t pool[2];  /* as that of cistern_alloc */
  uint32_t library;  /* the caller: a number from cistern_library, 0 for none */
  uint32_t reserved; /* 0 */
} cistern_alloc_options;
enum {
  /* For libraries that do not say on which stream they use memory. The memory is allocated in host order: the host knows
   * that the GPU is done with it, which can take a wait. Work on any stream may use it, and so may the host if it is host
   * memory. After its release it is reused behind the stream of the request, as a rule the legacy default stream, and behind
   * the streams that block with it. Name other streams by cistern_record_stream, or wait for them. A stream that is being
   * captured is an error. */
  CISTERN_ALLOC_HOST_ORDER = 1,
  /* Cached memory only. Where the request needs more (a driver call, a wait for the GPU or for another thread, a callback)
   * the result is CISTERN_OUT_OF_MEMORY, the message is not set, and nothing has changed. For callers that hold a lock which
   * others may need, such as an interpreter's. It excludes CISTERN_ALLOC_HOST_ORDER. */
  CISTERN_ALLOC_CACHED = 2
};
int cistern_alloc_with(void **out, size_t size, int device, void *stream, const cistern_alloc_options *options);

/* Stream and options of a request as one pointer, for libraries that take two functions and a context. cistern_source_malloc
 * is cistern_alloc_with for a cistern_source, which must not change during the call; NULL on failure. cistern_source_free is
 * cistern_release; it ignores source and device. */
typedef struct cistern_source {
  void *stream;
  cistern_alloc_options options;
} cistern_source;
void *cistern_source_malloc(void *source, size_t size, int device);
void cistern_source_free(void *source, void *ptr, int device);

/* cistern_library returns the number, 1 to 255, of a library that allocates here, by its name ("cupy"); the same name has the
 * same number for the life of the process. It returns 0, and sets the message, for a bad name or after 255 names. Statistics
 * by library use the number. Allocations without one are listed under the name given to cistern_library_default, "c" at
 * first. cistern_library_name returns the name of a number, NULL if there is none. */
uint32_t cistern_library(const char *name);
const char *cistern_library_name(uint32_t library);
int cistern_library_default(const char *name);

/* The live allocations by library, the most bytes first. cistern_library_usage writes at most cap entries, and to *n how many
 * there are. It takes time in proportion to the number of allocations. */
typedef struct cistern_library_use {
  uint32_t library;
  uint32_t reserved;
  int64_t blocks;
  uint64_t requested, allocated; /* bytes */
} cistern_library_use;
int cistern_library_usage(int device, cistern_library_use *out, size_t cap, size_t *n);

/* cistern_release_on is cistern_release in the order of a stream, which need not be the one that the memory was allocated on.
 * All work that uses the memory must come before the work that is queued on this stream after the call; the memory is reused
 * after that. The stream that the memory was allocated on may have been destroyed. RMM's deallocate and cudaFreeAsync have
 * the same meaning. */
int cistern_release_on(void *ptr, void *stream);

/* cistern_record_stream states that work on another stream uses the memory as well. After its release the memory is reused
 * only when the work that was queued there before the release is done. */
int cistern_record_stream(void *ptr, void *stream);

/* cistern_base returns ptr if an allocation starts there, and writes its rounded size (size may be NULL); else NULL. */
void *cistern_base(void *ptr, size_t *size);

/* cistern_segment_base writes the first address and the size (size may be NULL) of the segment of the allocation that starts
 * at ptr: the range that the driver or the pool's upstream returned, which a handle of cudaIpcGetMemHandle refers to.
 * CISTERN_UNSUPPORTED where the memory is chunks that are mapped into a larger range. */
int cistern_segment_base(void *ptr, void **base, size_t *size);

/* The allocation that starts at ptr. */
typedef struct cistern_block {
  uint64_t addr;
  uint64_t size;      /* rounded */
  uint64_t requested;
  uint64_t pool[2];
  void *stream;       /* the handle by which the stream was first seen */
  int32_t device;
  uint32_t state;     /* CISTERN_BLOCK_ */
  uint32_t tag;       /* number of its tag, 0 for none: cistern_tag_name */
  uint8_t library;    /* number of the library that asked, 0 for none: cistern_library_name */
  uint8_t paused;     /* in a snapshot: 1 if a part of it has no physical memory (cistern_pause) */
  uint8_t reserved[2];
} cistern_block;
enum { CISTERN_BLOCK_FREE = 0, CISTERN_BLOCK_USED = 1, CISTERN_BLOCK_PENDING = 2 };
int cistern_find(void *ptr, cistern_block *out);

/* cistern_stream_durable promises that the stream is not destroyed while the library is in use, as PyTorch's streams are not.
 * Allocation and release on it then take less time. */
int cistern_stream_durable(int device, void *stream);

/* cistern_trim returns the free memory of the device (-1: of every device) to the driver, except for what captured graphs
 * pin. It waits for the GPU where it must. */
int cistern_trim(int device);

/* The limit on the physical memory that the device's pools may reserve together; 0 is no limit. */
int cistern_set_limit(int device, uint64_t bytes);
int cistern_get_limit(int device, uint64_t *bytes);

/* Free and total memory of the device as the driver reports them. */
int cistern_mem_info(int device, uint64_t *free_bytes, uint64_t *total_bytes);

/* How many bytes requests can get of the device now, beside what is allocated: what is cached, what is free in the driver and
 * not granted to other processes, and what those would release, if a broker (cistern serve) runs; within the limits. It is not
 * one request's, and no promise: others use the device too. For programs that size themselves. */
int cistern_node_available(int device, uint64_t *bytes);

/* The size of the largest request on this stream that needs no driver call. */
int cistern_largest_free(int device, void *stream, uint64_t *bytes);

/* cistern_peer makes all memory of the device, now and later, accessible from the peer device. */
int cistern_peer(int device, int peer);

/* cistern_on_out_of_memory registers a function that is called, with no lock held, when all other reclaim stages of a request
 * have failed. missing is in bytes. The function returns nonzero if it returned memory to the driver or to Cistern; it must
 * not allocate from the device. The same function and ctx are registered once. Device -1 is every device, also those that
 * come into use later. */
int cistern_on_out_of_memory(int device, int (*fn)(void *ctx, int device, uint64_t missing), void *ctx);

/* cistern_off_out_of_memory removes a registration. When it returns, no call of the function is under way, so the function
 * must not call it. CISTERN_INVALID if there is no such registration. */
int cistern_off_out_of_memory(int device, int (*fn)(void *ctx, int device, uint64_t missing), void *ctx);

/* cistern_on_unmap sets the one function (NULL: none) that is called, with no lock held, before memory of the device is
 * unmapped or returned to the driver. While there is one, memory is not mapped elsewhere: it is unmapped only by
 * cistern_trim, by the end of a pool and by the last stages before a request fails. For code that registers memory with a
 * network or with NCCL. */
int cistern_on_unmap(int device, void (*fn)(void *ctx, int device, void *addr, size_t size), void *ctx);

/* cistern_on_map sets the one function (NULL: none) that is called, with no lock held, for new memory of the device before
 * any of it is allocated; cistern_snapshot_take lists the memory that was mapped before.
 * The functions of cistern_on_map and cistern_on_unmap may be called by several threads at once. They may free memory and read
 * statistics; they must not allocate from the device, trim it or replace either function. When a function has been replaced,
 * no call of the former is under way. Setting the same function again does nothing. */
int cistern_on_map(int device, void (*fn)(void *ctx, int device, void *addr, size_t size), void *ctx);

/* ---- pools ---------------------------------------------------------------------------------------------------- */

/* A pool is a set of allocations apart from the others of its device. Two numbers name it, as in PyTorch's MempoolId_t. */
typedef struct cistern_pool_options {
  uint32_t size;  /* sizeof(cistern_pool_options) */
  uint32_t flags; /* CISTERN_POOL_ */
  /* Functions of the caller that allocate and free the pool's segments, called with no lock held; both or neither. alloc
   * returns memory aligned to 512 bytes, NULL when there is none. */
  void *(*alloc)(void *ctx, size_t size, int device, void *stream);
  void (*free)(void *ctx, void *ptr, size_t size, int device, void *stream);
  void *ctx;
  /* The upstream of the pool's memory by name (see below); NULL: by flags, or by the settings. It excludes alloc and the
   * flags for kinds of memory. */
  const char *upstream;
  /* Bytes that the pool may reserve, 0: no limit of its own. */
  uint64_t limit;
  /* The upstream of a request that nothing else can meet, named like upstream; NULL: none. */
  const char *spill;
  /* Called, with no lock held, when the pool is out of memory, before the device's callbacks. It returns nonzero if it
   * returned memory, and must not allocate from the pool. NULL: none. */
  int (*on_out_of_memory)(void *ctx, int device, uint64_t missing);
  void *on_out_of_memory_ctx;
} cistern_pool_options;

/* Upstreams by name: "device" (cuMemAlloc), "virtual" (each segment one physical handle), "async" (a stream-ordered pool of
 * the driver), "managed", "pinned" (page-locked host memory), "host_numa" (host memory mapped for the GPU), "nccl"
 * (ncclMemAlloc), "external" (two functions of a library, with the signatures of PyTorch's CUDAPluggableAllocator). Options
 * follow a colon, adaptors stand before a bar, outermost first:
 *
 *     async:threshold=1GiB,initial=512MiB,handles=posix     managed:prefetch=true     host_numa:node=0
 *     logging:file=/tmp/pool.csv|limiting:bytes=2GiB|nccl:library=/opt/nccl/lib/libnccl.so.2
 *     external:library=/opt/lib/liballoc.so,alloc=my_alloc,free=my_free
 *
 * cistern_upstream_check returns CISTERN_OK if the text is an upstream that the device supports. */
int cistern_upstream_check(int device, const char *upstream);

/* cistern_upstream_set makes functions, as of cistern_pool_options, the upstream of the default pool of every device and of pools
 * that are created without functions, an upstream and a flag for a kind of memory. CISTERN_INVALID once a device is in use, or
 * where the settings say where memory comes from: upstream:NAME (an upstream by name), backend:malloc, single_handle. */
int cistern_upstream_set(void *(*alloc)(void *ctx, size_t size, int device, void *stream),
                         void (*free)(void *ctx, void *ptr, size_t size, int device, void *stream), void *ctx);
enum {
  CISTERN_POOL_NO_SPLIT = 1,      /* each allocation is a segment of its own */
  CISTERN_POOL_IPC_LEGACY = 2,    /* segments from cuMemAlloc, which cudaIpcGetMemHandle accepts */
  CISTERN_POOL_SINGLE_HANDLE = 4  /* each segment is one physical handle, which RDMA registration accepts */
};
int cistern_pool_create(int device, const uint64_t pool[2], const cistern_pool_options *options /* may be NULL */);

/* From cistern_pool_begin until cistern_pool_end, requests of the stream that name no pool are met from this one. The calls
 * nest: the last that was begun counts. Memory that is freed goes to the pool that it came from. */
int cistern_pool_begin(int device, const uint64_t pool[2], void *stream);
int cistern_pool_end(int device, void *stream);

/* cistern_capture_begin and _end are pool_begin and pool_end around the capture of the stream into a CUDA graph: the pool's
 * memory stays where it is until the pool is released. Call cistern_capture_begin before the capture begins. A later call is
 * allowed, but then memory that the GPU may still use is not reused. Call cistern_capture_end after the capture has ended. */
int cistern_capture_begin(int device, const uint64_t pool[2], void *stream);
int cistern_capture_end(int device, void *stream);

/* cistern_capture_reuse sets whether a capture reuses memory that it used on several streams and freed: on (1), as soon as the
 * stream of the request has joined the others; off (0, the default without capture_reuse:true), after the end of the capture.
 * Reading the graph's order takes time at each request that reuse may serve. It holds for memory that is freed from now on. */
int cistern_capture_reuse(int device, int on);

/* cistern_pool_release ends a pool. The program must not name it in a request again, nor launch graphs that use its memory.
 * Live allocations stay valid and are freed as always. */
int cistern_pool_release(int device, const uint64_t pool[2]);

/* cistern_trim for one pool. {0, 0} is the default pool, and the free memory of released pools. */
int cistern_pool_trim(int device, const uint64_t pool[2]);

/* cistern_pool_blocks lists the pool's live allocations in address order. It writes at most cap of them, and to *n how many
 * there are. */
int cistern_pool_blocks(int device, const uint64_t pool[2], cistern_block *out, size_t cap, size_t *n);

/* cistern_pool_restore makes these the pool's live allocations, at the addresses that cistern_pool_blocks listed. Live
 * allocations that are not listed are freed; listed ones that are not live are allocated again. For pools that a capture
 * pinned. CISTERN_INVALID, without a change, if an address is not available. */
int cistern_pool_restore(int device, const uint64_t pool[2], const cistern_block *blocks, size_t n);

/* The limit of a pool in bytes, 0 for none, and its statistics. */
int cistern_pool_set_limit(int device, const uint64_t pool[2], uint64_t bytes);
typedef struct cistern_pool_stats {
  uint32_t size; /* sizeof(cistern_pool_stats), set by the caller */
  uint32_t reserved_field;
  uint64_t reserved, peak_reserved; /* bytes of physical memory */
  uint64_t requested, allocated;
  uint64_t cached;  /* free */
  uint64_t paused;  /* of allocated: without physical memory */
  uint64_t spilled; /* of allocated: from the pool's spill */
  uint64_t limit;
  int64_t blocks;
} cistern_pool_stats;
int cistern_pool_get_stats(int device, const uint64_t pool[2], cistern_pool_stats *out);

/* ---- pause and resume ----------------------------------------------------------------------------------------- */

/* cistern_pause returns the physical memory of live allocations to the device. Their addresses stay reserved, and must not be
 * used until cistern_resume. It waits for all work of the device. Allocations that are paused already stay so, and may be
 * freed. CISTERN_UNSUPPORTED if a selected allocation cannot be paused: exported, registered, used by a captured graph
 * (see CISTERN_PAUSE_CAPTURED), or of an upstream without physical handles. The message names it, and nothing is paused.
 * cistern_resume gives them physical memory and contents again. If it fails everything stays paused; the message of
 * CISTERN_OUT_OF_MEMORY has what is missing. */
typedef struct cistern_pause_options {
  uint32_t size;   /* sizeof(cistern_pause_options) */
  uint32_t keep;   /* CISTERN_KEEP_ */
  uint32_t flags;  /* CISTERN_PAUSE_ */
  uint32_t reserved;
  const uint64_t *pool; /* two numbers: this pool only; NULL: all pools */
  const char *tag;      /* this tag only; NULL: all */
  const char *dir;      /* folder of the file of CISTERN_KEEP_DISK; NULL: that for temporary files */
} cistern_pause_options;
enum {
  CISTERN_KEEP_HOST = 0, /* contents go to page-locked host memory */
  CISTERN_KEEP_DISK = 1, /* to a file */
  CISTERN_KEEP_NONE = 2  /* are dropped: undefined after resume */
};
enum {
  CISTERN_PAUSE_CAPTURED = 1, /* also memory of captured graphs: the program must not launch them until resume */
  CISTERN_PAUSE_AUTO = 2      /* for cistern_node_allow_pause alone: the node's broker may pause by itself */
};
typedef struct cistern_pause_report {
  int64_t blocks;    /* allocations that were paused or resumed */
  uint64_t bytes;    /* their bytes */
  uint64_t physical; /* physical memory returned to the device, or allocated again */
  uint64_t kept;     /* bytes of contents copied */
  uint64_t shared;   /* bytes that stayed, as allocations that were not selected share the memory */
} cistern_pause_report;
int cistern_pause(int device, const cistern_pause_options *options /* NULL: all, kept in host memory */,
                  cistern_pause_report *out /* may be NULL */);
/* Of the options, cistern_resume reads pool and tag. */
int cistern_resume(int device, const cistern_pause_options *options, cistern_pause_report *out);

/* cistern_pause_buffers keeps page-locked host memory of this many bytes for contents, which makes the next pauses much faster.
 * Memory that a pause needed beyond that stays for the next one. 0 frees the unused memory. */
int cistern_pause_buffers(int device, uint64_t bytes);

/* cistern_node_allow_pause lets the node pause memory of the device until cistern_node_deny_pause: an operator or a launcher with
 * `cistern node pause --label LABEL`, where a broker runs (cistern serve). The options are those of cistern_pause. The caller promises
 * not to use the memory meanwhile. A thread of the library pauses and resumes. It calls no function of the program, so that it refuses
 * to while one is registered with cistern_on_map or cistern_on_unmap.
 * With CISTERN_PAUSE_AUTO the broker may also pause by itself: for a request of another process that the unused memory of all
 * processes cannot meet. The memory stays paused until `cistern node resume`, cistern_resume or cistern_node_deny_pause.
 * cistern_node_deny_pause ends that, and resumes what the node paused: when it returns CISTERN_OK the memory may be used. If it fails
 * the memory stays paused; it may be called again. */
int cistern_node_allow_pause(int device, const cistern_pause_options *options /* NULL: all, kept in host memory */);
int cistern_node_deny_pause(int device);

/* ---- named objects -------------------------------------------------------------------------------------------- */

/* Named objects are device memory that the node's broker (cistern serve) keeps: it outlives the process that wrote it, and others map
 * it without a copy, for reading only. Addresses are those of this process. Without a broker the functions fail with CISTERN_INVALID.
 * A broker that does not answer costs 40 s at most.
 *
 * cistern_node_build has the broker make bytes of memory on the device and maps it. Others see it under its name after
 * cistern_node_commit, which unmaps it; sha256 is that of the contents in hexadecimal, for readers to check, or NULL. A name is 1 to
 * 255 letters, digits and - _ . : @ + =, with single slashes in between. It is the user's own. cistern_node_abandon ends a build; so does
 * the end of the process. Both wait for the device's work, and fail with CISTERN_INVALID, without effect, during a capture. */
typedef struct cistern_object_options {
  uint32_t size;      /* sizeof(cistern_object_options), set by the caller */
  uint32_t mode;      /* rights to read, as of a file: 0600, 0640, 0604, 0644; 0 is 0600 */
  const char *layout; /* the tensors, JSON as in the header of a safetensors file; NULL: none */
  const char *labels; /* up to 8, "key=value,key=value"; NULL: none */
  double ttl;         /* seconds without a reader after which the object goes; 0: it stays */
} cistern_object_options;
int cistern_node_build(int device, const char *name, uint64_t bytes, const cistern_object_options *options /* NULL: the defaults */, void **ptr);
int cistern_node_commit(void *ptr, const char *sha256);
int cistern_node_abandon(void *ptr);

/* cistern_node_open maps an object. user is its owner's number, -1 this process's; generation 0 is the latest. The generation
 * stays until cistern_node_close, once for each open, also where another replaces it. A kernel that writes there breaks this process's
 * CUDA context. cistern_node_close waits for the device's work as cistern_node_commit does. */
int cistern_node_open(int device, const char *name, int64_t user, uint64_t generation, void **ptr);
int cistern_node_close(void *ptr);

/* Copies between a build or an open object, from a byte offset on, and memory of the host or the device, in stream order; they return when
 * the copy is done. */
int cistern_node_write(void *ptr, uint64_t offset, const void *src, uint64_t bytes, void *stream);
int cistern_node_read(void *ptr, uint64_t offset, void *dst, uint64_t bytes, void *stream);

/* JSON, to be given to cistern_string_free; NULL: cistern_last_error says why. Of an open object: {"object": {...}, "layout": {...}};
 * of the objects that the user may read, or with a name the generations of that one: {"objects": [...]}, as `cistern node stat --json`. */
char *cistern_node_describe(void *ptr);
char *cistern_node_objects(const char *name /* NULL: all */, int64_t user);

/* Removes the object's latest generation, or a given one. Its memory goes when the last process has closed it. */
int cistern_node_remove(const char *name, int64_t user, uint64_t generation);

/* ---- statistics ----------------------------------------------------------------------------------------------- */

typedef struct cistern_value {
  int64_t current, peak, added, removed; /* now; the peak since the start or cistern_reset_peaks; sums since the start or
                                          * cistern_reset_accumulated */
} cistern_value;
typedef struct cistern_grouped {
  cistern_value all, small, large; /* small: memory for requests of up to 256 KiB */
} cistern_grouped;
typedef struct cistern_stats {
  uint32_t size; /* sizeof(cistern_stats), set by the caller */
  int32_t device;
  cistern_grouped allocations;    /* live allocations */
  cistern_grouped active;         /* those, and freed blocks that other streams still use */
  cistern_grouped inactive;       /* free blocks and spare chunks */
  cistern_grouped segments;       /* physical handles or segments from the driver */
  cistern_grouped requested;      /* bytes as requested */
  cistern_grouped allocated;      /* bytes of live allocations, rounded */
  cistern_grouped active_bytes;
  cistern_grouped inactive_bytes;
  cistern_grouped reserved;       /* bytes of physical memory = active_bytes + inactive_bytes - paused */
  uint64_t limit, spare_bytes, address_bytes;
  int64_t remaps, device_allocs, device_frees, retries, ooms;
  int64_t by_fit, by_collect, by_remap, by_grow, by_lend, by_callback; /* requests met by each reclaim stage */
  int64_t stream_syncs; /* times a host thread waited for the GPU */
  int64_t by_spill;     /* those met from a pool's spill */
  cistern_value paused; /* bytes of allocations without physical memory */
  int64_t borrows;      /* requests met with a free block of another stream, part of by_lend */
  int64_t by_node;      /* requests met with memory that other processes on the device released */
  uint64_t imported_bytes; /* memory of other processes that is mapped: what was opened, and named objects; in no other figure */
} cistern_stats;
int cistern_get_stats(int device, cistern_stats *out);
int cistern_reset_peaks(int device);
int cistern_reset_accumulated(int device); /* added, removed and the counters become 0 */

/* The statistics of all devices in use as a JSON object. cistern_string_free frees the string. NULL on failure. */
char *cistern_stats_json(void);
void cistern_string_free(char *s);

/* Tags label the allocations of the calling thread from push to pop; the innermost counts. The number of a tag is the same for
 * the life of the process; cistern_tag_name returns its name, NULL if there is none. At most 65,535 names. */
int cistern_tag_push(const char *name);
int cistern_tag_pop(void);
const char *cistern_tag_name(uint32_t tag);

/* ---- stacks and reports --------------------------------------------------------------------------------------- */

/* cistern_stacks records the stacks of requests from now on, as the settings stacks and stack_sample do. kinds: native
 * frames, Python's frames, or both (native frames up to the interpreter, then Python's); 0 stops that and forgets the stacks.
 * Requests of at least sample bytes are always recorded, smaller ones with the probability size/sample; 0 records all. Events
 * of the history have the stack, and so have allocations until they are freed.
 * Python's frames are read without the interpreter's lock, for CPython 3.10 to 3.14. CISTERN_UNSUPPORTED, without a change,
 * for another interpreter, or if the unwinder of the C compiler's runtime (libgcc_s.so.1) is missing. */
enum { CISTERN_STACKS_NATIVE = 1, CISTERN_STACKS_PYTHON = 2 };
int cistern_stacks(uint32_t kinds, uint64_t sample);

/* The live allocations by stack, the most bytes first; stack 0 has those without a recorded stack. cistern_stack_usage writes
 * at most cap entries, and to *n how many there are: 0 while stacks are not recorded. It takes time in proportion to the
 * number of allocations. */
typedef struct cistern_stack_use {
  uint32_t stack;
  uint32_t reserved;
  int64_t blocks;
  uint64_t requested, allocated; /* bytes */
} cistern_stack_use;
int cistern_stack_usage(int device, cistern_stack_use *out, size_t cap, size_t *n);

/* cistern_stack_text writes the frames of a stack into buf, innermost first, a line each: "function file:line", or as much of
 * it as is known. It writes at most n bytes, the final 0 included, and cuts longer texts. */
int cistern_stack_text(uint32_t stack, char *buf, size_t n);

/* cistern_report turns on files of failed requests, as the settings report and report_child do; dir NULL turns them off. Each
 * request that fails with CISTERN_OUT_OF_MEMORY writes dir/oom-PID-N.cistern for `cistern report`, and a line on standard error
 * names the file. N begins at 1 and skips names that exist. A file has the allocations, the stack of the request, and the
 * last 1,000,000 events; the history starts here if it was off, and ends with the reports.
 * The first four files of a process stay. The fifth is of the newest failure: it is written again, without another line, as
 * long as that takes at most one twentieth of the time.
 * If child is not 0 the library starts the command `cistern` for each of the first four files, which writes an HTML report and
 * a text beside the file, and does not wait for it. The command is that of CISTERN_COMMAND, or lies beside the library or in
 * ../bin from there, or is in PATH.
 * An error in writing is a line on standard error; the request fails as without reports, at most 5 s later. */
int cistern_report(const char *dir, int child);

/* cistern_last_report writes the path of the file of the calling thread's last failure into buf, at most n bytes with the final 0,
 * and returns its length. It is 0, and "", where no file was written. */
size_t cistern_last_report(char *buf, size_t n);

/* ---- snapshot and history ------------------------------------------------------------------------------------- */

typedef struct cistern_segment {
  uint64_t addr;    /* 0 for spare chunks, which are not mapped */
  uint64_t size;    /* their sum is the reserved and the paused bytes */
  uint64_t pool[2];
  void *stream;
  uint32_t large;
  uint32_t expandable;          /* 1: chunks mapped into a larger range; 0: a segment of its own */
  size_t first_block, blocks;   /* in cistern_snapshot.blocks */
} cistern_segment;
typedef struct cistern_snapshot {
  const cistern_segment *segments;
  size_t num_segments;
  const cistern_block *blocks;
  size_t num_blocks;
} cistern_snapshot;

/* cistern_snapshot_take lists the physical memory of the device, or of one of its pools, with the blocks in it, and the
 * allocations that are paused. */
int cistern_snapshot_take(int device, const uint64_t pool[2] /* NULL: all */, cistern_snapshot **out);
void cistern_snapshot_free(cistern_snapshot *s);

/* cistern_snapshot_write writes a snapshot of all devices in use, with the history if it is on, as a PyTorch memory snapshot
 * (pickle) for PyTorch's viewer and `cistern replay`; compressed by gzip if the name ends in .gz. */
int cistern_snapshot_write(const char *path);

/* cistern_trace_write writes the same in Cistern's format, for `cistern report`, `replay`, `inspect` and `convert`. It has tags,
 * libraries and threads, which PyTorch's format lacks. CISTERN_INVALID if no device is in use. Both functions write a complete
 * file or none. */
int cistern_trace_write(const char *path);

typedef struct cistern_event {
  int64_t time_us;    /* since 1970 */
  uint64_t addr;      /* for CISTERN_EVENT_OOM: bytes of free memory of the device */
  uint64_t size;
  uint64_t pool[2];
  void *stream;
  uint64_t handle;    /* of a chunk that was mapped or unmapped: its number */
  uint32_t kind;      /* CISTERN_EVENT_ */
  uint32_t tag;
  uint32_t thread;    /* the thread id of the kernel, 0 if unknown */
  uint32_t reserved;
} cistern_event;
enum {
  CISTERN_EVENT_ALLOC = 1,
  CISTERN_EVENT_FREE_REQUESTED = 2,
  CISTERN_EVENT_FREE_COMPLETED = 3,
  CISTERN_EVENT_SEGMENT_ALLOC = 4,
  CISTERN_EVENT_SEGMENT_FREE = 5,
  CISTERN_EVENT_SEGMENT_MAP = 6,
  CISTERN_EVENT_SEGMENT_UNMAP = 7,
  CISTERN_EVENT_OOM = 8
};

/* cistern_history keeps the last n events of the device from now on; 0 stops that and forgets them. Device -1 is every device,
 * also those that come into use later. Requests take longer with it. cistern_history_drain moves the oldest events, at most
 * cap, into buf. It writes their number to *n, and to *lost (may be NULL) how many events were overwritten since the last
 * call. */
int cistern_history(int device, size_t n);
int cistern_history_drain(int device, cistern_event *buf, size_t cap, size_t *n, uint64_t *lost);

/* cistern_history_hash writes the hash of the sizes of the requests that were met since the last call, in their order, also of those
 * that the history does not hold any more: FNV-1a over words of 8 bytes. It is 0 while there is no history. */
int cistern_history_hash(int device, uint64_t *hash);

/* ---- sharing with other processes ----------------------------------------------------------------------------- */

/* cistern_share makes the allocation that starts at ptr available to other processes of the same user. It writes a handle of
 * at most CISTERN_HANDLE_MAX characters, printable and 0-terminated. The allocation must not be freed while others use it.
 * cistern_open in another process maps it on the device and writes the address of its first byte; in the sharing process that
 * is the allocation itself. cistern_close undoes one cistern_open; the caller must know that the GPU is done with the memory.
 * Memory of a pool over "async" is shared if that has handles=posix. Others must have closed it before the allocation is freed,
 * as the driver wants it, and cistern_close of it waits for the GPU.
 * Both processes must see the same /dev/shm or, without one, the same TMPDIR. A process that has ended, or does not answer for
 * ten seconds, is an error. */
enum { CISTERN_HANDLE_MAX = 512 };
int cistern_share(void *ptr, char *handle, size_t cap);
int cistern_open(const char *handle, int device, void **ptr);
int cistern_close(void *ptr);

#ifdef __cplusplus
}
#endif
#endif
