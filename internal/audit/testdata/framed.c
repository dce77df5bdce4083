// A library whose frame has the size that SIZE says, for frames.c.

__attribute__((noinline)) void call(void (*f)(void)) {
	volatile char local[SIZE] = {1};
	f();
	local[SIZE / 2] = local[0];
}
