//go:build linux && cgo

#include "library.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nm_library {
	void *library;
	const char *(*words)(nvmlReturn_t);
	_Atomic int current;
#define X(name, parameters) nvmlReturn_t(*name) parameters;
	NM_CALLS(X)
#undef X
};

static const char *const call_names[] = {
#define X(name, parameters) #name,
	NM_CALLS(X)
#undef X
};

const char *nm_call_name(int call) {
	return call >= 0 && call < NM_CALL_COUNT ? call_names[call] : "unknown call";
}

nm_library *nm_open(const char *path, char *reason, size_t reason_size) {
	// RTLD_LOCAL: a program that loads the library itself must not see a difference.
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (library == NULL) {
		const char *why = dlerror();
		snprintf(reason, reason_size, "%s", why != NULL ? why : "dlopen failed");
		return NULL;
	}
	nm_library *l = calloc(1, sizeof *l);
	if (l == NULL) {
		snprintf(reason, reason_size, "out of host memory");
		dlclose(library);
		return NULL;
	}
	l->library = library;
	l->current = -1;
	*(void **)&l->words = dlsym(library, "nvmlErrorString");
#define X(name, parameters) *(void **)&l->name = dlsym(library, #name);
	NM_CALLS(X)
#undef X
	if (l->nvmlInit_v2 == NULL || l->nvmlDeviceGetHandleByIndex_v2 == NULL) {
		snprintf(reason, reason_size, "%s: not NVIDIA's management library (no nvmlInit_v2)", path);
		nm_close(l);
		return NULL;
	}
	return l;
}

void nm_close(nm_library *l) {
	dlclose(l->library);
	free(l);
}

const char *nm_words(nm_library *l, int code) {
	const char *words = l->words != NULL ? l->words(code) : NULL;
	return words != NULL ? words : "";
}

int nm_current(nm_library *l) { return atomic_load(&l->current); }

// A call is made under its name, so that its caller can say what it waits for.
static void begin(nm_library *l, int call) { atomic_store(&l->current, call); }

static nm_result end(nm_library *l, int call, nvmlReturn_t r) {
	atomic_store(&l->current, -1);
	return r == NVML_SUCCESS ? 0 : (nm_result)call << 32 | (uint32_t)r;
}

