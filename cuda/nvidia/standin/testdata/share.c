// The part of the stand-in that is about memory shared between processes. A chunk's descriptor is its file, and the
// handle of an allocation says where in /proc its file is, so that another process that has the stand-in loaded really
// sees the same bytes.

#include "standin.h"

#include <sys/stat.h>

CUresult cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
	BEGIN("cuMemExportToShareableHandle")
	struct chunk *c = (struct chunk *)(uintptr_t)handle;
	int fd = -1;
	if (c == NULL || flags != 0 || type != 1)
		r = INVALID_VALUE;
	else if ((c->handles & type) == 0)
		r = NOT_SUPPORTED;
	else if ((fd = dup(c->fd)) < 0)
		r = UNKNOWN;
	if (r == SUCCESS)
		*(int *)out = fd;
	RETURN("type %d", type)
}

CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type) {
	BEGIN("cuMemImportFromShareableHandle")
	int fd = (int)(intptr_t)from;
	struct stat st;
	struct chunk *c = NULL;
	if (type != 1 || fstat(fd, &st) != 0 || st.st_size == 0 || (size_t)st.st_size % GRANULARITY != 0)
		r = INVALID_VALUE;
	else if ((c = calloc(1, sizeof *c)) == NULL || (fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0)
		r = OUT_OF_MEMORY;
	if (r == SUCCESS) {
		*c = (struct chunk){fd, (size_t)st.st_size, 1, type, 1, -1, 0};
		*handle = (uintptr_t)c;
	} else {
		free(c);
	}
	RETURN("type %d", type)
}

CUresult cuIpcGetMemHandle(struct ipc *handle, uint64_t p) {
	ENTER("cuIpcGetMemHandle")
	struct range *a = find(allocations, (char *)(uintptr_t)p);
	memset(handle, 0, sizeof *handle);
	if (a == NULL || a->fd < 0)
		r = INVALID_VALUE;
	else
		*handle = (struct ipc){"standin", getpid(), a->fd, a->size, ""};
	RETURN("")
}

static struct {
	struct ipc handle;
	char *p;
	int count;
} opened[64];

CUresult cuIpcOpenMemHandle_v2(uint64_t *p, struct ipc handle, unsigned flags) {
	ENTER("cuIpcOpenMemHandle")
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
	int at = -1, fd = -1;
	for (int i = 0; i < 64; i++) {
		if (opened[i].count > 0 && memcmp(&opened[i].handle, &handle, sizeof handle) == 0) {
			at = i;
			break;
		}
		if (opened[i].count == 0)
			at = at < 0 ? i : at;
	}
	if (flags != 1 || strcmp(handle.magic, "standin") != 0)
		r = INVALID_VALUE;
	else if (handle.pid == getpid())
		r = INVALID_CONTEXT;
	else if (at < 0)
		r = OUT_OF_MEMORY;
	else if (opened[at].count == 0) {
		char *m = MAP_FAILED;
		if ((fd = open(path, O_RDWR | O_CLOEXEC)) < 0)
			r = INVALID_HANDLE;
		else if ((m = mmap(NULL, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
			r = OUT_OF_MEMORY;
		if (fd >= 0)
			close(fd);
		opened[at].handle = handle;
		opened[at].p = m;
	}
	if (r == SUCCESS) {
		opened[at].count++;
		*p = (uintptr_t)opened[at].p;
	}
	RETURN("flags %u", flags)
}

CUresult cuIpcCloseMemHandle(uint64_t p) {
	ENTER("cuIpcCloseMemHandle")
	r = INVALID_VALUE;
	for (int i = 0; i < 64; i++)
		if (opened[i].count > 0 && opened[i].p == (char *)(uintptr_t)p) {
			r = SUCCESS;
			if (--opened[i].count == 0)
				munmap(opened[i].p, opened[i].handle.size);
			break;
		}
	RETURN("")
}
