/*
 * cistern.h: the C interface of Cistern, a caching allocator of GPU memory that every library of a process can share.
 *
 *     #include <cistern.h>                            cc prog.c $(pkg-config --cflags --libs cistern)
 *
 *     void *p = cistern_malloc(64 << 20, 0, stream);   64 MiB on device 0, usable at once by work queued on the stream
 *     if (!p) { char why[512]; cistern_last_error(why, sizeof why); ... }
 *     cistern_free(p, 64 << 20, 0, stream);            reusable on that stream at once, elsewhere when the GPU's order allows
 *
 * Sizes are bytes. Devices are CUDA ordinals. A stream is a CUstream or cudaStream_t: 0 or 1 is the legacy default stream
 * of the device, 2 the calling thread's per-thread default stream. Streams are known by context and id, so a handle that
 * was destroyed and is used again for another stream is recognised. Addresses are aligned to 512 bytes.
 *
 * Settings come from the environment variable CISTERN_CONF ("key:value,key:value") when the library is first used, or
 * from cistern_init before that. A program with more rights than its user (setuid, setgid, file capabilities) gets
 * none from the environment, and no file, program or library that a variable names is used; docs/environment.md lists them.
 *
 * Functions that return int return one of the CISTERN_ codes below; 0 is success. After any other, cistern_last_error
 * in the same thread has the message. All functions may be called from any thread. They leave the thread's CUDA
 * context as they found it. In a child of fork everything fails with CISTERN_FORKED (or null), unless the library was
 * first loaded there; frees do nothing.
 *
 * A signal handler may run on a thread that is within the library, with or without SA_ONSTACK, and use 200 KiB of stack; it must
 * not call the library. The first call of a thread gives it an alternate signal stack unless it has one. A program may close all
 * descriptors that it does not know: what the library had open is an error or opened again.
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
  CISTERN_DRIVER = 3,        /* the CUDA driver failed; the words name its error */
  CISTERN_FORKED = 4,        /* this process is a child of fork and cannot use the parent's allocator */
  CISTERN_UNSUPPORTED = 5,   /* this device or memory cannot do it */
  CISTERN_INTERNAL = 6       /* a bug in Cistern: the words say where */
};

/* ---- the library ---------------------------------------------------------------------------------------------- */

/* The version of this header; that of the library is cistern_version's. */
#define CISTERN_VERSION "0.4.0"

/* The version, "1.2.3", as a constant string. */
const char *cistern_version(void);

/* cistern_init starts the library with these settings instead of CISTERN_CONF; NULL means CISTERN_CONF. Every other
 * function does so by itself. CISTERN_INVALID for bad settings, or if the library was started already with others. */
int cistern_init(const char *conf);

/* The number of devices, or -1. */
int cistern_device_count(void);

/* cistern_last_error writes the words of the calling thread's last failure into buf (at most n bytes with the final 0,
 * cut if need be) and returns its code, CISTERN_OK and "" if there was none. Success does not clear it. It is one line;
 * after CISTERN_OUT_OF_MEMORY up to two more name the top allocations and what would help. */
int cistern_last_error(char *buf, size_t n);

/* What the calling thread's last CISTERN_OUT_OF_MEMORY found, in bytes. */
typedef struct cistern_oom {
  int32_t device;
  uint32_t tried;      /* reclaim stages: 1 fit, 2 collect, 4 remap, 8 grow, 16 lend, 32 callback, 64 spill */
  uint64_t pool[2];
  uint64_t requested;  /* by the caller */
  uint64_t reserved;   /* physical memory held by all pools of the device */
  uint64_t allocated;  /* handed out, rounded */
  uint64_t pending;    /* given back, still used by other streams */
  uint64_t pinned;     /* free, but pinned by graphs or of another kind of memory */
  uint64_t largest;    /* largest free block of the request's own pool and stream */
  uint64_t limit;      /* in force, 0 none */
  uint64_t device_free, device_total; /* as the driver reports them, 0 unknown */
} cistern_oom;
int cistern_last_oom(cistern_oom *out);

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* cistern_malloc returns memory that work queued on the stream from now on may use, NULL on failure and for size 0. The
 * stream must exist until the memory is freed; it may be destroyed right after that. */
