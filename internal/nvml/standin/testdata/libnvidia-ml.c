// A stand-in for libnvidia-ml.so.1, for tests on machines without a GPU. The declarations are written out here again, from
// the NVML API Reference and not from library.h, so that a mistake there is found.
//
// The machine that it plays is in the file that STANDIN_NVML names, one thing a line, values in quotes where they have
// spaces, numbers in decimal; without the variable there is no driver (NVML_ERROR_DRIVER_NOT_LOADED). It is read at
// nvmlInit_v2 and whenever devices are counted.
//
//	driver version=580.65.06
//	gpu uuid=GPU-00010203-0405-0607-0809-0a0b0c0d0e0f name="NVIDIA H200" bus=00000000:0F:00.0 total=150000 reserved=600 used=4000 util=37 memutil=12
//	mig gi=1 ci=0 uuid=MIG-10010203-… name="NVIDIA H200 MIG 1g.18gb" total=18000 reserved=20 used=100
//	process pid=4711 bytes=1000 name=/usr/bin/python3
//	process pid=4712 bytes=na kind=graphics
//	fail call=nvmlDeviceGetUtilizationRates code=3
//	fail call=nvmlDeviceGetMemoryInfo code=15 device=1
//	hang call=nvmlDeviceGetUUID
//	entries size=32
//
// mig and process belong to the gpu (or the mig) before them. Free memory is what is left. "fail" makes a call fail, of all
// devices or of one, whatever version of it is called; "hang" makes one never return, until the file no longer says so.
// "entries size" is how much lists of processes hold of each: 24 as documented for versions 2 and 3, 16 or 32 as drivers
// of the series 535 and others really had it; a call without version has 16. Memory can be counted as some headers say,
// what is reserved within what is used: "counts reserved=used". A symbol is left out by compiling with
// -DnvmlDeviceGetMemoryInfo_v2=missing.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef unsigned long long u64;

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE, NOT_LOADED = 9,
       VERSION_MISMATCH = 25 };
enum { DEVICES = 32, PROCESSES = 4096, RULES = 32 };

struct process {
	unsigned pid;
	u64 bytes;
	int graphics, device;
	char name[128];
};

typedef struct device {
	int index, mig, parent; // index: among GPUs, or among the parent's instances
	unsigned gi, ci;
	char uuid[80], name[96], bus[32];
	u64 total, reserved, used;
	int util, memutil, divided;
} *nvmlDevice_t;

