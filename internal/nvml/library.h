//go:build linux && cgo

// The part of NVML's ABI that Cistern uses, declared here so that nothing of CUDA's is needed to build. Types, constants
// and layouts are those of the NVML API Reference.

#ifndef CISTERN_NVML_LIBRARY_H
#define CISTERN_NVML_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;

typedef struct {
	char busIdLegacy[16];
	unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

typedef struct {
	unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
	unsigned version; // the struct's size, and 2 in the highest byte
	unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

_Static_assert(sizeof(nvmlPciInfo_t) == 68, "layout of nvmlPciInfo_t");
_Static_assert(sizeof(nvmlMemory_v2_t) == 40 || sizeof(void *) != 8, "layout of nvmlMemory_v2_t");

enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_DEPRECATED = 26,
};

// NM_CALLS lists every call that is made, and its parameters. Infos of processes are bytes: see nm_processes.
#define NM_CALLS(X) \
	X(nvmlInit_v2, (void)) \
	X(nvmlShutdown, (void)) \
	X(nvmlSystemGetDriverVersion, (char *, unsigned)) \
	X(nvmlSystemGetProcessName, (unsigned, char *, unsigned)) \
	X(nvmlDeviceGetCount_v2, (unsigned *)) \
	X(nvmlDeviceGetHandleByIndex_v2, (unsigned, nvmlDevice_t *)) \
	X(nvmlDeviceGetUUID, (nvmlDevice_t, char *, unsigned)) \
	X(nvmlDeviceGetName, (nvmlDevice_t, char *, unsigned)) \
	X(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t, nvmlPciInfo_t *)) \
	X(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t, nvmlMemory_v2_t *)) \
	X(nvmlDeviceGetMemoryInfo, (nvmlDevice_t, nvmlMemory_t *)) \
	X(nvmlDeviceGetUtilizationRates, (nvmlDevice_t, nvmlUtilization_t *)) \
	X(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t, unsigned *, void *)) \
	X(nvmlDeviceGetComputeRunningProcesses_v2, (nvmlDevice_t, unsigned *, void *)) \
	X(nvmlDeviceGetComputeRunningProcesses, (nvmlDevice_t, unsigned *, void *)) \
	X(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice_t, unsigned *, void *)) \
	X(nvmlDeviceGetGraphicsRunningProcesses_v2, (nvmlDevice_t, unsigned *, void *)) \
	X(nvmlDeviceGetGraphicsRunningProcesses, (nvmlDevice_t, unsigned *, void *)) \
	X(nvmlDeviceGetMigMode, (nvmlDevice_t, unsigned *, unsigned *)) \
	X(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t, unsigned *)) \
	X(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t, unsigned, nvmlDevice_t *)) \
	X(nvmlDeviceGetGpuInstanceId, (nvmlDevice_t, unsigned *)) \
	X(nvmlDeviceGetComputeInstanceId, (nvmlDevice_t, unsigned *))

enum nm_call {
#define X(name, parameters) NM_##name,
	NM_CALLS(X)
#undef X
	NM_CALL_COUNT
};

// A result is 0, or the call that failed and its code.
typedef uint64_t nm_result;
#define NM_MISSING 0xffffffffu // the code of a call that the library does not have

typedef struct nm_library nm_library;

nm_library *nm_open(const char *path, char *reason, size_t reason_size);
void nm_close(nm_library *l);
const char *nm_call_name(int call);
const char *nm_words(nm_library *l, int code); // never NULL

// nm_current is the call that is being made, or -1.
int nm_current(nm_library *l);

nm_result nm_init(nm_library *l);
nm_result nm_shutdown(nm_library *l);
nm_result nm_driver(nm_library *l, char *version, unsigned size);
nm_result nm_process_name(nm_library *l, unsigned pid, char *name, unsigned size);
nm_result nm_count(nm_library *l, unsigned *n);
nm_result nm_handle(nm_library *l, unsigned index, nvmlDevice_t *dev);
nm_result nm_uuid(nm_library *l, nvmlDevice_t dev, char *text, unsigned size);
nm_result nm_name(nm_library *l, nvmlDevice_t dev, char *text, unsigned size);
nm_result nm_bus(nm_library *l, nvmlDevice_t dev, char *text, size_t size);
nm_result nm_utilization(nm_library *l, nvmlDevice_t dev, unsigned *gpu, unsigned *memory);

typedef struct {
	uint64_t total, used, free, reserved;
} nm_memory_info;
nm_result nm_memory(nm_library *l, nvmlDevice_t dev, nm_memory_info *out);

typedef struct {
	uint64_t bytes;
	uint32_t pid;
} nm_process;
// nm_processes gives a list, which the caller frees, of those that compute or draw.
nm_result nm_processes(nm_library *l, nvmlDevice_t dev, int graphics, nm_process **list, size_t *n);

// nm_mig says how many instances there may be: 0 where the GPU is not divided. nm_mig_handle gives NULL for a number that
// is not taken.
nm_result nm_mig(nm_library *l, nvmlDevice_t dev, unsigned *most);
nm_result nm_mig_handle(nm_library *l, nvmlDevice_t dev, unsigned i, nvmlDevice_t *instance);
nm_result nm_mig_numbers(nm_library *l, nvmlDevice_t instance, unsigned *gpu, unsigned *compute);

#endif