void *cistern_malloc(ssize_t size, int device, void *stream);

/* cistern_free gives back what cistern_malloc or cistern_alloc returned; NULL is nothing to free. Size, device and stream
 * are not looked at: Cistern knows them. An unknown pointer is left alone (cistern_last_error says so). */
void cistern_free(void *ptr, ssize_t size, int device, void *stream);

/* cistern_alloc is cistern_malloc with the reason for a failure as its result, and from a pool: {0, 0} or NULL is the
 * default pool of the device, or the pool that the stream was routed to (cistern_pool_begin). */
int cistern_alloc(void **out, size_t size, int device, void *stream, const uint64_t pool[2]);

/* cistern_alloc_with is cistern_alloc with more said of the request. */
typedef struct cistern_alloc_options {
  uint32_t size;     /* sizeof(cistern_alloc_options) */
  uint32_t flags;    /* CISTERN_ALLOC_ */
  uint64_t pool[2];  /* {0, 0}: where the stream is routed to, else the default pool */
  uint32_t library;  /* the caller: a number from cistern_library, 0 for none */
  uint32_t reserved; /* 0 */
} cistern_alloc_options;
enum {
  /* For libraries that do not say on which stream they use memory: it is handed out only once the host knows that the
   * GPU is done with it (which waits if need be), and may be used by work on any stream, and by the host if it is memory of
   * the host's. What is freed is reused behind the stream named here, as a rule the legacy default stream, and those that
   * block with it; others are to be named by cistern_record_stream, or waited for. Not on a stream that is captured. */
  CISTERN_ALLOC_HOST_ORDER = 1,
  /* Only what is cached and may be used at once: where it takes more (a driver call, waiting for the GPU or for another
   * thread, asking others) the result is CISTERN_OUT_OF_MEMORY, without words, and nothing has happened. For callers that
   * hold a lock, such as an interpreter's, that others may need meanwhile. Not together with the other. */
  CISTERN_ALLOC_CACHED = 2
};
int cistern_alloc_with(void **out, size_t size, int device, void *stream, const cistern_alloc_options *options);

/* A request as one pointer, for libraries that are given two functions and what to pass them. cistern_source_malloc is
 * cistern_alloc_with by a cistern_source, which must not change meanwhile, and returns NULL on failure;
 * cistern_source_free is cistern_free and looks at ptr alone. */
typedef struct cistern_source {
  void *stream;
  cistern_alloc_options options;
} cistern_source;
void *cistern_source_malloc(void *source, size_t size, int device);
void cistern_source_free(void *source, void *ptr, int device);

/* cistern_library is the number, 1 to 255, of a library of this name that draws on the cache ("cupy"); the same name has the
 * same number for the life of the process. 0, and an error, for a bad name or too many. Statistics tell libraries
 * apart by it; what is allocated without one is listed under the name given to cistern_library_default ("c" at first). */
uint32_t cistern_library(const char *name);
const char *cistern_library_name(uint32_t library);
int cistern_library_default(const char *name);

/* What the live allocations of each library add up to, the most bytes first: writes at most cap and to *n how many there
 * are. It looks at every allocation. */
typedef struct cistern_library_use {
  uint32_t library;
  uint32_t reserved;
  int64_t blocks;
  uint64_t requested, allocated; /* bytes */
} cistern_library_use;
int cistern_library_usage(int device, cistern_library_use *out, size_t cap, size_t *n);

/* cistern_release is cistern_free with a result. */
int cistern_release(void *ptr);

/* cistern_release_on is cistern_release for programs that say on which stream they give memory back, which need not be the
 * one that it was allocated on: all work that uses the memory comes before what is queued on that stream by now, and the
 * memory is reused after that. The stream that it was allocated on is not looked at, and may have been destroyed. It is what
 * RMM's deallocate means, and cudaFreeAsync. */
