// A stand-in for libcuda.so.1, for tests on machines without a GPU. Contexts, chunks, mappings, streams and captures
// are modelled as far as the binding can tell; memory is host memory, so that a chunk mapped twice really shows the
// same bytes at both addresses; every call completes at once. The declarations are written out here again, from the
// CUDA Driver API documentation and not from driver.h, so that a mistake there is found.
//
// Every call is appended to the file that STANDIN_LOG names, with the capture mode and the current context it was made
// in. Other variables, read at every call:
//
//	STANDIN_FAIL       calls that fail, and with which code: "cuMemCreate=2,cuMemMap=801"
//	STANDIN_DEVICES    how many there are (1)
//	STANDIN_VERSION    of CUDA (13000)
//	STANDIN_FABRIC     "refused", "missing", "no handles" (not even POSIX), "no vmm"
//	STANDIN_ACTIVE     1: another library made the primary contexts
//	STANDIN_CURRENT    the device whose context the program has current in every thread
//	STANDIN_NOT_READY  1: events stay pending
//	STANDIN_PEERS      0: no device can use the memory of another
//
// A symbol is left out by compiling with -DcuStreamGetId=missing. Streams, events and kernels are in work.c, sharing
// between processes in share.c, host, managed and pooled memory in memory.c, what only traced programs call in more.c.

#include "standin.h"

pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; // over all that follows, but the thread-locals
int initialised;
static struct context contexts[8];
static struct mapping mappings[MAX];
static struct range ranges[MAX];
struct range allocations[MAX];
size_t used;
uint64_t next_id = 10;

static __thread int mode; // CU_STREAM_CAPTURE_MODE_GLOBAL
static __thread struct context *stack[16];
static __thread int depth;

int number(const char *name, int otherwise) {
	const char *s = getenv(name);
	return s != NULL && *s != 0 ? atoi(s) : otherwise;
}

struct context *current(void) {
	int own = number("STANDIN_CURRENT", -1);
	return depth > 0 ? stack[depth - 1] : own >= 0 ? &contexts[own] : NULL;
}

int device_count(void) { return number("STANDIN_DEVICES", 1); }

static int is(const char *name, const char *value) {
	const char *s = getenv(name);
	return s != NULL && strcmp(s, value) == 0;
}

int forced(const char *call) {
	const char *s = getenv("STANDIN_FAIL");
	size_t n = strlen(call);
	for (; s != NULL && *s != 0; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL)
		if (strncmp(s, call, n) == 0 && s[n] == '=')
			return atoi(s + n + 1);
	return 0;
}

CUresult report(const char *call, CUresult r, const char *format, ...) {
	const char *path = getenv("STANDIN_LOG");
	if (path == NULL || *path == 0)
		return r;
	char line[512], args[300];
	va_list list;
	va_start(list, format);
	vsnprintf(args, sizeof args, format, list);
	va_end(list);
	const char *const modes[] = {"global", "local", "relaxed"};
	int n = snprintf(line, sizeof line, "%s(%s) = %d in %s mode, context %d\n", call, args, r, modes[mode],
			 current() == NULL ? -1 : current()->device);
	int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	if (fd >= 0) {
		if (write(fd, line, (size_t)n) < 0)
			perror("STANDIN_LOG");
		close(fd);
	}
	return r;
}

CUresult cuInit(unsigned flags) {
	int fail = forced("cuInit");
	if (fail == 0 && device_count() == 0)
		fail = NO_DEVICE;
	initialised = fail == 0;
	for (int i = 0; i < 8; i++) {
		contexts[i].device = i;
		if (number("STANDIN_ACTIVE", 0) && contexts[i].retained == 0)
			contexts[i].retained = 1;
	}
	return report("cuInit", fail, "%u", flags);
}

CUresult cuDriverGetVersion(int *version) {
	*version = number("STANDIN_VERSION", 13000);
	return forced("cuDriverGetVersion");
}

CUresult cuDeviceGetCount(int *count) {
	*count = device_count();
	return forced("cuDeviceGetCount");
}

