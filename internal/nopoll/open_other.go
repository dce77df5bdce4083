//go:build !unix

package nopoll

import "os"

// OpenFile is os.OpenFile: there is no such poller.
func OpenFile(name string, flag int, perm os.FileMode) (*os.File, error) {
	return os.OpenFile(name, flag, perm)
}