int cistern_release_on(void *ptr, void *stream);

/* cistern_record_stream says that work queued on another stream uses the memory as well: after its release it is reused
 * only when that work, as queued until then, is done. */
int cistern_record_stream(void *ptr, void *stream);

/* cistern_base finds the allocation that starts at ptr and writes its size (rounded, size may be NULL); NULL if there is
 * none. */
void *cistern_base(void *ptr, size_t *size);

/* cistern_segment_base finds the segment in which the allocation that starts at ptr lies, as the driver or the pool's upstream
 * handed it out: where a handle of cudaIpcGetMemHandle begins. It writes its first address and its size (size may be NULL).
 * CISTERN_UNSUPPORTED where the memory is chunks that are mapped into a larger range. */
int cistern_segment_base(void *ptr, void **base, size_t *size);

/* What is known of the allocation that starts at ptr. */
typedef struct cistern_block {
  uint64_t addr;
  uint64_t size;      /* rounded */
  uint64_t requested;
  uint64_t pool[2];
  void *stream;       /* the handle by which the stream was first seen */
  int32_t device;
  uint32_t state;     /* CISTERN_BLOCK_ */
  uint32_t tag;       /* number of its tag, 0 none: cistern_tag_name */
  uint8_t library;    /* number of the caller's library, 0 for none: cistern_library_name */
  uint8_t paused;     /* in a snapshot: 1 where some of it has no physical memory (cistern_pause) */
  uint8_t reserved[2];
} cistern_block;
enum { CISTERN_BLOCK_FREE = 0, CISTERN_BLOCK_USED = 1, CISTERN_BLOCK_PENDING = 2 };
int cistern_find(void *ptr, cistern_block *out);

/* cistern_stream_durable promises that the stream is not destroyed while the library is in use, as PyTorch's pooled
 * streams are not. Allocating and freeing on it then costs less. */
int cistern_stream_durable(int device, void *stream);

/* cistern_trim gives the free memory of the device (-1: of every device) that is not pinned back to the driver. It waits
 * for the GPU where it must. */
int cistern_trim(int device);

/* The limit on the physical memory that the device's pools may hold together; 0 is none. */
int cistern_set_limit(int device, uint64_t bytes);
int cistern_get_limit(int device, uint64_t *bytes);

/* Free and total memory of the device as the driver reports them. */
int cistern_mem_info(int device, uint64_t *free_bytes, uint64_t *total_bytes);

/* The largest free block that a request on this stream would be given without a driver call. */
int cistern_largest_free(int device, void *stream, uint64_t *bytes);

/* cistern_peer makes all memory of the device, held now or later, accessible from the peer device. */
int cistern_peer(int device, int peer);

/* cistern_on_out_of_memory registers a function that is called, with no lock held, when everything else has failed and
 * before a request does. It returns nonzero if it gave memory back, to the driver or to Cistern. It must not allocate
 * from the device. A function and ctx that are registered already are not registered twice. Device -1 is every device, also
 * those that come into use later. */
int cistern_on_out_of_memory(int device, int (*fn)(void *ctx, int device, uint64_t missing), void *ctx);

/* cistern_off_out_of_memory takes back a registration; when it returns no call of the function is under way. It must not be
 * called from within one. CISTERN_INVALID if there is none. */
int cistern_off_out_of_memory(int device, int (*fn)(void *ctx, int device, uint64_t missing), void *ctx);

/* cistern_on_unmap registers the one function (NULL: none) that is called, with no lock held, before memory of the device
 * is unmapped or given back to the driver. While there is one, memory stays where it was mapped: nothing is moved to
 * other addresses, and only trimming, the end of a pool and the last stages before out of memory unmap anything. For code
 * that registers memory with a network or with NCCL. */
int cistern_on_unmap(int device, void (*fn)(void *ctx, int device, void *addr, size_t size), void *ctx);