struct rule {
	char call[64];
	int code, device, hang;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; // over all that follows
static int initialised;
static char version[80];
static struct device devices[DEVICES];
static int device_count, gpu_count;
static struct process processes[PROCESSES];
static int process_count;
static struct rule rules[RULES];
static int rule_count;
static int entry_bytes, used_has_reserved;

// value finds key=value in a line, into out.
static int value(const char *line, const char *key, char *out, size_t size) {
	size_t n = strlen(key);
	out[0] = 0;
	for (const char *p = strchr(line, ' '); p != NULL; p = strchr(p + 1, ' ')) {
		if (strncmp(p + 1, key, n) != 0 || p[1 + n] != '=')
			continue;
		const char *from = p + n + 2;
		char end = ' ';
		if (*from == '"') {
			end = '"';
			from++;
		}
		size_t i = 0;
		for (; from[i] != 0 && from[i] != end && from[i] != '\n' && i + 1 < size; i++)
			out[i] = from[i];
		out[i] = 0;
		return 1;
	}
	return 0;
}

static u64 number(const char *line, const char *key, u64 otherwise) {
	char text[64];
	if (!value(line, key, text, sizeof text))
		return otherwise;
	return strcmp(text, "na") == 0 ? ~0ull : strtoull(text, NULL, 10);
}

static void line_of(const char *line) {
	char kind[16] = "", text[80];
	sscanf(line, "%15s", kind);
	if (strcmp(kind, "driver") == 0) {
		value(line, "version", version, sizeof version);
	} else if ((strcmp(kind, "gpu") == 0 || strcmp(kind, "mig") == 0) && device_count < DEVICES) {
		struct device *d = &devices[device_count], *gpu = NULL;
		memset(d, 0, sizeof *d);
		d->mig = kind[0] == 'm';
		d->index = gpu_count;
		for (int i = device_count - 1; d->mig && i >= 0 && gpu == NULL; i--) {
			d->index = devices[i].mig ? devices[i].index + 1 : 0;
			if (d->parent == 0)
				d->parent = devices[i].mig ? devices[i].parent : i + 1;
			gpu = &devices[i];
		}
		if (d->mig)
			devices[d->parent - 1].divided = 1;
		else
			gpu_count++;
		value(line, "uuid", d->uuid, sizeof d->uuid);
		value(line, "name", d->name, sizeof d->name);
		value(line, "bus", d->bus, sizeof d->bus);
		d->total = number(line, "total", 0);
		d->reserved = number(line, "reserved", 0);
		d->used = number(line, "used", 0);
		d->util = (int)number(line, "util", 0);
		d->memutil = (int)number(line, "memutil", 0);
		d->gi = (unsigned)number(line, "gi", 0);
		d->ci = (unsigned)number(line, "ci", 0);
		device_count++;
	} else if (strcmp(kind, "process") == 0 && process_count < PROCESSES) {
		struct process *p = &processes[process_count++];
		p->pid = (unsigned)number(line, "pid", 0);
		p->bytes = number(line, "bytes", 0);
		p->graphics = value(line, "kind", text, sizeof text) && strcmp(text, "graphics") == 0;
		value(line, "name", p->name, sizeof p->name);
		p->device = device_count - 1;
	} else if ((strcmp(kind, "fail") == 0 || strcmp(kind, "hang") == 0) && rule_count < RULES) {
		struct rule *r = &rules[rule_count++];
		value(line, "call", r->call, sizeof r->call);
		r->code = (int)number(line, "code", 999);
		r->device = (int)number(line, "device", (u64)-1);
		r->hang = kind[0] == 'h';
	} else if (strcmp(kind, "entries") == 0) {
		entry_bytes = (int)number(line, "size", 24);
	} else if (strcmp(kind, "counts") == 0) {
		used_has_reserved = value(line, "reserved", text, sizeof text) && strcmp(text, "used") == 0;
	}
}

// load reads the description.
static int load(void) {
	const char *path = getenv("STANDIN_NVML");
	FILE *f = path != NULL && *path != 0 ? fopen(path, "re") : NULL;
	if (f == NULL)
		return 0;
	device_count = gpu_count = process_count = rule_count = used_has_reserved = 0;
	entry_bytes = 24;
	snprintf(version, sizeof version, "580.65.06");
	char line[1024];
	while (fgets(line, sizeof line, f) != NULL)
		line_of(line);
	fclose(f);
	return 1;
}

// forced is what a rule says of a call of a device (NULL: none): its code, or, after mu was let go for a moment, again what
// the file says, until it no longer hangs.
static int forced(const char *call, nvmlDevice_t d) {
	int again = 0;
	do {
		again = 0;
		for (int i = 0; i < rule_count; i++) {
			struct rule *r = &rules[i];
			size_t n = strlen(r->call);
			const char *rest = call + n;
			if (strncmp(call, r->call, n) != 0 || (*rest != 0 && strncmp(rest, "_v", 2) != 0))
				continue;
			if (r->device >= 0 && (d == NULL || d->mig || d->index != r->device))
				continue;
			if (!r->hang)
				return r->code;
			again = 1;
			pthread_mutex_unlock(&mu);
			usleep(2000);
			pthread_mutex_lock(&mu);
			load();
			break;
		}
	} while (again);
	return 0;
}

// ENTER begins every call. A description that shrank meanwhile makes handles of what is gone.
#define ENTER(d) \
	pthread_mutex_lock(&mu); \
	int r = initialised ? forced(__func__, d) : UNINITIALIZED; \
	if (r == 0 && (d) != NULL && ((d) < devices || (d) >= devices + device_count)) \
		r = INVALID_ARGUMENT;
#define LEAVE \
	pthread_mutex_unlock(&mu); \
	return r;

static int give(char *out, unsigned size, const char *text) {
	if (strlen(text) + 1 > size)
		return INSUFFICIENT_SIZE;
	strcpy(out, text);
	return 0;
}

nvmlReturn_t nvmlInit_v2(void) {
	pthread_mutex_lock(&mu);
	int r = load() ? forced(__func__, NULL) : NOT_LOADED;
	initialised += r == 0;
	LEAVE
}

nvmlReturn_t nvmlShutdown(void) {
	ENTER((nvmlDevice_t)NULL)
	initialised -= r == 0;
	LEAVE
}

const char *nvmlErrorString(nvmlReturn_t code) {
	switch (code) {
	case 1: return "Uninitialized";
	case 2: return "Invalid Argument";
	case 3: return "Not Supported";
	case 4: return "Insufficient Permissions";
	case 6: return "Not Found";
	case 7: return "Insufficient Size";
	case 9: return "Driver Not Loaded";
	case 13: return "Function Not Found";
	case 15: return "GPU is lost";
	case 18: return "Driver/library version mismatch";
	case 999: return "Unknown Error";
	}
	return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
	ENTER((nvmlDevice_t)NULL)
	if (r == 0)
		r = give(out, size, version);
	LEAVE
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
	ENTER((nvmlDevice_t)NULL)
	if (r == 0) {
		r = NOT_FOUND;
		for (int i = 0; i < process_count && r == NOT_FOUND; i++)
			if (processes[i].pid == pid && processes[i].name[0] != 0)
				r = give(out, size, processes[i].name);
	}
	LEAVE
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n) {
	ENTER((nvmlDevice_t)NULL)
	if (r == 0) {
		load();
		*n = (unsigned)gpu_count;
	}
	LEAVE
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out) {
	pthread_mutex_lock(&mu);
	nvmlDevice_t found = NULL;
	for (int i = 0; i < device_count; i++)
		if (!devices[i].mig && devices[i].index == (int)index)
			found = &devices[i];
	int r = initialised ? forced(__func__, found) : UNINITIALIZED;
	if (r == 0 && found == NULL)
		r = INVALID_ARGUMENT;
	if (r == 0)
		*out = found;
	LEAVE
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned size) {
	ENTER(d)
	if (r == 0)
		r = give(out, size, d->uuid);
	LEAVE
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned size) {
	ENTER(d)
	if (r == 0)
		r = give(out, size, d->name);
	LEAVE
}

struct pci {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char text[32];
};

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, struct pci *out) {
	ENTER(d)
	if (r == 0) {
		memset(out, 0x7f, sizeof *out);
		r = give(out->text, sizeof out->text, d->bus);
	}
	LEAVE
}