CUresult cuDeviceGet(int *device, int ordinal) {
	if (ordinal < 0 || ordinal >= device_count())
		return INVALID_DEVICE;
	*device = ordinal;
	return forced("cuDeviceGet");
}

CUresult cuDeviceGetName(char *name, int size, int device) {
	snprintf(name, (size_t)size, "Stand-in GPU %d", device);
	return forced("cuDeviceGetName");
}

// A process whose CUDA_VISIBLE_DEVICES is a number sees that device as its first.
static void uuid(unsigned char bytes[16], int first, int device) {
	for (int i = 0; i < 16; i++)
		bytes[i] = (unsigned char)(first + i);
	bytes[15] = (unsigned char)(device + number("CUDA_VISIBLE_DEVICES", 0));
}

CUresult cuDeviceGetUuid(unsigned char bytes[16], int device) {
	uuid(bytes, 0x10, device);
	return forced("cuDeviceGetUuid");
}

CUresult cuDeviceGetUuid_v2(unsigned char bytes[16], int device) {
	uuid(bytes, 0x20, device);
	return forced("cuDeviceGetUuid_v2");
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
	(void)device;
	switch (attribute) {
	case 16: *value = 132; break;
	case 89: *value = 1; break;
	case 115: *value = 1; break;
	case 119: *value = 9 | 4; break; // and one that Cistern has no name for
	case 134: *value = 0; break;
	case 141: *value = 1; break;
	case 102: *value = !is("STANDIN_FABRIC", "no vmm"); break;
	case 103: *value = 1; break;
	case 110: *value = 1; break;
	case 128: *value = !is("STANDIN_FABRIC", "missing"); break;
	default: return report("cuDeviceGetAttribute", INVALID_VALUE, "%d", attribute);
	}
	return forced("cuDeviceGetAttribute");
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
	(void)device;
	*bytes = CAPACITY;
	return forced("cuDeviceTotalMem");
}

CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
	*flags = 0;
	*active = contexts[device].retained > 0;
	return forced("cuDevicePrimaryCtxGetState");
}

CUresult cuDevicePrimaryCtxRetain(struct context **context, int device) {
	BEGIN("cuDevicePrimaryCtxRetain")
	contexts[device].retained++;
	*context = &contexts[device];
	RETURN("%d", device)
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
	BEGIN("cuDevicePrimaryCtxRelease")
	if (contexts[device].retained == 0)
		r = INVALID_CONTEXT;
	else
		contexts[device].retained--;
	RETURN("%d", device)
}

CUresult cuCtxGetCurrent(struct context **context) {
	*context = current();
	return forced("cuCtxGetCurrent");
}

CUresult cuCtxPushCurrent_v2(struct context *context) {
	BEGIN("cuCtxPushCurrent")
	if (context == NULL || depth == 16 || context->retained == 0)
		r = INVALID_CONTEXT;
	else
		stack[depth++] = context;
	RETURN("depth %d", depth)
}

CUresult cuCtxPopCurrent_v2(struct context **context) {
	BEGIN("cuCtxPopCurrent")
	if (depth == 0)
		r = INVALID_CONTEXT;
	else
		*context = stack[--depth];
	RETURN("depth %d", depth)
}

CUresult cuCtxSynchronize(void) {
	ENTER("cuCtxSynchronize")
	pools_after_wait();
	RETURN("")
}

CUresult cuDeviceCanAccessPeer(int *can, int device, int peer) {
	BEGIN("cuDeviceCanAccessPeer")
	*can = device != peer && number("STANDIN_PEERS", 1);
	RETURN("%d, %d", device, peer)
}

CUresult cuCtxEnablePeerAccess(struct context *peer, unsigned flags) {
	ENTER("cuCtxEnablePeerAccess")
	if (flags != 0)
		r = INVALID_VALUE;
	else if (peer == NULL || peer->retained == 0 || peer == current())
		r = INVALID_CONTEXT;
	else if (!number("STANDIN_PEERS", 1))
		r = PEER_UNSUPPORTED;
	else if (current()->peers & 1u << peer->device)
		r = PEER_ENABLED;
	else
		current()->peers |= 1u << peer->device;
	RETURN("peer %d", peer == NULL ? -1 : peer->device)
}

