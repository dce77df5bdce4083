//go:build linux && cgo

// Streams, events and captures: what orders work on the GPU, and the work itself.

#include "internal.h"

nv_result nv_capture_of(nv_driver *d, CUstream s, int *status, uint64_t *id) {
	if (d->cuStreamGetCaptureInfo_v2 != NULL)
		return NV_CALL(d, cuStreamGetCaptureInfo_v2, s, status, id, NULL, NULL, NULL);
	if (d->cuStreamGetCaptureInfo_v3 != NULL)
		return NV_CALL(d, cuStreamGetCaptureInfo_v3, s, status, id, NULL, NULL, NULL, NULL);
	return NV_CALL(d, cuStreamGetCaptureInfo, s, status, id);
}

// captured_id is a number of this package's own for a stream and the capture that it is in. The driver counts from below
// and these have the highest bit; streams of a capture differ in their handles, streams with one handle in their captures.
static unsigned long long captured_id(uintptr_t s, uint64_t capture) {
	uint64_t x = s * UINT64_C(0x9e3779b97f4a7c15) ^ capture;
	x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
	x = ((x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93)) | UINT64_C(1) << 63;
	return x == NV_LEGACY_STREAM_ID ? x - 1 : x;
}

nv_result nv_stream_id(nv_driver *d, intptr_t dev, uintptr_t s, uint64_t *context, unsigned long long *id) {
	nv_scope scope;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0 && s <= 1) {
		// The legacy stream is not asked about: while a stream that blocks with it is being captured, even asking for
		// its context fails with CUDA_ERROR_STREAM_CAPTURE_IMPLICIT and invalidates the capture, relaxed mode or not
		// (measured on an H200, driver 580). What there is to know is known: it is the primary context's.
		*context = atomic_load(&d->devices[dev].number);
		*id = NV_LEGACY_STREAM_ID;
	} else if (r == 0) {
		// Nor is a stream that is being captured: asking for its context invalidates the capture as well.
		int status = 0;
		uint64_t capture = 0;
		r = nv_capture_of(d, (CUstream)s, &status, &capture);
		if (r == 0 && status != 0) {
			*context = atomic_load(&d->devices[dev].number);
			*id = captured_id(s, capture);
			return nv_leave(d, &scope, r);
		}
		CUcontext c = NULL;
		if (r == 0)
			r = NV_CALL(d, cuStreamGetCtx, (CUstream)s, &c);
		if (r == 0)
			r = NV_CALL(d, cuStreamGetId, (CUstream)s, id);
		if (r == 0)
			r = nv_context_number(d, c, context);
	}
	return nv_leave(d, &scope, r);
}

nv_result nv_stream_capture(nv_driver *d, intptr_t dev, uintptr_t s, int *status, uint64_t *id) {
	nv_scope scope;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = nv_capture_of(d, (CUstream)s, status, id);
	return nv_leave(d, &scope, r);
}

nv_result nv_capture_nodes(nv_driver *d, intptr_t dev, uintptr_t s, uint64_t *id, uintptr_t *nodes, size_t max, size_t *n) {
	nv_scope scope;
	int status = 0;
	CUgraph graph = NULL;
	const CUgraphNode *list = NULL;
	*n = 0;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0 && d->cuStreamGetCaptureInfo_v2 == NULL && d->cuStreamGetCaptureInfo_v3 != NULL)
		r = NV_CALL(d, cuStreamGetCaptureInfo_v3, (CUstream)s, &status, id, &graph, &list, NULL, n);
	else if (r == 0)
		r = NV_CALL(d, cuStreamGetCaptureInfo_v2, (CUstream)s, &status, id, &graph, &list, n);
	if (r != 0 || status != 1 /* CU_STREAM_CAPTURE_STATUS_ACTIVE */)
		*id = 0, *n = 0;
	for (size_t i = 0; i < *n && i < max; i++) // the list is the driver's, until its next call about the stream
		nodes[i] = (uintptr_t)list[i];
	return nv_leave(d, &scope, r);
}

nv_result nv_node_dependencies(nv_driver *d, intptr_t dev, uintptr_t node, uintptr_t *nodes, size_t max, size_t *n) {
	nv_scope scope;
	*n = 0;
	nv_result r = nv_enter(d, dev, &scope);
	if (r == 0)
		r = NV_CALL(d, cuGraphNodeGetDependencies, (CUgraphNode)node, NULL, n);
	if (r == 0 && *n > 0 && *n <= max)
		r = NV_CALL(d, cuGraphNodeGetDependencies, (CUgraphNode)node, (CUgraphNode *)nodes, n);
	return nv_leave(d, &scope, r);
}

nv_result nv_stream_wait_event(nv_driver *d, intptr_t dev, uintptr_t s, uintptr_t e) {
	NV_ENTERED(d, dev, cuStreamWaitEvent, (CUstream)s, (CUevent)e, 0);
}

nv_result nv_stream_synchronize(nv_driver *d, intptr_t dev, uintptr_t s) {
	NV_ENTERED(d, dev, cuStreamSynchronize, (CUstream)s);
}

nv_result nv_context_synchronize(nv_driver *d, intptr_t dev) {
	NV_ENTERED(d, dev, cuCtxSynchronize);
}

nv_result nv_event_create(nv_driver *d, intptr_t dev, unsigned flags, uintptr_t *e) {
	NV_ENTERED(d, dev, cuEventCreate, (CUevent *)e, flags);
}

nv_result nv_event_destroy(nv_driver *d, intptr_t dev, uintptr_t e) {
	NV_ENTERED(d, dev, cuEventDestroy, (CUevent)e);
}