/* cistern_on_map registers the one function (NULL: none) that is called, with no lock held, for new memory of the device
 * before any of it is handed out; cistern_snapshot_take lists what there was before. Either function may be called by
 * several threads at once. It may free and ask, but must not allocate from the device, trim it or replace a function, and
 * when either is replaced no call of the former is under way; setting what is set already does nothing. */
int cistern_on_map(int device, void (*fn)(void *ctx, int device, void *addr, size_t size), void *ctx);

/* ---- pools ---------------------------------------------------------------------------------------------------- */

/* A pool is a set of allocations apart from the others of its device, named by two numbers (PyTorch's MempoolId_t). */
typedef struct cistern_pool_options {
  uint32_t size;  /* sizeof(cistern_pool_options) */
  uint32_t flags; /* CISTERN_POOL_ */
  /* Where the pool's segments come from: functions of the caller's, called with no lock held, both or neither. alloc
   * returns memory aligned to 512 bytes, NULL when there is none. */
  void *(*alloc)(void *ctx, size_t size, int device, void *stream);
  void (*free)(void *ctx, void *ptr, size_t size, int device, void *stream);
  void *ctx;
  /* Where the pool's memory comes from, by name (see below); NULL: what flags, or the device's settings, say. Not
   * together with alloc, or with the flags for kinds of memory. */
  const char *upstream;
  /* Bytes that the pool may hold, 0: no limit of its own. */
  uint64_t limit;
  /* Where the memory for a request comes from when nothing else can meet it, named like upstream; NULL: nowhere. */
  const char *spill;
  /* Asked, with no lock held, when the pool is out of memory, before the device's callbacks. It returns nonzero if it gave
   * memory back, and must not allocate from the pool. NULL: none. */
  int (*on_out_of_memory)(void *ctx, int device, uint64_t missing);
  void *on_out_of_memory_ctx;
} cistern_pool_options;

/* Upstreams by name: "device" (cuMemAlloc), "virtual" (each segment one physical handle), "async" (a stream-ordered pool of
 * the driver's), "managed", "pinned" (page-locked host memory), "host_numa" (host memory mapped for the GPU), "nccl"
 * (ncclMemAlloc). Options follow a colon, adaptors stand before a bar, outermost first:
 *
 *     async:threshold=1GiB,initial=512MiB,handles=posix     managed:prefetch=true     host_numa:node=0
 *     logging:file=/tmp/pool.csv|limiting:bytes=2GiB|nccl:library=/opt/nccl/lib/libnccl.so.2
 *
 * cistern_upstream_check is CISTERN_OK where the words make an upstream for the device. */
int cistern_upstream_check(int device, const char *upstream);
enum {
  CISTERN_POOL_NO_SPLIT = 1,      /* each allocation is a segment of its own */
  CISTERN_POOL_IPC_LEGACY = 2,    /* segments from cuMemAlloc, which cudaIpcGetMemHandle accepts */
  CISTERN_POOL_SINGLE_HANDLE = 4  /* each segment is one physical handle, which RDMA registration accepts */
};
int cistern_pool_create(int device, const uint64_t pool[2], const cistern_pool_options *options /* may be NULL */);

/* From cistern_pool_begin until cistern_pool_end what the stream allocates from the device's default pool comes from this
 * one. They nest: the last that was begun counts. Frees always go where the memory came from. */
int cistern_pool_begin(int device, const uint64_t pool[2], void *stream);
int cistern_pool_end(int device, void *stream);

/* cistern_capture_begin and _end are pool_begin and pool_end around the capture of the stream into a CUDA graph: the
 * pool's memory stays where it is until the pool is released. Announce a capture before it begins where the stream has
 * used the pool before; announced while it is under way (which is allowed), what the GPU is not known to be done with
 * is left alone. cistern_capture_end comes after the capture has ended. */
int cistern_capture_begin(int device, const uint64_t pool[2], void *stream);
int cistern_capture_end(int device, void *stream);

