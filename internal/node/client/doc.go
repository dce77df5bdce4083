// Package client is a process's end of the connection to the broker of its node (internal/node/broker). It is the engine's Node: it has
// requests that lack memory ask the broker, and gives unused memory back when the broker asks.
//
// # In a host process
//
// The library is a guest, so there are two goroutines for each client and no more: one that reads what the broker sends, and one that
// gives memory back, which may wait for the GPU. While memory is paused for the node there is a third. None uses the poller or the timers of Go's runtime. The socket is known by its
// inode, as the program may close it; a link that is lost is made anew, after a pause that doubles up to a limit. While there is no
// broker a process tries to connect every ten seconds, which is one system call.
//
// # Locks
//
// Client.mu is a leaf: nothing is called with it but a send that does not wait. Admit is called with the engine's locks and takes
// none. Memory is given back with no lock of this package.
//
// # Nothing in steady state
//
// The broker reads what a process has from its status segment (internal/live). A message is sent when a request lacks memory, when
// another process's does, when a device comes into use, and when the program changes what the broker may pause.
//
// Linux has all of this; elsewhere New is nil and all methods do nothing.
package client
