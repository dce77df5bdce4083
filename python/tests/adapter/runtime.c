/* A stand-in for libcudart.so: what libc10_cuda.so and the adapter need of it, enough to run them over a simulated device.
 * Streams are numbers, work is not done, and a capture is what a test says it is. It is compiled without CUDA's headers, which
 * differ by version in what takes how many arguments. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N(fn) int fn() { return 0; }
N(cudaDeviceCanAccessPeer) N(cudaDeviceGetDefaultMemPool) N(cudaEventCreateWithFlags)
N(cudaEventDestroy) N(cudaEventElapsedTime) N(cudaEventQuery) N(cudaEventRecord) N(cudaEventSynchronize) N(cudaFreeAsync)
N(cudaGraphNodeGetDependencies) N(cudaIpcCloseMemHandle) N(cudaIpcGetMemHandle) N(cudaMallocAsync) N(cudaMemcpy)
N(cudaMemcpyAsync) N(cudaMemPoolGetAttribute) N(cudaMemPoolSetAccess) N(cudaMemPoolSetAttribute) N(cudaMemPoolTrimTo)
N(cudaStreamQuery) N(cudaStreamSynchronize) N(cudaStreamWaitEvent) N(cudaThreadExchangeStreamCaptureMode)
N(cudaGetDeviceProperties) N(cudaGetLastError) N(cudaPeekAtLastError)

static __thread int device;
int cudaGetDevice(int *d) { return *d = device, 0; }
int cudaSetDevice(int d) { return device = d, 0; }
int cudaGetDeviceCount(int *n) { return *n = 2, 0; }
int cudaDriverGetVersion(int *v) { return *v = 13000, 0; }
int cudaGetDriverEntryPointByVersion() { return 801; }
int cudaDeviceGetPCIBusId(char *b, int n, int d) { return snprintf(b, n, "0000:00:0%d.0", d), 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) { return *free_bytes = 4ul << 30, *total = 8ul << 30, 0; }
const char *cudaGetErrorString(int e) { return e == 700 ? "an illegal memory access was encountered" : "an error"; }
const char *cudaGetErrorName(int e) { return e == 700 ? "cudaErrorIllegalAddress" : e ? "cudaErrorUnknown" : "cudaSuccess"; }

int test_mallocs, test_syncs, test_peer_copies; /* calls */
int test_peers, test_peer_fails; /* devices that were given access to another; whether that fails */
int cudaMalloc(void **p, size_t n) { return test_mallocs++, *p = aligned_alloc(512, (n + 511) / 512 * 512), 0; }
int cudaFree(void *p) { return free(p), 0; }
int cudaDeviceSynchronize(void) { return test_syncs++, 0; }
int cudaDeviceEnablePeerAccess(int other, unsigned flags) {
  static int open[2][2];
  (void)flags;
  if (test_peer_fails)
    return 719;
  if (__atomic_exchange_n(&open[device][other], 1, __ATOMIC_SEQ_CST))
    return 704; /* cudaErrorPeerAccessAlreadyEnabled */
  return __atomic_add_fetch(&test_peers, 1, __ATOMIC_SEQ_CST), 0;
}
int cudaMemcpyPeerAsync() { return test_peer_copies++, 0; }

/* A legacy handle opens at the address that its first bytes are. */
struct handle { char bytes[64]; };
int cudaIpcOpenMemHandle(void **p, struct handle h, unsigned flags) { return (void)flags, memcpy(p, h.bytes, sizeof *p), 0; }

static int streams;
int cudaStreamCreateWithPriority(void **s) { return *s = (void *)(0x10000ul + 16 * ++streams), 0; }

static void *captured[64];
static int num_captured;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
void test_capture(void *s, int on) {
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_captured; i++)
    if (captured[i] == s)
      captured[i] = captured[--num_captured];
  if (on)
    captured[num_captured++] = s;
  pthread_mutex_unlock(&mutex);
}
int cudaStreamIsCapturing(void *s, int *status) {
  *status = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_captured; i++)
    *status |= captured[i] == s;
  pthread_mutex_unlock(&mutex);
  return 0;
}
int cudaStreamGetCaptureInfo(void *s, int *status) { return cudaStreamIsCapturing(s, status); }
