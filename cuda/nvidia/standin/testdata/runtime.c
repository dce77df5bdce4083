// The part of the stand-in that NVIDIA's runtime calls and nothing of Cistern's does: for PyTorch over the stand-in of the
// runtime in lab/torch/standin.

#include "standin.h"

CUresult cuCtxPushCurrent_v2(struct context *context);
CUresult cuCtxPopCurrent_v2(struct context **context);

CUresult cuCtxSetCurrent(struct context *context) {
	struct context *popped;
	if (current() == context)
		return SUCCESS;
	CUresult r = current() != NULL ? cuCtxPopCurrent_v2(&popped) : SUCCESS;
	return r == SUCCESS && context != NULL ? cuCtxPushCurrent_v2(context) : r;
}

static const struct { CUresult code; const char *name, *words; } errors[] = {
	{SUCCESS, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{PEER_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{PEER_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
	{REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
	{NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
	{NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
	{NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
	{CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
	{CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun in this stream"},
	{CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
	{UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorString(CUresult code, const char **words) {
	*words = NULL;
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == code)
			*words = errors[i].words;
	return *words != NULL ? SUCCESS : INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
	*name = NULL;
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == code)
			*name = errors[i].name;
	return *name != NULL ? SUCCESS : INVALID_VALUE;
}

CUresult cuStreamQuery(struct stream *s) {
	ENTER("cuStreamQuery")
	struct stream *one = resolve(s);
	if (one->capture != 0) {
		one->invalidated = 1;
		r = CAPTURE_UNSUPPORTED;
	} else {
		r = implicit(s, 1);
	}
	RETURN("")
}

CUresult cuMemsetD8Async(uint64_t p, unsigned char value, size_t size, struct stream *s);
CUresult cuMemsetD8_v2(uint64_t p, unsigned char value, size_t size) { return cuMemsetD8Async(p, value, size, NULL); }

// There are no DMA-BUFs.
CUresult cuMemGetHandleForAddressRange(void *handle, uint64_t p, size_t size, int type, unsigned long long flags) {
	(void)handle, (void)type, (void)flags;
	return report("cuMemGetHandleForAddressRange", NOT_SUPPORTED, "size %zu", size);
}

CUresult cuEventElapsedTime(float *ms, struct event *from, struct event *to);
CUresult cuEventElapsedTime_v2(float *ms, struct event *from, struct event *to) { return cuEventElapsedTime(ms, from, to); }

CUresult cuGraphNodeGetDependencies(struct node *node, struct node **dependencies, size_t *count);
CUresult cuGraphNodeGetDependencies_v2(struct node *node, struct node **dependencies, void *edges, size_t *count) {
	return edges != NULL ? NOT_SUPPORTED : cuGraphNodeGetDependencies(node, dependencies, count);
}
