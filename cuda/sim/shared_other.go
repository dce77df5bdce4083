//go:build !linux

package sim

import "errors"

var errShared = errors.New("devices are shared on Linux only")

// lockedFile is not there without Linux, where processes are known by /proc.
type lockedFile struct{}

func openLocked(string) (*lockedFile, error)             { return nil, errShared }
func reopened(int) (*lockedFile, error)                  { return nil, errShared }
func (*lockedFile) number() uint64                       { return 0 }
func (*lockedFile) read([]byte, int64) error             { return errShared }
func (*lockedFile) size() (int64, error)                 { return 0, errShared }
func (*lockedFile) lock() error                          { return errShared }
func (*lockedFile) unlock() error                        { return errShared }
func (*lockedFile) close()                               {}
func (*lockedFile) contents([]byte, int) ([]byte, error) { return nil, errShared }
func (*lockedFile) write([]byte, int64) error            { return errShared }
func thisProcess() (pid, start uint64, err error)        { return 0, 0, errShared }
func processEnded(uint64, uint64) bool                   { return false }
