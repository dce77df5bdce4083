//go:build !linux

package resource

import "errors"

// hostMemory is the free and total memory of the host in bytes.
func hostMemory(int) (free, total uint64, err error) {
	return 0, 0, errors.New("memory of the host: not known on this system")
}