#define FAIL(name, code) ((nm_result)NM_##name << 32 | (uint32_t)(code))
#define CALL(l, name, ...) \
	((l)->name == NULL ? FAIL(name, NM_MISSING) \
			   : (begin(l, NM_##name), end(l, NM_##name, (l)->name(__VA_ARGS__))))

// older says whether a newer version of a call is missing, so that an older one may be used.
static int older(nm_result r) {
	uint32_t code = (uint32_t)r;
	return r != 0 && (code == NM_MISSING || code == NVML_ERROR_FUNCTION_NOT_FOUND || code == NVML_ERROR_DEPRECATED ||
			  code == NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
}

nm_result nm_init(nm_library *l) { return CALL(l, nvmlInit_v2); }
nm_result nm_shutdown(nm_library *l) { return CALL(l, nvmlShutdown); }

nm_result nm_driver(nm_library *l, char *version, unsigned size) {
	return CALL(l, nvmlSystemGetDriverVersion, version, size);
}

nm_result nm_process_name(nm_library *l, unsigned pid, char *name, unsigned size) {
	return CALL(l, nvmlSystemGetProcessName, pid, name, size);
}

nm_result nm_count(nm_library *l, unsigned *n) { return CALL(l, nvmlDeviceGetCount_v2, n); }

nm_result nm_handle(nm_library *l, unsigned index, nvmlDevice_t *dev) {
	return CALL(l, nvmlDeviceGetHandleByIndex_v2, index, dev);
}

nm_result nm_uuid(nm_library *l, nvmlDevice_t dev, char *text, unsigned size) {
	return CALL(l, nvmlDeviceGetUUID, dev, text, size);
}

nm_result nm_name(nm_library *l, nvmlDevice_t dev, char *text, unsigned size) {
	return CALL(l, nvmlDeviceGetName, dev, text, size);
}

nm_result nm_bus(nm_library *l, nvmlDevice_t dev, char *text, size_t size) {
	nvmlPciInfo_t info = {0};
	nm_result r = CALL(l, nvmlDeviceGetPciInfo_v3, dev, &info);
	if (r == 0)
		snprintf(text, size, "%.*s", (int)sizeof info.busId, info.busId);
	return r;
}

nm_result nm_utilization(nm_library *l, nvmlDevice_t dev, unsigned *gpu, unsigned *memory) {
	nvmlUtilization_t u = {0};
	nm_result r = CALL(l, nvmlDeviceGetUtilizationRates, dev, &u);
	*gpu = u.gpu;
	*memory = u.memory;
	return r;
}

nm_result nm_memory(nm_library *l, nvmlDevice_t dev, nm_memory_info *out) {
	nvmlMemory_v2_t new = {.version = (unsigned)sizeof new | 2u << 24};
	nm_result r = CALL(l, nvmlDeviceGetMemoryInfo_v2, dev, &new);
	if (r == 0) {
		*out = (nm_memory_info){new.total, new.used, new.free, new.reserved};
		// Headers disagree on whether used includes what is reserved; the sum does not.
		if (new.reserved != 0 && new.reserved <= new.used && new.used + new.free == new.total)
			out->used -= new.reserved;
		return 0;
	}
	if (!older(r))
		return r;
	nvmlMemory_t old = {0};
	r = CALL(l, nvmlDeviceGetMemoryInfo, dev, &old);
	if (r == 0)
		*out = (nm_memory_info){old.total, old.used, old.free, 0};
	return r;
}

// One process in the list that NVML fills is PID and bytes; since driver 450 the numbers of the MIG instance may follow, and in
// some drivers of the series 535 another number of bytes. Which of the three it is does not follow from the version in the
// call's name: drivers of all kinds have been seen. What they wrote tells: behind it the buffer is as it was.
enum { ENTRY_MIN = 16, ENTRY_MAX = 32, UNTOUCHED = 0xa5, PROCESSES_MAX = 1 << 16 };

static size_t entry_size(const unsigned char *buffer, size_t n) {
	size_t end = n * ENTRY_MAX;
	while (end > 0 && buffer[end - 1] == UNTOUCHED)
		end--;
	return end > n * 24 ? 32 : end > n * 16 ? 24 : 16;
}

static nm_result list_processes(nm_library *l, nvmlDevice_t dev, int graphics, int version, unsigned *n, void *buffer) {
	switch (version + 10 * graphics) {
	case 3: return CALL(l, nvmlDeviceGetComputeRunningProcesses_v3, dev, n, buffer);
	case 2: return CALL(l, nvmlDeviceGetComputeRunningProcesses_v2, dev, n, buffer);
	case 1: return CALL(l, nvmlDeviceGetComputeRunningProcesses, dev, n, buffer);
	case 13: return CALL(l, nvmlDeviceGetGraphicsRunningProcesses_v3, dev, n, buffer);
	case 12: return CALL(l, nvmlDeviceGetGraphicsRunningProcesses_v2, dev, n, buffer);
	default: return CALL(l, nvmlDeviceGetGraphicsRunningProcesses, dev, n, buffer);
	}
}

nm_result nm_processes(nm_library *l, nvmlDevice_t dev, int graphics, nm_process **list, size_t *n) {
	*list = NULL;
	*n = 0;
	int version = 3;
	unsigned capacity = 64;
	for (int tries = 0;; tries++) {
		unsigned count = capacity;
		unsigned char *buffer = malloc((size_t)capacity * ENTRY_MAX);
		if (buffer == NULL)
			return FAIL(nvmlDeviceGetComputeRunningProcesses_v3, NVML_ERROR_MEMORY);
		memset(buffer, UNTOUCHED, (size_t)capacity * ENTRY_MAX);
		nm_result r = list_processes(l, dev, graphics, version, &count, buffer);
		if (r == 0 && count <= capacity) {
			size_t size = entry_size(buffer, count);
			*list = calloc(count + 1, sizeof **list);
			for (unsigned i = 0; *list != NULL && i < count; i++) {
				memcpy(&(*list)[i].pid, buffer + i * size, sizeof(*list)[i].pid);
				memcpy(&(*list)[i].bytes, buffer + i * size + 8, sizeof(*list)[i].bytes);
			}
			free(buffer);
			if (*list == NULL)
				return FAIL(nvmlDeviceGetComputeRunningProcesses_v3, NVML_ERROR_MEMORY);
			*n = count;
			return 0;
		}
		free(buffer);
		if (version > 1 && older(r)) {
			version--;
			continue;
		}
		// Between two calls the list may have grown.
		if ((uint32_t)r == NVML_ERROR_INSUFFICIENT_SIZE && tries < 10 && count <= PROCESSES_MAX - 64) {
			capacity = count > capacity ? count + 64 : 2 * capacity;
			if (capacity <= PROCESSES_MAX)
				continue;
		}
		return r != 0 ? r : FAIL(nvmlDeviceGetComputeRunningProcesses_v3, NVML_ERROR_INSUFFICIENT_SIZE);
	}
}

nm_result nm_mig(nm_library *l, nvmlDevice_t dev, unsigned *most) {
	unsigned on = 0, pending = 0;
	*most = 0;
	nm_result r = CALL(l, nvmlDeviceGetMigMode, dev, &on, &pending);
	if (older(r) || (uint32_t)r == NVML_ERROR_NOT_SUPPORTED)
		return 0; // a driver or a GPU that knows nothing of instances
	if (r != 0 || on == 0)
		return r;
	return CALL(l, nvmlDeviceGetMaxMigDeviceCount, dev, most);
}

nm_result nm_mig_handle(nm_library *l, nvmlDevice_t dev, unsigned i, nvmlDevice_t *instance) {
	*instance = NULL;
	nm_result r = CALL(l, nvmlDeviceGetMigDeviceHandleByIndex, dev, i, instance);
	return (uint32_t)r == NVML_ERROR_NOT_FOUND ? 0 : r;
}

nm_result nm_mig_numbers(nm_library *l, nvmlDevice_t instance, unsigned *gpu, unsigned *compute) {
	nm_result r = CALL(l, nvmlDeviceGetGpuInstanceId, instance, gpu);
	return r != 0 ? r : CALL(l, nvmlDeviceGetComputeInstanceId, instance, compute);
}
