// The half of the stand-in that is about work: streams, captures, events and kernels.

#include "standin.h"

// Streams. The three without a handle belong to the current context; the per-thread one is each thread's own.
//
// While a blocking stream is captured, the legacy stream cannot be used: most calls about it fail with
// CAPTURE_IMPLICIT and invalidate the capture, as seen on an H200 with driver 580.

static struct stream *captured[8]; // the blocking stream being captured, by device

CUresult implicit(struct stream *s, int invalidates) {
	struct stream *c = captured[current()->device];
	if ((uintptr_t)s > 1 || c == NULL)
		return SUCCESS;
	if (invalidates)
		c->invalidated = 1;
	return CAPTURE_IMPLICIT;
}

struct stream *resolve(struct stream *s) {
	static struct stream legacy[8];
	static __thread struct stream per_thread[8];
	uintptr_t v = (uintptr_t)s;
	if (v > 2)
		return s;
	struct stream *one = v == 2 ? &per_thread[current()->device] : &legacy[current()->device];
	if (one->context == NULL)
		*one = (struct stream){current(), v != 2, v == 2 ? next_id++ : 1, 0};
	return one;
}

CUresult cuStreamCreate(struct stream **s, unsigned flags) {
	ENTER("cuStreamCreate")
	*s = mmap(NULL, sizeof **s, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	**s = (struct stream){current(), flags == 0, next_id++, 0};
	RETURN("flags %u", flags)
}

static void leave(uint64_t capture, const struct stream *one);

// cuStreamDestroy_v2: a later use of the stream crashes, as with the real one.
CUresult cuStreamDestroy_v2(struct stream *s) {
	ENTER("cuStreamDestroy")
	leave(0, s);
	munmap(s, sizeof *s);
	RETURN("")
}

// capturing is what asking a stream for what it is gives, and does, while it is captured.
static CUresult capturing(struct stream *s) {
	if (resolve(s)->capture == 0)
		return implicit(s, 1);
	if (resolve(s)->invalidated)
		return CAPTURE_INVALIDATED;
	resolve(s)->invalidated = 1;
	return CAPTURE_UNSUPPORTED;
}

CUresult cuStreamGetCtx(struct stream *s, struct context **context) {
	ENTER("cuStreamGetCtx")
	r = capturing(s);
	*context = resolve(s)->context;
	RETURN("")
}

CUresult cuStreamGetFlags(struct stream *s, unsigned *flags) {
	ENTER("cuStreamGetFlags")
	r = capturing(s);
	*flags = !resolve(s)->blocking;
	RETURN("")
}

CUresult cuStreamGetId(struct stream *s, unsigned long long *id) {
	ENTER("cuStreamGetId")
	r = capturing(s);
	*id = resolve(s)->id;
	RETURN("")
}

static CUresult capture_info(struct stream *s, int *status, uint64_t *id) {
	if (implicit(s, 0) != SUCCESS)
		return CAPTURE_IMPLICIT;
	*id = resolve(s)->capture;
	*status = *id == 0 ? 0 : resolve(s)->invalidated ? 2 : 1;
	if (*status == 0)
		*id = 0xdead; // unset, as the driver leaves it
	return SUCCESS;
}

CUresult cuStreamGetCaptureInfo(struct stream *s, int *status, uint64_t *id) {
	ENTER("cuStreamGetCaptureInfo")
	r = capture_info(s, status, id);
	RETURN("")
}

// capture_nodes adds what the stream's next node comes after.
static CUresult capture_nodes(struct stream *s, int *status, uint64_t *id, struct node ***dependencies, size_t *count) {
	CUresult r = capture_info(s, status, id);
	if (r != SUCCESS || dependencies == NULL || *status != 1)
		return r;
	struct stream *one = resolve(s);
	*dependencies = one->next.after;
	*count = one->next.n;
	return SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(struct stream *s, int *status, uint64_t *id, void *graph, struct node ***dependencies,
				   size_t *count) {
	ENTER("cuStreamGetCaptureInfo_v2")
	(void)graph;
	r = capture_nodes(s, status, id, dependencies, count);
	RETURN("")
}

CUresult cuStreamGetCaptureInfo_v3(struct stream *s, int *status, uint64_t *id, void *graph, struct node ***dependencies,
				   void *edges, size_t *count) {
	ENTER("cuStreamGetCaptureInfo_v3")
	(void)graph;
	r = edges != NULL ? INVALID_VALUE : capture_nodes(s, status, id, dependencies, count);
	RETURN("")
}

CUresult cuGraphNodeGetDependencies(struct node *node, struct node **dependencies, size_t *count) {
	ENTER("cuGraphNodeGetDependencies")
	for (size_t i = 0; dependencies != NULL && i < node->n && i < *count; i++)
		dependencies[i] = node->after[i];
	*count = node->n;
	RETURN("")
}

static struct stream *joined[16]; // streams that joined a capture

// join has a stream's next node come after what an event marks in a capture, which the stream is part of from then on.
static CUresult join(struct stream *s, const struct event *e) {
	if (s->capture == 0) {
		size_t i = 0;
		while (i < 16 && joined[i] != NULL)
			i++;
		if (i == 16)
			return UNKNOWN;
		joined[i] = s;
		s->capture = e->capture;
		s->next.n = 0;
	}
	for (size_t i = 0; i < e->next.n; i++) {
		size_t k = 0;
		while (k < s->next.n && s->next.after[k] != e->next.after[i])
			k++;
		if (k == 4)
			return UNKNOWN;
		s->next.after[k] = e->next.after[i];
		if (k == s->next.n)
			s->next.n++;
	}
	return SUCCESS;
}

// leave ends the part in a capture of the streams that joined it, or of one.
static void leave(uint64_t capture, const struct stream *one) {
	for (size_t i = 0; i < 16; i++)
		if (joined[i] != NULL && (joined[i] == one || (joined[i]->capture == capture && one == NULL))) {
			joined[i]->capture = 0;
			joined[i] = NULL;
		}
}

CUresult cuStreamWaitEvent(struct stream *s, struct event *e, unsigned flags) {
	ENTER("cuStreamWaitEvent")
	if (e == NULL || flags != 0)
		r = INVALID_HANDLE;
	else if (e->capture != 0 && (uintptr_t)s > 2)
		r = join(s, e);
	RETURN("flags %u", flags)
}

CUresult cuStreamSynchronize(struct stream *s) {
	ENTER("cuStreamSynchronize")
	if (resolve(s)->capture != 0)
		r = CAPTURE_UNSUPPORTED;
	else
		pools_after_wait();
	RETURN("")
}

CUresult cuStreamBeginCapture_v2(struct stream *s, int m) {
	ENTER("cuStreamBeginCapture")
	if ((uintptr_t)s <= 1)
		r = CAPTURE_UNSUPPORTED;
	else
		s->capture = next_id++;
	if (r == SUCCESS && s->blocking)
		captured[current()->device] = s;
	RETURN("mode %d", m)
}

CUresult cuStreamEndCapture(struct stream *s, struct graph **graph) {
	ENTER("cuStreamEndCapture")
	if ((uintptr_t)s <= 1 || s->capture == 0) {
		r = CAPTURE_UNMATCHED;
	} else {
		*graph = calloc(1, sizeof **graph);
		(*graph)->id = s->capture;
		(*graph)->allocated = s->allocated;
		s->allocated = 0;
		if (s->invalidated) {
			free(*graph);
			*graph = NULL;
			r = CAPTURE_INVALIDATED;
		}
		leave(s->capture, NULL);
		s->capture = 0;
		s->next.n = 0;
		s->invalidated = 0;
		if (captured[current()->device] == s)
			captured[current()->device] = NULL;
	}
	RETURN("")
}

CUresult cuGraphInstantiateWithFlags(struct graph **exec, struct graph *graph, unsigned long long flags) {
	ENTER("cuGraphInstantiateWithFlags")
	*exec = calloc(1, sizeof **exec);
	(*exec)->id = graph->id;
	(*exec)->allocated = graph->allocated;
	(*exec)->device = current()->device;
	RETURN("flags %llu", flags)
}

CUresult cuGraphLaunch(struct graph *exec, struct stream *s) {
	ENTER("cuGraphLaunch")
	(void)s;
	if (exec == NULL)
		r = INVALID_HANDLE;
	else
		r = graph_launched(exec);
	RETURN("")
}

CUresult cuGraphExecDestroy(struct graph *exec) {
	ENTER("cuGraphExecDestroy")
	graph_destroyed(exec);
	free(exec);
	RETURN("")
}

CUresult cuGraphDestroy(struct graph *graph) {
	ENTER("cuGraphDestroy")
	free(graph);
	RETURN("")
}

CUresult cuEventCreate(struct event **e, unsigned flags) {
	ENTER("cuEventCreate")
	*e = calloc(1, sizeof **e);
	(*e)->shared = flags == 6;
	RETURN("flags %u", flags)
}

// Work is done at once, so that an event of another process is complete whatever was recorded.
CUresult cuIpcGetEventHandle(struct ipc *handle, struct event *e) {
	ENTER("cuIpcGetEventHandle")
	memset(handle, 0, sizeof *handle);
	if (e == NULL || !e->shared)
		r = INVALID_HANDLE;
	else
		*handle = (struct ipc){"event", getpid(), 0, (uintptr_t)e, ""};
	RETURN("")
}

CUresult cuIpcOpenEventHandle(struct event **e, struct ipc handle) {
	ENTER("cuIpcOpenEventHandle")
	if (strcmp(handle.magic, "event") != 0)
		r = INVALID_VALUE;
	else
		*e = calloc(1, sizeof **e);
	RETURN("")
}

CUresult cuEventDestroy_v2(struct event *e) {
	ENTER("cuEventDestroy")
	if (e == NULL)
		r = INVALID_HANDLE;
	free(e);
	RETURN("")
}

CUresult cuEventRecord(struct event *e, struct stream *s) {
	ENTER("cuEventRecord")
	if (e == NULL)
		r = INVALID_HANDLE;
	else if ((r = implicit(s, 1)) == SUCCESS)
		*e = (struct event){resolve(s)->capture == 0, resolve(s)->capture, resolve(s)->next, e->shared};
	RETURN("stream %d", (uintptr_t)s > 2 ? -1 : (int)(uintptr_t)s)
}

CUresult cuEventQuery(struct event *e) {
	ENTER("cuEventQuery")
	if (e == NULL)
		r = INVALID_HANDLE;
	else if (e->recorded && number("STANDIN_NOT_READY", 0))
		r = NOT_READY;
	RETURN("")
}

CUresult cuEventSynchronize(struct event *e) {
	ENTER("cuEventSynchronize")
	if (e == NULL)
		r = INVALID_HANDLE;
	pools_after_wait();
	RETURN("")
}

CUresult cuEventElapsedTime(float *ms, struct event *from, struct event *to) {
	ENTER("cuEventElapsedTime")
	if (from == NULL || to == NULL)
		r = INVALID_HANDLE;
	*ms = 1.5f;
	RETURN("")
}

// Kernels: the three of internal/gpu and the one of examples/go, done at once by the host.

CUresult cuModuleLoadDataEx(const char **module, const char *image, unsigned count, int *options, void **values) {
	ENTER("cuModuleLoadDataEx")
	*module = "module";
	if (strstr(image, ".version") == NULL) {
		r = INVALID_PTX;
		if (count == 2 && options[0] == 5 && options[1] == 6)
			snprintf(values[0], (size_t)(uintptr_t)values[1], "ptxas application ptx input, line 1;\nfatal : no .version\n");
	}
	RETURN("")
}

CUresult cuModuleUnload(const char *module) {
	ENTER("cuModuleUnload")
	(void)module;
	RETURN("")
}

CUresult cuModuleGetFunction(const char **function, const char *module, const char *name) {
	static const char *const known[] = {"spin", "fill", "check", "squares"};
	ENTER("cuModuleGetFunction")
	(void)module;
	r = NOT_FOUND;
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (strcmp(name, known[i]) == 0) {
			*function = known[i];
			r = SUCCESS;
		}
	RETURN("%s", name)
}

static uint64_t word(uint64_t key, uint64_t i) {
	uint64_t z = key + i * 0x9E3779B97F4A7C15u;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	return z ^ z >> 31;
}

static void capture_node(struct stream *s) {
	struct stream *one = resolve(s);
	if (one->capture == 0)
		return;
	struct node *node = calloc(1, sizeof *node); // never freed: a test's process is short
	*node = one->next;
	one->next = (struct node){{node}, 1};
}

CUresult cuLaunchKernel(const char *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			unsigned shared, struct stream *s, void **args, void **extra) {
	ENTER("cuLaunchKernel")
	if (gy != 1 || gz != 1 || by != 1 || bz != 1 || gx == 0 || bx == 0 || shared != 0 || extra != NULL)
		r = INVALID_VALUE;
	if (r == SUCCESS)
		capture_node(s);
	uint64_t a = *(uint64_t *)args[0];
	if (r == SUCCESS && strcmp(function, "squares") == 0) {
		for (uint64_t i = 0; i < *(uint64_t *)args[1] && i < (uint64_t)gx * bx; i++)
			((uint64_t *)(uintptr_t)a)[i] = i * i;
	} else if (r == SUCCESS && resolve(s)->capture == 0 && strcmp(function, "spin") != 0) {
		char *p = (char *)(uintptr_t)a;
		uint64_t bytes = *(uint64_t *)args[1], key = *(uint64_t *)args[2], wrong = 0;
		int check = strcmp(function, "check") == 0;
		for (uint64_t i = 0; i * 8 < bytes; i++) {
			uint64_t w = word(key, i);
			size_t n = bytes - i * 8 < 8 ? bytes - i * 8 : 8;
			if (!check)
				memcpy(p + i * 8, &w, n);
			else if (n == 8)
				wrong += memcmp(p + i * 8, &w, 8) != 0;
			else
				for (size_t b = 0; b < n; b++)
					wrong += p[i * 8 + b] != ((char *)&w)[b];
		}
		if (check)
			*(uint64_t *)(uintptr_t)*(uint64_t *)args[3] += wrong;
	}
	RETURN("%s, grid %u, block %u, %llu", function, gx, bx, strcmp(function, "spin") == 0 ? (unsigned long long)a : 0)
}

CUresult cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
	ENTER("cuMemcpyHtoD")
	memcpy((void *)(uintptr_t)to, from, size);
	RETURN("size %zu", size)
}

CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
	ENTER("cuMemcpyDtoH")
	memcpy(to, (const void *)(uintptr_t)from, size);
	RETURN("size %zu", size)
}

CUresult cuMemsetD8Async(uint64_t p, unsigned char value, size_t size, struct stream *s) {
	ENTER("cuMemsetD8Async")
	capture_node(s);
	memset((void *)(uintptr_t)p, value, size);
	RETURN("value %d, size %zu", value, size)
}
