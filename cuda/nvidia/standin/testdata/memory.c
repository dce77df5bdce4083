// The part of the stand-in that is about memory of other kinds: page-locked and managed memory, copies, and pools of
// stream-ordered memory. Work is done at once, so that an order of streams is no matter here; what a pool reserves is
// counted in 32 MiB, as an H200's does.

#include "standin.h"

enum { LOCKED = -2, MANAGED = -3, REGISTERED_RANGE = -4, POOLED = -5 };

struct pool {
	int device, handles, imported, reuse[4];
	uint64_t max, threshold, reserved, reserved_high, used, used_high;
};

struct pool_prop {
	int type, handles;
	struct location location;
	void *security;
	size_t max;
	unsigned short usage;
	unsigned char reserved[54];
};

static struct range others[MAX]; // fd says which kind
static struct pool *owner[MAX];  // of what is POOLED
static int files[MAX];           // of what is POOLED and can be exported, plus 1
static struct pool *defaults[8];
static struct pool *pools[256]; // all there ever were
static int pool_count;

static struct range *starts(char *p, int kind) {
	struct range *a = find(others, p);
	return a != NULL && a->p == p && a->fd == kind ? a : NULL;
}

// Whose memory it is (1 the host's, 2 a device's), whether it is managed, which device's, which pool's. Of what is in this file the
// device is not kept.
CUresult cuPointerGetAttribute(void *value, int attribute, uint64_t p) {
	ENTER("cuPointerGetAttribute")
	struct range *a = find(others, (char *)(uintptr_t)p);
	int device = device_of((char *)(uintptr_t)p), locked = a != NULL && (a->fd == LOCKED || a->fd == REGISTERED_RANGE);
	if (a == NULL && device < 0)
		r = INVALID_VALUE;
	else if (attribute == 2)
		*(int *)value = locked ? 1 : 2;
	else if (attribute == 8)
		*(int *)value = a != NULL && a->fd == MANAGED;
	else if (attribute == 9)
		*(int *)value = device < 0 ? 0 : device;
	else if (attribute == 17)
		*(struct pool **)value = a != NULL && a->fd == POOLED ? owner[a - others] : NULL;
	else
		r = INVALID_VALUE;
	RETURN("%d", attribute)
}

// make gets memory of a kind, of a file where that is not negative; NULL where there is none.
static struct range *make(size_t size, int kind, int file) {
	int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
	char *m = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, file, 0);
	if (m == MAP_FAILED || !add(others, m, size))
		return NULL;
	struct range *a = find(others, m);
	a->fd = kind;
	files[a - others] = file + 1;
	return a;
}

static void drop(struct range *a) {
	if (a->fd != REGISTERED_RANGE)
		munmap(a->p, a->size);
	if (a->fd == POOLED && files[a - others] > 0)
		close(files[a - others] - 1);
	a->p = NULL;
}

CUresult cuMemHostAlloc(void **p, size_t size, unsigned flags) {
	ENTER("cuMemHostAlloc")
	struct range *a = NULL;
	if (size == 0)
		r = INVALID_VALUE;
	else if ((a = make(size, LOCKED, -1)) == NULL)
		r = OUT_OF_MEMORY;
	else
		*p = a->p;
	RETURN("size %zu, flags %u", size, flags)
}

CUresult cuMemFreeHost(void *p) {
	ENTER("cuMemFreeHost")
	struct range *a = starts(p, LOCKED);
	if (a == NULL)
		r = INVALID_VALUE;
	else
		drop(a);
	RETURN("")
}

CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned flags) {
	ENTER("cuMemHostRegister")
	if (p == NULL || size == 0)
		r = INVALID_VALUE;
	for (int i = 0; r == SUCCESS && i < MAX; i++)
		if (others[i].p != NULL && others[i].p < (char *)p + size && (char *)p < others[i].p + others[i].size)
			r = REGISTERED;
	if (r == SUCCESS && !add(others, p, size))
		r = OUT_OF_MEMORY;
	if (r == SUCCESS)
		find(others, p)->fd = REGISTERED_RANGE;
	RETURN("size %zu, flags %u", size, flags)
}