/* With reuse on (1), memory that a capture used on several streams, and gave back, is the capture's again once the stream that
 * it was allocated on has joined the others; off (0), unless the settings have capture_reuse:true, it waits for the end of the
 * capture. Reading the graph's order takes time at each request that reuse may serve. It counts for memory given
 * back from now on. */
int cistern_capture_reuse(int device, int on);

/* cistern_pool_release ends a pool: no request names it again, and no later launch of a graph uses its memory.
 * What is still allocated stays valid and is freed as always. */
int cistern_pool_release(int device, const uint64_t pool[2]);

/* cistern_trim for one pool: {0, 0} is the default pool with what released pools left. */
int cistern_pool_trim(int device, const uint64_t pool[2]);

/* cistern_pool_blocks lists the pool's live allocations in address order: writes at most cap of them and to *n how many
 * there are. */
int cistern_pool_blocks(int device, const uint64_t pool[2], cistern_block *out, size_t cap, size_t *n);

/* cistern_pool_restore makes exactly these the pool's live allocations, at these addresses (as cistern_pool_blocks listed
 * them before): what is live now and not listed is freed, what is listed and not live is allocated again. For pools
 * that a capture pinned. CISTERN_INVALID, and nothing changed, where an address is not available. */
int cistern_pool_restore(int device, const uint64_t pool[2], const cistern_block *blocks, size_t n);

