package broker

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Keeper stores the descriptors of objects such that the next broker has them.
type Keeper interface {
	Store(o *objects.Object, m *objects.Memory)
	Forget(generation uint64)
}

// forget is nothing to do: what was removed and is still pinned is forgotten with its memory.
func (t *objectTable) forget(protocol.ObjectName) {}

// soPeerGroups is SO_PEERGROUPS (Linux 4.13).
const soPeerGroups = 59

// peerGroups are the supplementary groups of the process at the other end of a socket.
func peerGroups(fd int) []uint32 {
	groups := make([]uint32, 256)
	size := uint32(4 * len(groups))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, soPeerGroups, uintptr(unsafe.Pointer(&groups[0])),
		uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return nil // it has more than these, which then do not count
	}
	return groups[:size/4]
}