CUresult cuCtxGetId(struct context *context, unsigned long long *id) {
	if (context == NULL)
		return INVALID_CONTEXT;
	*id = 100 + (unsigned)context->device;
	return forced("cuCtxGetId");
}

CUresult cuThreadExchangeStreamCaptureMode(int *m) {
	BEGIN("cuThreadExchangeStreamCaptureMode")
	if (*m < 0 || *m > 2) {
		r = INVALID_VALUE;
	} else {
		int old = mode;
		mode = *m;
		*m = old;
	}
	RETURN("%d", mode)
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
	ENTER("cuMemGetInfo")
	*free = CAPACITY - used;
	*total = CAPACITY;
	RETURN("")
}

// Ranges of addresses, reserved or allocated.

int add(struct range *table, char *p, size_t size) {
	for (int i = 0; i < MAX; i++)
		if (table[i].p == NULL) {
			table[i] = (struct range){p, size, -1, 0};
			return 1;
		}
	return 0;
}

struct range *find(struct range *table, char *p) {
	for (int i = 0; i < MAX; i++)
		if (table[i].p != NULL && table[i].p <= p && p < table[i].p + table[i].size)
			return &table[i];
	return NULL;
}

CUresult cuMemAlloc_v2(uint64_t *p, size_t size) {
	ENTER("cuMemAlloc")
	char *m = MAP_FAILED;
	int fd = -1; // what is large is in a file, so that another process can map it
	if (size == 0)
		r = INVALID_VALUE;
	else if (used + size > CAPACITY)
		r = OUT_OF_MEMORY;
	else if (size >= GRANULARITY && ((fd = memfd_create("allocation", MFD_CLOEXEC)) < 0 || ftruncate(fd, (off_t)size) != 0))
		r = OUT_OF_MEMORY;
	else if ((m = mmap(NULL, size, PROT_READ | PROT_WRITE, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0)) ==
			 MAP_FAILED ||
		 !add(allocations, m, size))
		r = OUT_OF_MEMORY;
	if (r == SUCCESS) {
		find(allocations, m)->fd = fd;
		find(allocations, m)->device = current()->device;
		used += size;
		*p = (uintptr_t)m;
	} else if (fd >= 0) {
		close(fd);
	}
	RETURN("size %zu", size)
}

CUresult cuMemFree_v2(uint64_t p) {
	ENTER("cuMemFree")
	struct range *a = find(allocations, (char *)(uintptr_t)p);
	if (other_free((char *)(uintptr_t)p)) {
		r = SUCCESS;
	} else if (a == NULL || a->p != (char *)(uintptr_t)p) {
		r = INVALID_VALUE;
	} else {
		munmap(a->p, a->size);
		if (a->fd >= 0)
			close(a->fd);
		used -= a->size;
		a->p = NULL;
	}
	RETURN("")
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const struct prop *prop, int option) {
	if (prop->type != 1 || prop->location.type != 1 || option != 0)
		return INVALID_VALUE;
	*granularity = GRANULARITY;
	return forced("cuMemGetAllocationGranularity");
}