struct memory {
	u64 total, free, used;
};

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, struct memory *out) {
	ENTER(d)
	if (r == 0)
		*out = (struct memory){d->total, d->total - d->used - d->reserved, d->used + d->reserved};
	LEAVE
}

struct memory_v2 {
	unsigned version;
	u64 total, reserved, free, used;
};

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, struct memory_v2 *out) {
	ENTER(d)
	if (r == 0 && out->version != (sizeof *out | 2 << 24))
		r = VERSION_MISMATCH;
	if (r == 0)
		*out = (struct memory_v2){out->version, d->total, d->reserved, d->total - d->used - d->reserved,
					  d->used + (used_has_reserved ? d->reserved : 0)};
	LEAVE
}

struct utilization {
	unsigned gpu, memory;
};

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, struct utilization *out) {
	ENTER(d)
	if (r == 0 && d->mig)
		r = NOT_SUPPORTED;
	if (r == 0)
		*out = (struct utilization){(unsigned)d->util, (unsigned)d->memutil};
	LEAVE
}

// list writes entries of the size that is wanted. With too little space nothing is written.
static int list(nvmlDevice_t d, int graphics, int size, unsigned *n, void *out) {
	unsigned have = 0, max = *n;
	for (int i = 0; i < process_count; i++)
		have += processes[i].device == (int)(d - devices) && processes[i].graphics == graphics;
	*n = have;
	if (have > max)
		return INSUFFICIENT_SIZE;
	unsigned char *at = out;
	for (int i = 0; i < process_count; i++) {
		struct process *p = &processes[i];
		if (p->device != (int)(d - devices) || p->graphics != graphics)
			continue;
		struct {
			unsigned pid;
			u64 bytes;
			unsigned gi, ci;
			u64 protected;
		} entry = {p->pid, p->bytes, d->mig ? d->gi : 0xffffffff, d->mig ? d->ci : 0xffffffff, 0};
		memcpy(at, &entry, (size_t)size);
		at += size;
	}
	return 0;
}

#define LIST(name, graphics, size) \
	nvmlReturn_t name(nvmlDevice_t d, unsigned *n, void *out) { \
		ENTER(d) \
		if (r == 0) \
			r = list(d, graphics, size, n, out); \
		LEAVE \
	}

LIST(nvmlDeviceGetComputeRunningProcesses_v3, 0, entry_bytes)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, 0, entry_bytes)
LIST(nvmlDeviceGetComputeRunningProcesses, 0, 16)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 1, entry_bytes)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 1, entry_bytes)
LIST(nvmlDeviceGetGraphicsRunningProcesses, 1, 16)

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *on, unsigned *pending) {
	ENTER(d)
	if (r == 0)
		*on = *pending = (unsigned)d->divided;
	LEAVE
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned *n) {
	ENTER(d)
	if (r == 0)
		*n = 7;
	LEAVE
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned index, nvmlDevice_t *out) {
	ENTER(d)
	if (r == 0) {
		r = NOT_FOUND;
		for (int i = 0; i < device_count && r != 0; i++)
			if (devices[i].mig && devices[i].parent - 1 == (int)(d - devices) && devices[i].index == (int)index) {
				*out = &devices[i];
				r = 0;
			}
	}
	LEAVE
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned *out) {
	ENTER(d)
	if (r == 0 && !d->mig)
		r = INVALID_ARGUMENT;
	if (r == 0)
		*out = d->gi;
	LEAVE
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned *out) {
	ENTER(d)
	if (r == 0 && !d->mig)
		r = INVALID_ARGUMENT;
	if (r == 0)
		*out = d->ci;
	LEAVE
}
