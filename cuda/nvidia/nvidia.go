// Package nvidia is the driver of NVIDIA's GPUs: cuda.Driver over libcuda.so.1, opened at run time, so that a program
// built with it also starts where there is no GPU, and no CUDA toolkit is needed to build it. It calls, checks and
// converts; it holds no policy.
//
// # How it is made
//
// driver.h declares the driver's types and lists the calls; nv_open looks all of them up at once into a table of
// function pointers, and a call that the installed driver lacks is an error only when it is first needed. Around every
// driver call stands one C function (driver.c: devices and memory; memory.c: host, managed and pooled memory; order.c:
// streams, events, kernels), which puts the thread into relaxed capture mode, makes the device's primary context current
// if it is not, calls, and restores both. Doing that in C makes one crossing from Go of it, and keeps it on one operating
// system thread.
//
// # Contexts
//
// Only primary contexts are used, and none is made before RetainContext asks for it. A call that needs a context of a
// device without one fails with cuda.ErrInvalidContext; where another library in the process made one (PyTorch,
// say), that context is retained and used. The virtual memory calls push none: they work without any context, and
// make none (measured on an H200, driver 580).
//
// There is no lock: all that is written after Open is each device's context and its number, atomically.
//
// # Beyond cuda.Driver
//
// Driver (in work.go) also loads and launches kernels, copies and captures, for tests, probes and Go
// programs that bring no other CUDA library.
package nvidia
