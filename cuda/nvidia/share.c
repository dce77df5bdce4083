//go:build linux && cgo

// Memory shared with other processes.

#include "internal.h"

#include <fcntl.h>

nv_result nv_mem_export(nv_driver *d, CUmemGenericAllocationHandle h, int *fd) {
	nv_scope scope;
	*fd = -1;
	nv_result r = nv_relax(d, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemExportToShareableHandle, fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (r == 0) // the driver does not say whether it did
		(void)fcntl(*fd, F_SETFD, FD_CLOEXEC);
	return nv_leave(d, &scope, r);
}

nv_result nv_mem_import(nv_driver *d, int fd, CUmemGenericAllocationHandle *h) {
	// The descriptor itself is passed in the place of a pointer.
	NV_RELAXED(d, cuMemImportFromShareableHandle, h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

nv_result nv_ipc_export(nv_driver *d, intptr_t dev, CUdeviceptr p, CUipcMemHandle *h) {
	NV_ENTERED(d, dev, cuIpcGetMemHandle, h, p);
}

nv_result nv_ipc_open(nv_driver *d, intptr_t dev, const CUipcMemHandle *h, CUdeviceptr *p) {
	NV_ENTERED(d, dev, cuIpcOpenMemHandle, p, *h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

nv_result nv_ipc_close(nv_driver *d, intptr_t dev, CUdeviceptr p) {
	NV_ENTERED(d, dev, cuIpcCloseMemHandle, p);
}
