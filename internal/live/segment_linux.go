package live

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Segment is the page of a process that sent its descriptor.
type Segment struct{ fd int }

// NewSegment takes the descriptor, which it closes if it is not one of a page. A file that its sender could shrink, or whose reading
// could wait, is none.
func NewSegment(fd int) (*Segment, error) {
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err == nil && seals&sealed != sealed {
		err = errors.New("expected a sealed file")
	}
	if err == nil {
		_, err = decodeIdentity(file0(fd))
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("a status segment: %w", err)
	}
	return &Segment{fd}, nil
}

// Read is the figures as they were written last: Updated, Dropped and Devices of a Process. It does not wait.
func (s *Segment) Read() (p Process, err error) {
	err = decode(file0(s.fd), false, 1, &p)
	return p, err
}

// Close ends the reading.
func (s *Segment) Close() { unix.Close(s.fd) }