/* The limit of a pool in bytes, 0 none; and what it holds. */
int cistern_pool_set_limit(int device, const uint64_t pool[2], uint64_t bytes);
typedef struct cistern_pool_stats {
  uint32_t size; /* set by the caller to sizeof(cistern_pool_stats) */
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

/* cistern_pause gives the physical memory of live allocations back to the device; their addresses stay theirs, and must
 * not be used until cistern_resume has given them memory again. It waits for all work of the device. Both can be called
 * again without harm. What is selected and cannot be paused (exported, registered, used by a captured graph that flags do
 * not allow, of an upstream that cannot do it) is CISTERN_UNSUPPORTED with its name in the words, and nothing is paused.
 * A resume that fails leaves everything paused; CISTERN_OUT_OF_MEMORY says what is missing. Allocations that are paused can
 * be freed. */
typedef struct cistern_pause_options {
  uint32_t size;   /* sizeof(cistern_pause_options) */
  uint32_t keep;   /* CISTERN_KEEP_ */
  uint32_t flags;  /* CISTERN_PAUSE_ */
  uint32_t reserved;
  const uint64_t *pool; /* two numbers: of this pool only; NULL: of all */
  const char *tag;      /* with this tag only; NULL: with any or none */
  const char *dir;      /* where CISTERN_KEEP_DISK puts its file; NULL: the system's folder for such files */
} cistern_pause_options;
enum {
  CISTERN_KEEP_HOST = 0, /* contents are kept in page-locked host memory */
  CISTERN_KEEP_DISK = 1, /* in a file */
  CISTERN_KEEP_NONE = 2  /* not at all: undefined after resume */
};
enum { CISTERN_PAUSE_CAPTURED = 1 /* also what captured graphs use: they are not launched until resume */ };
typedef struct cistern_pause_report {
  int64_t blocks;    /* allocations that lost, or got back, memory */
  uint64_t bytes;    /* of them */
  uint64_t physical; /* physical memory given back to the device, or got again */
  uint64_t kept;     /* bytes of contents copied */
  uint64_t shared;   /* of selected allocations: memory that stayed, as allocations that are not selected share it */
} cistern_pause_report;
int cistern_pause(int device, const cistern_pause_options *options /* NULL: all, kept in host memory */,
                  cistern_pause_report *out /* may be NULL */);
/* Of the options, cistern_resume reads pool and tag. */
int cistern_resume(int device, const cistern_pause_options *options, cistern_pause_report *out);

/* cistern_pause_buffers keeps page-locked memory of so many bytes for the contents of the next pauses, which are much
 * faster with it; what a pause needed beyond stays for the next. 0 gives back what holds nothing. */
int cistern_pause_buffers(int device, uint64_t bytes);

/* ---- statistics ----------------------------------------------------------------------------------------------- */

typedef struct cistern_value {
  int64_t current, peak, added, removed; /* now; at its highest since the start or cistern_reset_peaks; ever */
} cistern_value;
typedef struct cistern_grouped {
  cistern_value all, small, large; /* small: what is cut for requests of up to 256 KiB */
} cistern_grouped;
typedef struct cistern_stats {
  uint32_t size; /* set by the caller to sizeof(cistern_stats) */
  int32_t device;
  cistern_grouped allocations;    /* blocks handed out */
  cistern_grouped active;         /* and those given back but still used by other streams */
  cistern_grouped inactive;       /* free blocks and spare chunks */
  cistern_grouped segments;       /* physical handles or segments held from the driver */
  cistern_grouped requested;      /* bytes asked for */
  cistern_grouped allocated;      /* bytes handed out, rounded */
  cistern_grouped active_bytes;
  cistern_grouped inactive_bytes;
  cistern_grouped reserved;       /* bytes of physical memory held = active_bytes + inactive_bytes - paused */
  uint64_t limit, spare_bytes, address_bytes;
  int64_t remaps, device_allocs, device_frees, retries, ooms;
  int64_t by_fit, by_collect, by_remap, by_grow, by_lend, by_callback; /* slow requests by the stage that met them */
  int64_t stream_syncs; /* times a host thread waited for the GPU */
  int64_t by_spill;     /* slow requests met from a pool's spill */
  cistern_value paused; /* bytes of allocations without physical memory: active_bytes + inactive_bytes = reserved + paused */
  int64_t borrows;      /* requests met with a free block of another stream's, among by_lend */
} cistern_stats;
int cistern_get_stats(int device, cistern_stats *out);
int cistern_reset_peaks(int device);
int cistern_reset_accumulated(int device); /* added and removed start from 0 again, as do the counters */

/* All devices in use, as one JSON object in a string to be given to cistern_string_free. */
char *cistern_stats_json(void);
void cistern_string_free(char *s);

/* Tags label what the calling thread allocates from push to pop, innermost first. A tag's number is the same for the life
 * of the process; cistern_tag_name gives its name, NULL if there is none. At most 65,535 names. */
int cistern_tag_push(const char *name);
int cistern_tag_pop(void);
const char *cistern_tag_name(uint32_t tag);

/* ---- callers of requests --------------------------------------------------------------------------------------- */

/* cistern_stacks has the stacks of requests taken from now on, as the settings stacks and stack_sample do: of native
 * functions, of Python's, or of both (then native ones up to where the interpreter begins, and from there Python's); 0 stops
 * it and forgets them. Requests of at least sample bytes always have theirs taken, smaller ones with a probability of their
 * size to that; 0 is all. The history tells them, allocations keep them until they are freed. Python's frames are read
 * without its lock, from CPython 3.10 to 3.14; CISTERN_UNSUPPORTED, and nothing has changed, where an interpreter is another
 * one, or where the unwinder of the C compiler's runtime (libgcc_s.so.1) is missing. */
enum { CISTERN_STACKS_NATIVE = 1, CISTERN_STACKS_PYTHON = 2 };
int cistern_stacks(uint32_t kinds, uint64_t sample);

/* What the live allocations of each stack add up to, the most bytes first; stack 0 is of those whose stack was not taken.
 * Writes at most cap and to *n how many there are: none while stacks are not taken. It looks at every allocation. */
typedef struct cistern_stack_use {
  uint32_t stack;
  uint32_t reserved;
  int64_t blocks;
  uint64_t requested, allocated; /* bytes */
} cistern_stack_use;
int cistern_stack_usage(int device, cistern_stack_use *out, size_t cap, size_t *n);

/* cistern_stack_text writes the frames of a stack into buf (at most n bytes with the final 0, cut if need be), innermost
 * first, a line each: "function file:line", or as much of it as is known. */
int cistern_stack_text(uint32_t stack, char *buf, size_t n);

/* cistern_report has a file written for each request that fails with CISTERN_OUT_OF_MEMORY from now on, as the settings report
 * and report_child do: dir/oom-PID-N.cistern, N from 1 but for what is there already, with what was held, the history (of the
 * last 1,000,000 events, begun here where none is kept, and ended with the reports), the stack of the request (also where
 * stacks are not taken), and what else was in the way, for `cistern report` to explain; a line on standard error names it. The
 * first four files of a process stay; the fifth is of its newest failure: it is written anew as often as that takes at most one
 * twentieth of the time, of which no further line tells. With child not 0 the library starts that command on each of the four at
 * once, which writes a page and a text beside it, and does not wait for it: it is the one that CISTERN_COMMAND names, lies beside
 * the library or in ../bin from there, or is in PATH. dir NULL: no more files. What goes wrong is a line on standard error; the
 * request fails as it would without, at most 5 s later. */
int cistern_report(const char *dir, int child);

/* ---- snapshot and history ------------------------------------------------------------------------------------- */

typedef struct cistern_segment {
  uint64_t addr;    /* 0 for spare chunks, which are mapped nowhere */
  uint64_t size;    /* all add up to the reserved bytes and the paused ones */
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

/* cistern_snapshot_take lists all physical memory of the device, or of one pool of it, and what is in it, and the allocations
 * whose memory is paused. */
int cistern_snapshot_take(int device, const uint64_t pool[2] /* NULL: all */, cistern_snapshot **out);
void cistern_snapshot_free(cistern_snapshot *s);

/* cistern_snapshot_write writes the snapshot of every device in use, with the history where it is on, as a PyTorch
 * memory snapshot (a pickle) that PyTorch's viewer and `cistern replay` read; gzip if the name ends in .gz. */
int cistern_snapshot_write(const char *path);

/* cistern_trace_write writes the same in Cistern's own format, for `cistern report`, `replay`, `inspect` and `convert`, with
 * what a snapshot of PyTorch's has no place for: tags, libraries, threads. CISTERN_INVALID where no device is in use. Both
 * functions write a file whole or not at all. */
int cistern_trace_write(const char *path);

typedef struct cistern_event {
  int64_t time_us;    /* since 1970 */
  uint64_t addr;      /* of CISTERN_EVENT_OOM: the free memory of the device */
  uint64_t size;
  uint64_t pool[2];
  void *stream;
  uint64_t handle;    /* of a chunk mapped or unmapped: its number */
  uint32_t kind;      /* CISTERN_EVENT_ */
  uint32_t tag;
  uint32_t thread;    /* the kernel's number of the thread that caused it, 0 unknown */
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

/* cistern_history keeps the last n events of the device from now on, with -1 of every device, also of those that come
 * into use later; 0 stops and forgets them. It makes every request cost more. cistern_history_drain moves the oldest events,
 * at most cap, into buf, writes how many to *n, and to *lost (may be NULL) how many older ones were overwritten since the
 * last call. */
int cistern_history(int device, size_t n);
int cistern_history_drain(int device, cistern_event *buf, size_t cap, size_t *n, uint64_t *lost);

/* ---- sharing with other processes ----------------------------------------------------------------------------- */

/* cistern_share makes the allocation that starts at ptr available to other processes of the same user: writes a handle of
 * at most CISTERN_HANDLE_MAX characters (printable, 0-terminated) that cistern_open in another process understands. The
 * allocation must not be freed while others use it. cistern_open maps it on the device and gives the address of its
 * first byte; cistern_close undoes one cistern_open, once the caller knows that the GPU is done with it. The block itself is
 * what the sharing process gets for a handle of its own. Both processes must see the same /dev/shm (or, without one, the
 * same TMPDIR); a process that is gone or does not answer for ten seconds is an error. */
enum { CISTERN_HANDLE_MAX = 512 };
int cistern_share(void *ptr, char *handle, size_t cap);
int cistern_open(const char *handle, int device, void **ptr);
int cistern_close(void *ptr);

#ifdef __cplusplus
}
#endif
#endif