CUresult cuMemHostUnregister(void *p) {
	ENTER("cuMemHostUnregister")
	struct range *a = starts(p, REGISTERED_RANGE);
	if (a == NULL)
		r = NOT_REGISTERED;
	else
		drop(a);
	RETURN("")
}

CUresult cuMemAllocManaged(uint64_t *p, size_t size, unsigned flags) {
	ENTER("cuMemAllocManaged")
	struct range *a = NULL;
	if (size == 0 || flags != 1)
		r = INVALID_VALUE;
	else if ((a = make(size, MANAGED, -1)) == NULL)
		r = OUT_OF_MEMORY;
	else
		*p = (uintptr_t)a->p;
	RETURN("size %zu, flags %u", size, flags)
}

static CUresult prefetch(uint64_t p, size_t size) {
	struct range *a = find(others, (char *)(uintptr_t)p);
	return a == NULL || a->fd != MANAGED || size == 0 || (char *)(uintptr_t)p + size > a->p + a->size ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemPrefetchAsync(uint64_t p, size_t size, int device, struct stream *s) {
	ENTER("cuMemPrefetchAsync")
	(void)s;
	r = device < -1 || device >= device_count() ? INVALID_DEVICE : prefetch(p, size);
	RETURN("size %zu, device %d", size, device)
}

CUresult cuMemPrefetchAsync_v2(uint64_t p, size_t size, struct location to, unsigned flags, struct stream *s) {
	ENTER("cuMemPrefetchAsync_v2")
	(void)s;
	if (flags != 0 || to.type < 1 || to.type > 2)
		r = INVALID_VALUE;
	else if (to.type == 1 && (to.id < 0 || to.id >= device_count()))
		r = INVALID_DEVICE;
	else
		r = prefetch(p, size);
	RETURN("size %zu, location %d:%d", size, to.type, to.id)
}

// crosses reports whether a range leaves the registration or host allocation that it begins in, or enters one.
static int crosses(char *p, size_t size) {
	for (int i = 0; i < MAX; i++) {
		struct range *a = &others[i];
		if (a->p != NULL && a->fd != POOLED && a->p < p + size && p < a->p + a->size && (p < a->p || p + size > a->p + a->size))
			return 1;
	}
	return 0;
}

CUresult cuMemcpyAsync(uint64_t dst, uint64_t src, size_t size, struct stream *s) {
	ENTER("cuMemcpyAsync")
	char *to = (char *)(uintptr_t)dst, *from = (char *)(uintptr_t)src;
	if ((r = implicit(s, 1)) == SUCCESS && (crosses(to, size) || crosses(from, size)))
		r = INVALID_VALUE;
	if (r == SUCCESS && resolve(s)->capture == 0)
		memcpy(to, from, size);
	RETURN("size %zu", size)
}

// Pools.

static struct pool *new_pool(int device, int handles, size_t max) {
	struct pool *p = pool_count < 256 ? calloc(1, sizeof *p) : NULL;
	if (p != NULL)
		pools[pool_count++] = p;
	if (p != NULL)
		*p = (struct pool){.device = device, .handles = handles, .max = max, .reuse = {0, 1, 1, 1}};
	return p;
}

CUresult cuMemPoolCreate(struct pool **pool, const struct pool_prop *prop) {
	ENTER("cuMemPoolCreate")
	int clean = prop->security == NULL && prop->usage == 0;
	for (size_t i = 0; i < sizeof prop->reserved; i++)
		clean = clean && prop->reserved[i] == 0;
	if (prop->type != 1 || prop->location.type != 1 || !clean)
		r = INVALID_VALUE;
	else if (prop->location.id < 0 || prop->location.id >= device_count())
		r = INVALID_DEVICE;
	else if ((*pool = new_pool(prop->location.id, prop->handles, prop->max)) == NULL)
		r = OUT_OF_MEMORY;
	RETURN("handles %d, location %d:%d, max %zu", prop->handles, prop->location.type, prop->location.id, prop->max)
}

// keep makes a pool hold no more than it must: what is used, in whole grains, and what is to be kept.
static void keep(struct pool *p, uint64_t bytes) {
	const uint64_t grain = (uint64_t)32 << 20;
	uint64_t least = (p->used + grain - 1) / grain * grain;
	if (p->reserved > bytes && p->reserved > least) {
		uint64_t left = least > bytes ? least : (bytes + grain - 1) / grain * grain;
		if (left < p->reserved) {
			used -= p->reserved - left;
			p->reserved = left;
		}
	}
}

void pools_after_wait(void) {
	for (int i = 0; i < pool_count; i++)
		keep(pools[i], pools[i]->threshold);
}

CUresult cuMemPoolDestroy(struct pool *pool) {
	ENTER("cuMemPoolDestroy")
	for (int i = 0; i < 8; i++)
		if (pool == NULL || pool == defaults[i])
			r = INVALID_VALUE;
	if (r == SUCCESS) {
		pool->threshold = 0;
		keep(pool, 0); // the pool itself is left: what is allocated from it may be freed later
	}
	RETURN("")
}

CUresult cuDeviceGetDefaultMemPool(struct pool **pool, int device) {
	ENTER("cuDeviceGetDefaultMemPool")
	if (device < 0 || device >= device_count())
		r = INVALID_DEVICE;
	else if (defaults[device] == NULL && (defaults[device] = new_pool(device, 0, 0)) == NULL)
		r = OUT_OF_MEMORY;
	else
		*pool = defaults[device];
	RETURN("%d", device)
}

CUresult cuMemPoolGetAttribute(struct pool *pool, int attribute, void *value) {
	ENTER("cuMemPoolGetAttribute")
	if (attribute < 1 || attribute > 8)
		r = INVALID_VALUE;
	else if (attribute <= 3)
		*(int *)value = pool->reuse[attribute];
	else
		*(uint64_t *)value = (&pool->threshold)[attribute - 4];
	RETURN("%d", attribute)
}

CUresult cuMemPoolSetAttribute(struct pool *pool, int attribute, void *value) {
	ENTER("cuMemPoolSetAttribute")
	unsigned long long v = attribute >= 1 && attribute <= 3 ? (unsigned long long)*(int *)value : *(uint64_t *)value;
	if (attribute >= 1 && attribute <= 3)
		pool->reuse[attribute] = (int)v;
	else if (attribute == 4)
		pool->threshold = v;
	else if (attribute == 6 && v == 0)
		pool->reserved_high = pool->reserved;
	else if (attribute == 8 && v == 0)
		pool->used_high = pool->used;
	else
		r = INVALID_VALUE;
	RETURN("%d, %llu", attribute, v)
}

CUresult cuMemPoolTrimTo(struct pool *pool, size_t bytes) {
	ENTER("cuMemPoolTrimTo")
	keep(pool, bytes);
	RETURN("%zu", bytes)
}

CUresult cuMemPoolSetAccess(struct pool *pool, const struct access *access, size_t count) {
	ENTER("cuMemPoolSetAccess")
	char devices[128] = "";
	if (pool == NULL || count == 0)
		r = INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		size_t n = strlen(devices);
		snprintf(devices + n, sizeof devices - n, " %d:%d=%d", access[i].location.type, access[i].location.id, access[i].flags);
		if (access[i].location.type != 1 || access[i].flags != 3)
			r = INVALID_VALUE;
		else if (access[i].location.id != pool->device && !number("STANDIN_PEERS", 1))
			r = PEER_UNSUPPORTED;
	}
	RETURN("%s", devices)
}

