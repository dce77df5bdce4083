package sim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/cistern-gpu/cistern/cuda"
)

// Several drivers, of one process or of several, share devices through a file (Options.Shared): a header, and a record for each
// device that a driver has memory of. A driver changes the file under an exclusive flock. Memory of a process that has ended is
// free at once, and its records are dropped by the next driver that looks for memory. (On an H200 with driver 580.159.04 it was
// free 370 ms after SIGKILL where the process had 1 GiB chunks, 2.3 s where it had 70,000 of 2 MiB.)
//
// A process is known by its number and start time, so all are of one PID namespace. One that replaces itself (exec) counts until
// it ends. A process that is stopped within a call stops the calls of the others until it goes on.

// sharedBlock is the size of the header and of each record in bytes. A write of an aligned block lies within a page, so that a
// process killed while it writes leaves the block as it was or as it is to be.
const sharedBlock = 64

// maxRecords limits what a damaged file makes a driver read.
const maxRecords = 1 << 16

const sharedMagic = "cistern-sim-gpu1"

// machineID is what drivers that share a file must agree on.
type machineID struct{ devices, capacity uint64 }

func (m machineID) String() string {
	return fmt.Sprintf("devices: %d, bytes each: %d", m.devices, m.capacity)
}

// shareRecord is the memory that one driver has of one device.
type shareRecord struct {
	pid, start uint64 // the process, and when it started in clock ticks since boot
	driver     uint64 // Driver.identity
	device     uint64
	bytes      uint64 // 0 where the record is free
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal writes the checksum of a block.
func seal(b *[sharedBlock]byte) {
	binary.LittleEndian.PutUint32(b[sharedBlock-4:], crc32.Checksum(b[:sharedBlock-4], castagnoli))
}

func sealed(b []byte) bool {
	return binary.LittleEndian.Uint32(b[sharedBlock-4:]) == crc32.Checksum(b[:sharedBlock-4], castagnoli)
}

func (m machineID) block() (b [sharedBlock]byte) {
	copy(b[:], sharedMagic)
	binary.LittleEndian.PutUint64(b[16:], m.devices)
	binary.LittleEndian.PutUint64(b[24:], m.capacity)
	seal(&b)
	return b
}

func (r shareRecord) block() (b [sharedBlock]byte) {
	if r.bytes == 0 {
		return b
	}
	for i, v := range [...]uint64{r.pid, r.start, r.driver, r.device, r.bytes} {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	seal(&b)
	return b
}

// recordOf reads a record; ok is false where no driver wrote it.
func recordOf(b []byte) (r shareRecord, ok bool) {
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	r = shareRecord{pid: v(0), start: v(1), driver: v(2), device: v(3), bytes: v(4)}
	if r.bytes == 0 {
		return r, bytes.Equal(b, noBlock[:])
	}
	return r, sealed(b) && bytes.Equal(b[40:sharedBlock-4], noBlock[40:sharedBlock-4])
}

var noBlock [sharedBlock]byte

// parseShared reads a whole file of machine m into records, one for each block after the header.
func parseShared(b []byte, m machineID, records []shareRecord) ([]shareRecord, error) {
	if len(b) < sharedBlock || string(b[:len(sharedMagic)]) != sharedMagic {
		return nil, fmt.Errorf("another program's file: expected an empty one or one that begins with %q", sharedMagic)
	}
	head := machineID{binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint64(b[24:])}
	switch {
	case !sealed(b[:sharedBlock]):
		return nil, errors.New("damaged: the header's checksum is wrong")
	case head != m:
		return nil, fmt.Errorf("the file of another machine (%v): expected %v", head, m)
	case len(b)%sharedBlock != 0 || len(b) > (maxRecords+1)*sharedBlock:
		return nil, fmt.Errorf("damaged: %d bytes: expected a multiple of %d, at most %d", len(b), sharedBlock, (maxRecords+1)*sharedBlock)
	}
	var taken [maxDevices]uint64
	for b = b[sharedBlock:]; len(b) > 0; b = b[sharedBlock:] {
		r, ok := recordOf(b[:sharedBlock])
		if !ok || r.bytes != 0 && (r.pid == 0 || r.pid > maxPID || r.device >= m.devices) {
			return nil, fmt.Errorf("damaged: record %d is none that a driver writes", len(records))
		}
		if r.bytes != 0 {
			if r.bytes > m.capacity-taken[r.device] {
				return nil, fmt.Errorf("damaged: the records of device %d exceed its %d bytes", r.device, m.capacity)
			}
			taken[r.device] += r.bytes
		}
		records = append(records, r)
	}
	return records, nil
}

var errClosed = errors.New("the driver is closed")

// maxPID is more than any kernel's PID_MAX_LIMIT.
const maxPID = 1 << 30

// shared is a driver's part in the file. Protected by Driver.mu.
type shared struct {
	file    *lockedFile
	machine machineID
	self    shareRecord // without device and bytes
	slots   []int       // by device, the index of this driver's record; -1 without
	closed  bool
	err     error // the first failure of the file

	contents []byte // of the file when it was read last
	records  []shareRecord
	ended    map[[2]uint64]bool // by process and its start, while one look lasts
}

// openShared opens the file, or makes it where there is none.
func openShared(path string, m machineID, identity uint64) (*shared, error) {
	pid, start, err := thisProcess()
	if err != nil {
		return nil, err
	}
	f, err := openLocked(path)
	if err != nil {
		return nil, err
	}
	s := &shared{file: f, machine: m, self: shareRecord{pid: pid, start: start, driver: identity},
		slots: make([]int, m.devices), ended: map[[2]uint64]bool{}}
	for i := range s.slots {
		s.slots[i] = -1
	}
	err = s.locked(func() error {
		if size, err := f.size(); err != nil || size != 0 {
			return err
		}
		b := m.block()
		return f.write(b[:], 0)
	})
	if err == nil {
		err = s.locked(s.read)
	}
	if err != nil {
		f.close()
		return nil, err
	}
	return s, nil
}

// locked calls f with the file locked.
func (s *shared) locked(f func() error) error {
	if s.closed {
		return errClosed
	}
	if err := s.file.lock(); err != nil {
		return err
	}
	err := f()
	if u := s.file.unlock(); err == nil {
		err = u
	}
	return err
}

// read reads the file, which is locked.
func (s *shared) read() (err error) {
	if s.contents, err = s.file.contents(s.contents[:0], (maxRecords+1)*sharedBlock+1); err != nil {
		return err
	}
	s.records, err = parseShared(s.contents, s.machine, s.records[:0])
	return err
}

// put writes a record at an index.
func (s *shared) put(i int, r shareRecord) error {
	b := r.block()
	return s.file.write(b[:], int64(i+1)*sharedBlock)
}

// others is the memory that other drivers have of a device, in the records that were read.
func (s *shared) others(dev cuda.Device) (n uint64) {
	for _, r := range s.records {
		if r.bytes != 0 && r.device == uint64(dev) && r.driver != s.self.driver {
			n += r.bytes
		}
	}
	return n
}

// dropEnded frees the records of processes that have ended.
func (s *shared) dropEnded() error {
	clear(s.ended)
	for i, r := range s.records {
		if r.bytes == 0 || r.pid == s.self.pid && r.start == s.self.start {
			continue
		}
		p := [2]uint64{r.pid, r.start}
		ended, known := s.ended[p]
		if !known {
			ended = processEnded(r.pid, r.start)
			s.ended[p] = ended
		}
		if ended {
			s.records[i] = shareRecord{}
			if err := s.put(i, shareRecord{}); err != nil {
				return err
			}
		}
	}
	return nil
}

// look finds what other drivers have of a device.
func (s *shared) look(v *device) cuda.Code {
	return s.code(s.locked(func() error {
		if err := s.read(); err != nil {
			return err
		}
		if err := s.dropEnded(); err != nil {
			return err
		}
		v.others = s.others(v.id)
		return nil
	}))
}

// take adds memory to this driver's record, if so much is free. Whether processes have ended is looked up only where it decides: it
// reads a file of each in /proc.
func (s *shared) take(v *device, size uint64) cuda.Code {
	enough := false
	code := s.code(s.locked(func() error {
		if err := s.read(); err != nil {
			return err
		}
		if v.others = s.others(v.id); v.available() < size {
			if err := s.dropEnded(); err != nil {
				return err
			}
			if v.others = s.others(v.id); v.available() < size {
				return nil
			}
		}
		enough = true
		return s.write(v.id, v.used+size)
	}))
	if code == cuda.Success && !enough {
		return cuda.ErrOutOfMemory
	}
	return code
}

// give says that the driver has less memory of a device now. Where that fails the record is too high until the next take.
func (s *shared) give(v *device) {
	s.code(s.locked(func() error { return s.write(v.id, v.used) }))
}

// write writes this driver's record of a device, which is locked. Only take makes one, and it has read the file.
func (s *shared) write(dev cuda.Device, bytes uint64) error {
	i := s.slots[dev]
	if i < 0 {
		for i = 0; i < len(s.records) && s.records[i].bytes != 0; i++ {
		}
		if i == maxRecords {
			return fmt.Errorf("%d records: expected fewer", maxRecords)
		}
	}
	r := s.self
	r.device, r.bytes = uint64(dev), bytes
	if err := s.put(i, r); err != nil {
		return err
	}
	if s.slots[dev] = i; bytes == 0 {
		s.slots[dev] = -1
	}
	return nil
}

// code is what a driver call answers. The first error is kept for Close.
func (s *shared) code(err error) cuda.Code {
	switch err {
	case nil:
		return cuda.Success
	case errClosed:
		return cuda.ErrDeinitialized
	}
	if s.err == nil {
		s.err = err
	}
	return cuda.ErrUnknown
}

// Close gives the memory of a driver with Options.Shared back to the others, and returns the first failure of the shared file. Calls
// that need device memory fail from then on. Other drivers need no Close; those that share pools or events keep a file open without
// it.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.leave()
	d.closeFiles()
	s := d.shared
	if s == nil || s.closed {
		return nil
	}
	for _, v := range d.devices {
		if s.slots[v.id] >= 0 {
			s.code(s.locked(func() error { return s.write(v.id, 0) }))
		}
	}
	s.closed = true
	s.file.close()
	if s.err != nil {
		return fmt.Errorf("sim: shared file %s: %w", d.opt.Shared, s.err)
	}
	return nil
}
