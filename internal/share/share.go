// Package share is memory shared between processes: the handles that name it, and the Unix socket over which the
// process that has it passes descriptors to those that open it.
//
// # How it goes
//
// A process that shares memory for the first time starts to listen on a socket of its own; a goroutine answers, so that
// nothing of the program waits for importers. The handle says where the socket is, a secret that only holders of a
// handle know, and the number of the export. An importer connects, receives what the memory is made of, maps
// it chunk by chunk from descriptors that the socket carries (SCM_RIGHTS: unlike pidfd_getfd, nothing of it needs a
// right that containers take away), and hangs up. A chunk's descriptor is open in either process for as long as it takes
// to pass it on.
//
// # Where the socket is
//
// In a folder that only the user may enter: cistern-UID in /dev/shm. Where another user has made that first, it is cistern in
// $XDG_RUNTIME_DIR, or one with a random name in /dev/shm, $TMPDIR or /tmp.
// PyTorch needs a common /dev/shm for the counters of its shared tensors anyway, so containers that share memory have it
// in common (--ipc=host, or one volume in both); a name in a file system is found from there, whereas an abstract one
// would want a common network namespace. A socket goes when its process exits; one that a killed process left behind is
// removed by the next that starts to share.
//
// # Access
//
// Both sides ask the kernel for the other's user (SO_PEERCRED), which must be their own, and the exporter for the secret.
//
// # What can go wrong
//
// Each step is waited for no longer than Timeout: a process that is gone or stuck is an error, never a hang. A child of
// fork has the parent's descriptors but not its goroutines: Guard records every descriptor, so that the child can
// close them and a dead parent is seen as such.
package share
