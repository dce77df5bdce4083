// Package examples tests the Go programs of the folder examples as their readers would run them: built in a module of
// their own, over the simulated device, and over the stand-in for libcuda, where kernels run too.
package examples