CUresult cuMemAddressReserve(uint64_t *p, size_t size, size_t align, uint64_t hint, unsigned long long flags) {
	BEGIN("cuMemAddressReserve")
	char *m = MAP_FAILED;
	size_t slack = align > GRANULARITY ? align : GRANULARITY;
	if (size == 0 || size % GRANULARITY != 0 || align % GRANULARITY != 0 || flags != 0)
		r = INVALID_VALUE;
	else if ((m = mmap((void *)(uintptr_t)hint, size + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) ==
		 MAP_FAILED)
		r = OUT_OF_MEMORY;
	if (r == SUCCESS) {
		char *aligned = (char *)(((uintptr_t)m + slack - 1) / slack * slack);
		if (aligned > m)
			munmap(m, (size_t)(aligned - m));
		if (aligned + size < m + size + slack)
			munmap(aligned + size, (size_t)(m + slack - aligned));
		if (!add(ranges, aligned, size))
			r = OUT_OF_MEMORY;
		*p = (uintptr_t)aligned;
	}
	RETURN("size %zu, align %zu, hint %d", size, align, hint != 0)
}

CUresult cuMemAddressFree(uint64_t p, size_t size) {
	BEGIN("cuMemAddressFree")
	struct range *a = find(ranges, (char *)(uintptr_t)p);
	if (a == NULL || a->p != (char *)(uintptr_t)p || a->size != size)
		r = INVALID_VALUE;
	for (int i = 0; r == SUCCESS && i < MAX; i++)
		if (mappings[i].p >= a->p && mappings[i].p < a->p + size)
			r = INVALID_VALUE;
	if (r == SUCCESS) {
		munmap(a->p, size);
		a->p = NULL;
	}
	RETURN("size %zu", size)
}

CUresult cuMemCreate(uint64_t *handle, size_t size, const struct prop *prop, unsigned long long flags) {
	BEGIN("cuMemCreate")
	int clean = prop->win32 == NULL && prop->compression == 0 && prop->usage == 0;
	for (int i = 0; i < 4; i++)
		clean = clean && prop->reserved[i] == 0;
	struct chunk *c = NULL;
	if (prop->type != 1 || !clean || flags != 0 || size == 0 || size % GRANULARITY != 0)
		r = INVALID_VALUE;
	else if (prop->location.type == 1 && (prop->location.id < 0 || prop->location.id >= device_count()))
		r = INVALID_DEVICE;
	else if (prop->location.type == 3 && (prop->location.id < 0 || prop->location.id >= NODES))
		r = INVALID_DEVICE;
	else if ((prop->handles & 8) != 0 && is("STANDIN_FABRIC", "refused"))
		r = NOT_PERMITTED;
	else if ((prop->handles & 8) != 0 && is("STANDIN_FABRIC", "missing"))
		r = NOT_SUPPORTED;
	else if (prop->handles != 0 && is("STANDIN_FABRIC", "no handles"))
		r = NOT_SUPPORTED;
	else if ((prop->location.type == 1 && used + size > CAPACITY) || (c = calloc(1, sizeof *c)) == NULL)
		r = OUT_OF_MEMORY;
	if (r == SUCCESS) {
		c->fd = memfd_create("chunk", MFD_CLOEXEC);
		c->size = size;
		c->references = 1;
		c->handles = prop->handles;
		c->node = prop->location.type == 3 ? prop->location.id : -1;
		c->device = prop->location.type == 1 ? prop->location.id : 0;
		if (c->fd < 0 || ftruncate(c->fd, (off_t)size) != 0)
			r = OUT_OF_MEMORY;
		used += c->node < 0 ? size : 0;
		*handle = (uintptr_t)c;
	}
	RETURN("size %zu, handles %d, location %d:%d, rdma %d", size, prop->handles, prop->location.type, prop->location.id, prop->rdma)
}

static void unreference(struct chunk *c) {
	if (--c->references == 0) {
		close(c->fd);
		used -= c->imported || c->node >= 0 ? 0 : c->size;
		free(c);
	}
}

CUresult cuMemRelease(uint64_t handle) {
	BEGIN("cuMemRelease")
	if (handle == 0)
		r = INVALID_VALUE;
	else
		unreference((struct chunk *)(uintptr_t)handle);
	RETURN("")
}

CUresult cuMemMap(uint64_t p, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
	BEGIN("cuMemMap")
	struct chunk *c = (struct chunk *)(uintptr_t)handle;
	char *at = (char *)(uintptr_t)p;
	struct range *range = find(ranges, at);
	if (c == NULL || range == NULL || at + size > range->p + range->size || offset != 0 || flags != 0 || size != c->size)
		r = INVALID_VALUE;
	struct mapping *slot = NULL;
	for (int i = 0; r == SUCCESS && i < MAX; i++) {
		if (mappings[i].p == NULL)
			slot = slot == NULL ? &mappings[i] : slot;
		else if (mappings[i].p < at + size && at < mappings[i].p + mappings[i].size)
			r = INVALID_VALUE; // mapped already
	}
	if (r == SUCCESS && (slot == NULL || mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, c->fd, 0) == MAP_FAILED))
		r = OUT_OF_MEMORY;
	if (r == SUCCESS) {
		*slot = (struct mapping){at, size, c};
		c->references++;
	}
	RETURN("size %zu", size)
}