CUresult cuMemAllocFromPoolAsync(uint64_t *p, size_t size, struct pool *pool, struct stream *s) {
	ENTER("cuMemAllocFromPoolAsync")
	const uint64_t grain = (uint64_t)32 << 20;
	struct range *a = NULL;
	int file = -1;
	*p = 0;
	if (pool == NULL || pool->imported || resolve(s)->capture != 0) {
		r = INVALID_VALUE; // a capture would make a node of it, which nothing here does
	} else if (size != 0) {
		uint64_t want = (pool->used + size + grain - 1) / grain * grain, more = want > pool->reserved ? want - pool->reserved : 0;
		if (size > CAPACITY || used + more > CAPACITY || (pool->max != 0 && want > (pool->max + grain - 1) / grain * grain) ||
		    (pool->handles == 1 && ((file = memfd_create("pool", MFD_CLOEXEC)) < 0 || ftruncate(file, (off_t)((size + 511) / 512 * 512)) != 0)) ||
		    (a = make((size + 511) / 512 * 512, POOLED, file)) == NULL) {
			if (file >= 0)
				close(file);
			r = OUT_OF_MEMORY;
		} else {
			a->size = size;
			owner[a - others] = pool;
			used += more;
			pool->reserved += more;
			pool->used += size;
			if (pool->reserved_high < pool->reserved)
				pool->reserved_high = pool->reserved;
			if (pool->used_high < pool->used)
				pool->used_high = pool->used;
			*p = (uintptr_t)a->p;
		}
	}
	RETURN("size %zu, stream %d", size, (uintptr_t)s > 2 ? -1 : (int)(uintptr_t)s)
}

