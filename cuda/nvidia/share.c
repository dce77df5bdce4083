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

nv_result nv_pool_export(nv_driver *d, intptr_t dev, uintptr_t pool, int *fd) {
	nv_scope scope;
	*fd = -1;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = NV_CALL(d, cuMemPoolExportToShareableHandle, fd, (CUmemoryPool)pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (r == 0) // as for a chunk
		(void)fcntl(*fd, F_SETFD, FD_CLOEXEC);
	return nv_leave(d, &scope, r);
}

nv_result nv_pool_import(nv_driver *d, intptr_t dev, int fd, uintptr_t *pool) {
	NV_ENTERED(d, dev, cuMemPoolImportFromShareableHandle, (CUmemoryPool *)pool, (void *)(intptr_t)fd,
		   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

nv_result nv_pool_export_ptr(nv_driver *d, intptr_t dev, CUdeviceptr p, CUmemPoolPtrExportData *h) {
	NV_ENTERED(d, dev, cuMemPoolExportPointer, h, p);
}

nv_result nv_pool_import_ptr(nv_driver *d, intptr_t dev, uintptr_t pool, const CUmemPoolPtrExportData *h, CUdeviceptr *p) {
	CUmemPoolPtrExportData data = *h; // the driver takes it as if it might write to it
	NV_ENTERED(d, dev, cuMemPoolImportPointer, p, (CUmemoryPool)pool, &data);
}

nv_result nv_event_export(nv_driver *d, intptr_t dev, uintptr_t e, CUipcEventHandle *h) {
	NV_ENTERED(d, dev, cuIpcGetEventHandle, h, (CUevent)e);
}

nv_result nv_event_open(nv_driver *d, intptr_t dev, const CUipcEventHandle *h, uintptr_t *e) {
	NV_ENTERED(d, dev, cuIpcOpenEventHandle, (CUevent *)e, *h);
}