nv_result nv_event_record(nv_driver *d, intptr_t dev, uintptr_t e, uintptr_t s) {
	NV_ENTERED(d, dev, cuEventRecord, (CUevent)e, (CUstream)s);
}

nv_result nv_event_query(nv_driver *d, intptr_t dev, uintptr_t e) {
	NV_ENTERED(d, dev, cuEventQuery, (CUevent)e);
}

nv_result nv_event_synchronize(nv_driver *d, intptr_t dev, uintptr_t e) {
	NV_ENTERED(d, dev, cuEventSynchronize, (CUevent)e);
}

nv_result nv_event_elapsed(nv_driver *d, intptr_t dev, uintptr_t from, uintptr_t to, float *ms) {
	NV_ENTERED(d, dev, cuEventElapsedTime, ms, (CUevent)from, (CUevent)to);
}

nv_result nv_stream_create(nv_driver *d, intptr_t dev, unsigned flags, uintptr_t *s) {
	NV_ENTERED(d, dev, cuStreamCreate, (CUstream *)s, flags);
}

nv_result nv_stream_destroy(nv_driver *d, intptr_t dev, uintptr_t s) {
	NV_ENTERED(d, dev, cuStreamDestroy, (CUstream)s);
}

nv_result nv_stream_blocking(nv_driver *d, intptr_t dev, uintptr_t s, int *blocking) {
	nv_scope scope;
	nv_result r = nv_enter(d, dev, &scope);
	*blocking = 1; // as the legacy and the per-thread stream are, and nothing about the legacy stream is asked
	if (r == 0 && s > 2) {
		// Whether asking would harm a capture, as asking for the context does, is not known: it is not tried.
		int status = 0;
		uint64_t capture = 0;
		unsigned flags = 0;
		r = nv_capture_of(d, (CUstream)s, &status, &capture);
		if (r == 0 && status != 0)
			r = NV_FAIL(cuStreamGetFlags, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		if (r == 0)
			r = NV_CALL(d, cuStreamGetFlags, (CUstream)s, &flags);
		*blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
	}
	return nv_leave(d, &scope, r);
}

nv_result nv_capture_begin(nv_driver *d, intptr_t dev, uintptr_t s, int mode) {
	NV_ENTERED(d, dev, cuStreamBeginCapture, (CUstream)s, mode);
}

nv_result nv_capture_end(nv_driver *d, intptr_t dev, uintptr_t s, uintptr_t *graph) {
	NV_ENTERED(d, dev, cuStreamEndCapture, (CUstream)s, (CUgraph *)graph);
}

nv_result nv_graph_instantiate(nv_driver *d, intptr_t dev, uintptr_t graph, uintptr_t *exec) {
	NV_ENTERED(d, dev, cuGraphInstantiateWithFlags, (CUgraphExec *)exec, (CUgraph)graph, 0);
}

nv_result nv_graph_launch(nv_driver *d, intptr_t dev, uintptr_t exec, uintptr_t s) {
	NV_ENTERED(d, dev, cuGraphLaunch, (CUgraphExec)exec, (CUstream)s);
}

nv_result nv_graph_exec_destroy(nv_driver *d, intptr_t dev, uintptr_t exec) {
	NV_ENTERED(d, dev, cuGraphExecDestroy, (CUgraphExec)exec);
}

nv_result nv_graph_destroy(nv_driver *d, intptr_t dev, uintptr_t graph) {
	NV_ENTERED(d, dev, cuGraphDestroy, (CUgraph)graph);
}

nv_result nv_module_load(nv_driver *d, intptr_t dev, const char *image, uintptr_t *module, char *log, size_t log_size) {
	int options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
	// The driver reads sizes from the pointer's own bits.
	void *values[] = {log, (void *)(uintptr_t)log_size};
	NV_ENTERED(d, dev, cuModuleLoadDataEx, (CUmodule *)module, image, 2, options, values);
}

nv_result nv_module_unload(nv_driver *d, intptr_t dev, uintptr_t module) {
	NV_ENTERED(d, dev, cuModuleUnload, (CUmodule)module);
}

nv_result nv_module_function(nv_driver *d, intptr_t dev, uintptr_t module, const char *name, uintptr_t *function) {
	NV_ENTERED(d, dev, cuModuleGetFunction, (CUfunction *)function, (CUmodule)module, name);
}

nv_result nv_launch(nv_driver *d, intptr_t dev, uintptr_t function, unsigned grid, unsigned block, uintptr_t s,
		    const uint64_t *args, size_t n) {
	void *pointers[16];
	if (n > sizeof pointers / sizeof *pointers)
		return NV_FAIL(cuLaunchKernel, 1 /* CUDA_ERROR_INVALID_VALUE */);
	for (size_t i = 0; i < n; i++)
		pointers[i] = (void *)&args[i];
	NV_ENTERED(d, dev, cuLaunchKernel, (CUfunction)function, grid, 1, 1, block, 1, 1, 0, (CUstream)s, pointers, NULL);
}

nv_result nv_copy_to_device(nv_driver *d, intptr_t dev, CUdeviceptr to, const void *from, size_t size) {
	NV_ENTERED(d, dev, cuMemcpyHtoD, to, from, size);
}

nv_result nv_copy_from_device(nv_driver *d, intptr_t dev, void *to, CUdeviceptr from, size_t size) {
	NV_ENTERED(d, dev, cuMemcpyDtoH, to, from, size);
}

nv_result nv_memset(nv_driver *d, intptr_t dev, CUdeviceptr p, unsigned char value, size_t size, uintptr_t s) {
	NV_ENTERED(d, dev, cuMemsetD8Async, p, value, size, (CUstream)s);
}