static int pool_free(char *p) {
	struct range *a = starts(p, POOLED);
	if (a == NULL)
		return 0;
	owner[a - others]->used -= a->size;
	drop(a);
	return 1;
}

CUresult cuMemFreeAsync(uint64_t p, struct stream *s) {
	ENTER("cuMemFreeAsync")
	if (resolve(s)->capture != 0 || !pool_free((char *)(uintptr_t)p))
		r = INVALID_VALUE;
	RETURN("stream %d", (uintptr_t)s > 2 ? -1 : (int)(uintptr_t)s)
}

int other_free(char *p) {
	struct range *a = starts(p, MANAGED);
	if (a != NULL)
		drop(a);
	return a != NULL || pool_free(p);
}

// Pools for other processes. A pool's descriptor is a file that says which device it is of, its memory is files that the importer finds
// in /proc.

static const char pool_magic[8] = "sipool\n";

struct pool_file { char magic[8]; int device; };

CUresult cuMemPoolExportToShareableHandle(void *out, struct pool *pool, int type, unsigned long long flags) {
	BEGIN("cuMemPoolExportToShareableHandle")
	struct pool_file says = {"", pool == NULL ? 0 : pool->device};
	memcpy(says.magic, pool_magic, sizeof pool_magic);
	int fd = -1;
	if (pool == NULL || type != 1 || flags != 0 || pool->handles != 1 || pool->imported)
		r = INVALID_VALUE;
	else if ((fd = memfd_create("pool", 0)) < 0 || write(fd, &says, sizeof says) != sizeof says)
		r = UNKNOWN;
	else
		*(int *)out = fd;
	RETURN("type %d", type)
}

CUresult cuMemPoolImportFromShareableHandle(struct pool **pool, void *from, int type, unsigned long long flags) {
	BEGIN("cuMemPoolImportFromShareableHandle")
	struct pool_file says;
	if (type != 1 || flags != 0 || pread((int)(intptr_t)from, &says, sizeof says, 0) != sizeof says ||
	    memcmp(says.magic, pool_magic, sizeof pool_magic) != 0)
		r = INVALID_VALUE;
	else if ((*pool = new_pool(says.device, 1, 0)) == NULL)
		r = OUT_OF_MEMORY;
	else
		(*pool)->imported = 1;
	RETURN("type %d", type)
}

CUresult cuMemPoolExportPointer(struct ipc *handle, uint64_t p) {
	ENTER("cuMemPoolExportPointer")
	struct range *a = starts((char *)(uintptr_t)p, POOLED);
	memset(handle, 0, sizeof *handle);
	if (a == NULL || files[a - others] == 0 || owner[a - others]->imported)
		r = INVALID_VALUE;
	else
		*handle = (struct ipc){"pooled", getpid(), files[a - others] - 1, a->size, ""};
	RETURN("")
}

CUresult cuMemPoolImportPointer(uint64_t *p, struct pool *pool, struct ipc *handle) {
	ENTER("cuMemPoolImportPointer")
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
	int fd = -1;
	struct range *a = NULL;
	if (pool == NULL || !pool->imported || strcmp(handle->magic, "pooled") != 0)
		r = INVALID_VALUE;
	else if ((fd = open(path, O_RDWR | O_CLOEXEC)) < 0)
		r = INVALID_HANDLE;
	else if ((a = make((handle->size + 511) / 512 * 512, POOLED, fd)) == NULL) {
		close(fd);
		r = OUT_OF_MEMORY;
	} else {
		a->size = handle->size;
		owner[a - others] = pool;
		pool->used += a->size;
		*p = (uintptr_t)a->p;
	}
	RETURN("")
}
