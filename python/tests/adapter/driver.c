/* A stand-in for libcuda.so.1: what the plain shim asks of it. Which streams are captured is what a test says. */
static void *captured[16];

void test_capture(void *stream, int on) {
  for (int i = 0; i < 16; i++)
    if (captured[i] == (on ? (void *)0 : stream)) {
      captured[i] = on ? stream : (void *)0;
      return;
    }
}

int cuStreamIsCapturing(void *stream, int *status) {
  *status = 0;
  for (int i = 0; i < 16; i++)
    *status |= captured[i] == stream;
  return 0;
}