static struct mapping *mapped(char *p) {
	for (int i = 0; i < MAX; i++)
		if (mappings[i].p != NULL && mappings[i].p <= p && p < mappings[i].p + mappings[i].size)
			return &mappings[i];
	return NULL;
}

int device_of(char *p) {
	struct mapping *m = mapped(p);
	struct range *a = find(allocations, p);
	return m != NULL ? m->chunk->device : a != NULL ? a->device : -1;
}

CUresult cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t p) {
	ENTER("cuMemGetAddressRange")
	struct mapping *m = mapped((char *)(uintptr_t)p);
	struct range *a = find(allocations, (char *)(uintptr_t)p);
	if (m == NULL && a == NULL)
		r = NOT_FOUND;
	if (r == SUCCESS && base != NULL)
		*base = (uintptr_t)(m != NULL ? m->p : a->p);
	if (r == SUCCESS && size != NULL)
		*size = m != NULL ? m->size : a->size;
	RETURN("")
}

CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *p) {
	BEGIN("cuMemRetainAllocationHandle")
	struct mapping *m = mapped(p);
	if (m == NULL) {
		r = INVALID_VALUE;
	} else {
		m->chunk->references++;
		*handle = (uintptr_t)m->chunk;
	}
	RETURN("")
}

// covered adds up the mappings that lie wholly within a range.
static size_t covered(char *p, size_t size) {
	size_t sum = 0;
	for (int i = 0; i < MAX; i++)
		if (mappings[i].p != NULL && mappings[i].p >= p && mappings[i].p + mappings[i].size <= p + size)
			sum += mappings[i].size;
	return sum;
}

CUresult cuMemUnmap(uint64_t p, size_t size) {
	BEGIN("cuMemUnmap")
	char *at = (char *)(uintptr_t)p;
	if (size == 0 || covered(at, size) != size)
		r = INVALID_VALUE;
	for (int i = 0; r == SUCCESS && i < MAX; i++)
		if (mappings[i].p != NULL && mappings[i].p >= at && mappings[i].p < at + size) {
			unreference(mappings[i].chunk);
			mappings[i].p = NULL;
		}
	if (r == SUCCESS)
		mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	RETURN("size %zu", size)
}

// host_numa reports whether all that is mapped in a range lies on the node.
static int host_numa(char *p, size_t size, int node) {
	for (int i = 0; i < MAX; i++)
		if (mappings[i].p != NULL && mappings[i].p >= p && mappings[i].p < p + size && mappings[i].chunk->node != node)
			return 0;
	return 1;
}

CUresult cuMemSetAccess(uint64_t p, size_t size, const struct access *access, size_t count) {
	BEGIN("cuMemSetAccess")
	char *at = (char *)(uintptr_t)p;
	char devices[128] = "";
	if (count == 0 || covered(at, size) != size)
		r = INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		size_t n = strlen(devices);
		snprintf(devices + n, sizeof devices - n, " %d:%d=%d", access[i].location.type, access[i].location.id, access[i].flags);
		if (access[i].location.type == 3 && access[i].flags == 3 && host_numa(at, size, access[i].location.id))
			continue;
		if (access[i].location.type != 1 || (access[i].flags != 3 && access[i].flags != 1))
			r = INVALID_VALUE;
		else if (access[i].location.id < 0 || access[i].location.id >= device_count())
			r = INVALID_DEVICE;
	}
	if (r == SUCCESS)
		mprotect(at, size, PROT_READ | PROT_WRITE);
	RETURN("size %zu,%s", size, devices)
}
