package live

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/internal/latency"
)

// The page. Numbers are little-endian words of 8 bytes. A part is a number, its checksum, a length, and so many bytes; the
// checksum is over number, length and bytes.
//
//	0                 magic, version of this layout
//	identityAt        a part: the identity, as JSON; written once
//	gaugesAt          two parts in turn: the time, what was dropped, and a record for each device
//	detailsAt         two parts in turn: the time until which they stand at least, and Details by device, as JSON
const (
	magic   = 0x4556494c54534943 // "CISTLIVE"
	version = 2

	head = 24 // of a part

	identityAt  = 64
	identityMax = 16<<10 - identityAt - head

	gaugesAt    = 16 << 10
	gaugesStep  = 132 << 10
	gaugesHead  = 16
	recordBytes = 2 << 10
	maxDevices  = 64
	gaugesMax   = gaugesHead + maxDevices*recordBytes

	detailsAt   = 280 << 10
	detailsStep = 260 << 10
	detailsHead = 8
	detailsMax  = 256 << 10

	pageBytes = detailsAt + 2*detailsStep
)

// A record: the ordinal, the UUID, the name in nameBytes padded with zeros, the figures, the histogram of slow requests (the
// longest, and the counts), and zeros.
const (
	nameAt    = 24
	nameBytes = 72
	figuresAt = nameAt + nameBytes
	slowAt    = figuresAt + 8*figures
	figures   = 14 + Windows
)

var (
	_ [recordBytes - slowAt - 8 - 8*latency.Buckets]struct{}
	_ [gaugesStep - head - gaugesMax]struct{}
	_ [detailsStep - head - detailsHead - detailsMax]struct{}
)

// figures are the numbers of a record, in order.
func (d *Device) figures() [figures]*uint64 {
	f := [figures]*uint64{&d.Total, &d.Reserved, &d.Allocated, &d.Active, &d.Cached, &d.Paused, &d.PeakReserved, &d.PeakAllocated,
		&d.Limit, &d.DriverCalls, &d.Retries, &d.OOMs, &d.Requests, &d.Pinned}
	for i := range d.Recent {
		f[figures-Windows+i] = &d.Recent[i]
	}
	return f
}

var le = binary.LittleEndian

// checksum tells a part that is whole from one that is being written.
func checksum(number uint64, b []byte) uint64 {
	const k = 0x9e3779b97f4a7c15
	h := number*k ^ uint64(len(b))
	for ; len(b) >= 8; b = b[8:] {
		h = (h ^ le.Uint64(b)) * k
		h ^= h >> 29
	}
	for _, c := range b {
		h = (h ^ uint64(c)) * k
		h ^= h >> 29
	}
	return h ^ h>>32
}

// put writes part number n, which is not 0, over what is at b. What was there is no part from the first word on.
func put(b []byte, n uint64, contents []byte) {
	le.PutUint64(b, 0)
	copy(b[head:], contents)
	le.PutUint64(b[16:], uint64(len(contents)))
	le.PutUint64(b[8:], checksum(n, contents))
	le.PutUint64(b, n)
}

// get reads a part of at most so many bytes. n is 0 where none is whole. The contents are in b, if that has room; the first look
// takes as much as it has.
func get(r io.ReaderAt, at int64, most int, b []byte) (n uint64, contents []byte, err error) {
	if b = b[:min(cap(b), head+most)]; len(b) < head {
		b = make([]byte, head+min(most, 4<<10))
	}
	if err := readFull(r, b, at); err != nil {
		return 0, nil, err
	}
	n = le.Uint64(b)
	size := le.Uint64(b[16:])
	if n == 0 || size > uint64(most) {
		return 0, nil, nil
	}
	if more := head + int(size) - len(b); more > 0 {
		have := len(b)
		b = slices.Grow(b, more)[:have+more]
		if err := readFull(r, b[have:], at+int64(have)); err != nil {
			return 0, nil, err
		}
	}
	b = b[:head+int(size)]
	if checksum(n, b[head:]) != le.Uint64(b[8:]) {
		return 0, nil, nil
	}
	return n, b[head:], nil
}

// readFull fills b. The end of the file is an error: a page has a fixed size.
func readFull(r io.ReaderAt, b []byte, at int64) error {
	n, err := r.ReadAt(b, at)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return errors.New("the status segment is too short")
	}
	return err
}

// tries is how often a page is looked at in which no part is whole: that lasts no longer than writing one does.
const tries = 20

// newest is the newer of two parts. n is 0 where neither is whole.
func newest(r io.ReaderAt, at, step int64, most, tries int) (n uint64, contents []byte, err error) {
	for try := range tries {
		for i := range int64(2) {
			m, c, err := get(r, at+i*step, most, nil)
			if err != nil {
				return 0, nil, err
			}
			if m > n {
				n, contents = m, c
			}
		}
		if n != 0 || blank(r, at, step) {
			return n, contents, nil
		}
		time.Sleep(time.Duration(try) * 50 * time.Microsecond)
	}
	return 0, nil, nil
}

// blank reports whether neither of two parts was ever written.
func blank(r io.ReaderAt, at, step int64) bool {
	var b [head]byte
	for i := range int64(2) {
		if readFull(r, b[:], at+i*step) != nil || b != [head]byte{} {
			return false
		}
	}
	return true
}

// identity is what of a process does not change.
type identity struct {
	// Maker is the process that made the page, as it knows itself; Start tells it from others that had or have its number.
	Maker      int    `json:"maker"`
	MakerStart uint64 `json:"maker_start"`

	PID     int      `json:"pid"`
	Start   uint64   `json:"start"`
	Name    string   `json:"name"`
	Args    []string `json:"args"`
	Kind    string   `json:"kind"`
	Version string   `json:"version"`
	Conf    string   `json:"conf"`
	Place            // of a job
}

const (
	nameMax = 256
	argsMax = 128
	argMax  = 4 << 10 // of all arguments together
	confMax = 2 << 10
	useMax  = 4 << 10 // of a holder's name
)

// tidy bounds and cleans everything, on both sides.
func (id *identity) tidy() {
	id.Name = clean(id.Name, nameMax, false)
	id.Kind = clean(id.Kind, 16, false)
	id.Version = clean(id.Version, 64, false)
	id.Conf = clean(id.Conf, confMax, false)
	id.Job = clean(id.Job, nameMax, false)
	if id.Rank < 0 || id.Rank >= id.World {
		id.Rank, id.World = 0, 0
	}
	id.Args = slices.Clone(id.Args)
	left := argMax
	for i := range id.Args {
		if i == argsMax || left == 0 {
			id.Args = id.Args[:i]
			break
		}
		id.Args[i] = clean(id.Args[i], left, false)
		left -= min(left, len(id.Args[i])+1)
	}
}

func encodeIdentity(b []byte, id identity) error {
	id.tidy()
	text, err := json.Marshal(id)
	if err == nil && len(text) > identityMax {
		err = fmt.Errorf("%d bytes of identity, at most %d fit", len(text), identityMax)
	}
	if err != nil {
		return err
	}
	put(b[identityAt:], 1, text)
	le.PutUint64(b[8:], version)
	le.PutUint64(b, magic) // last: from now on it is a page
	return nil
}

// errNotYet is the failure to read a page that is being made.
var errNotYet = errors.New("the status segment is not written yet")

func decodeIdentity(r io.ReaderAt) (id identity, err error) {
	var b [16]byte
	if n, _ := r.ReadAt(b[:1], 0); n == 0 {
		return id, errNotYet // it has no size yet
	}
	if err := readFull(r, b[:], 0); err != nil {
		return id, err
	}
	switch m, v := le.Uint64(b[:]), le.Uint64(b[8:]); {
	case m == 0:
		return id, errNotYet
	case m != magic:
		return id, errors.New("this is not a status segment of Cistern")
	case v != version:
		return id, fmt.Errorf("its status segment has layout %d, this cistern reads layout %d: use the version that the program uses", v, version)
	}
	n, text, err := get(r, identityAt, identityMax, nil)
	if err != nil {
		return id, err
	}
	if n == 0 {
		return id, errors.New("its status segment does not name its process")
	}
	if err := json.Unmarshal(text, &id); err != nil {
		return identity{}, fmt.Errorf("its status segment does not name its process: %w", err)
	}
	id.tidy()
	return id, nil
}

// encodeGauges appends what the gauges' part holds.
func encodeGauges(b []byte, at time.Time, dropped uint64, devices []Device) []byte {
	b = le.AppendUint64(b, uint64(at.UnixNano()))
	b = le.AppendUint64(b, dropped)
	for i := range devices[:min(len(devices), maxDevices)] {
		d := &devices[i]
		at := len(b)
		b = append(b, make([]byte, recordBytes)...)
		rec := b[at:]
		le.PutUint64(rec, uint64(int64(d.Ordinal)))
		copy(rec[8:nameAt], d.UUID[:])
		copy(rec[nameAt:figuresAt], d.Name)
		for i, f := range d.figures() {
			le.PutUint64(rec[figuresAt+8*i:], *f)
		}
		le.PutUint64(rec[slowAt:], d.Slow.Max)
		for i, n := range d.Slow.Counts {
			le.PutUint64(rec[slowAt+8+8*i:], n)
		}
	}
	return b
}

func decodeGauges(b []byte, p *Process) error {
	if len(b) < gaugesHead || (len(b)-gaugesHead)%recordBytes != 0 {
		return fmt.Errorf("its status segment has %d bytes of figures, which fit no number of devices", len(b))
	}
	p.Updated = time.Unix(0, int64(le.Uint64(b)))
	p.Dropped = le.Uint64(b[8:])
	for b = b[gaugesHead:]; len(b) > 0; b = b[recordBytes:] {
		d := Device{Ordinal: int(int64(le.Uint64(b))), UUID: [16]byte(b[8:nameAt])}
		name := b[nameAt:figuresAt]
		if i := slices.Index(name, 0); i >= 0 {
			name = name[:i]
		}
		if k := len(p.Devices); k < cap(p.Devices) && p.Devices[:k+1][k].Name == string(name) {
			d.Name = p.Devices[:k+1][k].Name // of the last reading
		} else {
			d.Name = clean(string(name), nameBytes, false)
		}
		for i, f := range d.figures() {
			*f = le.Uint64(b[figuresAt+8*i:])
		}
		d.Slow.Max = le.Uint64(b[slowAt:])
		for i := range d.Slow.Counts {
			d.Slow.Counts[i] = le.Uint64(b[slowAt+8+8*i:])
		}
		p.Devices = append(p.Devices, d)
	}
	return nil
}

// encodeDetails appends what the details' part holds, with lists cut short until it fits.
func encodeDetails(b []byte, until time.Time, details []Details) ([]byte, error) {
	b = le.AppendUint64(b, uint64(until.UnixNano()))
	details = details[:min(len(details), maxDevices)]
	longest := 512
	for ; longest > 0 && estimate(details, longest) > detailsMax; longest /= 2 { // before that much text is made
	}
	for ; ; longest /= 2 {
		cut := make([]Details, len(details))
		for i := range cut {
			from, to := details[i].lists(), cut[i].lists()
			for k := range from {
				*to[k] = shorten(*from[k], longest)
			}
		}
		text, err := json.Marshal(cut)
		if err != nil || len(text) <= detailsMax {
			return append(b, text...), err
		}
		if longest == 0 {
			return nil, fmt.Errorf("%d bytes of details, at most %d fit", len(text), detailsMax)
		}
	}
}

func (d *Details) lists() [5]*[]Use {
	return [...]*[]Use{&d.Tags, &d.Libraries, &d.Pools, &d.Stacks, &d.Kinds}
}

// estimate is about how much text lists cut to a length make, taken of the first of each as they come.
func estimate(details []Details, longest int) int {
	const figures = 40
	n := 0
	for i := range details {
		for _, list := range details[i].lists() {
			for _, u := range (*list)[:min(len(*list), longest)] {
				n += min(len(u.Name), useMax) + figures
			}
		}
	}
	return n
}

// shorten keeps the largest, and sums up the others.
func shorten(list []Use, most int) []Use {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Use) int { return cmp.Compare(b.Bytes, a.Bytes) })
	if len(list) > most {
		rest := Use{Name: MoreName}
		for _, u := range list[most:] {
			rest.Blocks += u.Blocks
			rest.Bytes += u.Bytes
		}
		list = append(list[:most], rest)
	}
	for i := range list {
		list[i].Name = clean(list[i].Name, useMax, true)
	}
	return list
}

// decodeDetails gives the details to the devices that they are about.
func decodeDetails(b []byte, p *Process) error {
	if len(b) < detailsHead {
		return fmt.Errorf("its status segment has %d bytes of details", len(b))
	}
	if until := time.Unix(0, int64(le.Uint64(b))); p.Updated.Sub(until) > (askedFor+2)*time.Second {
		return nil // from an earlier question
	}
	var details []Details
	if err := json.Unmarshal(b[detailsHead:], &details); err != nil {
		return fmt.Errorf("its status segment has invalid details: %w", err)
	}
	for i := range details[:min(len(details), len(p.Devices))] {
		d := &details[i]
		for _, list := range d.lists() {
			*list = shorten(*list, len(*list))
		}
		p.Devices[i].Details = d
	}
	return nil
}

// decode reads all of a page but whose it is, looking at it so often.
func decode(r io.ReaderAt, details bool, tries int, p *Process) error {
	n, b, err := newest(r, gaugesAt, gaugesStep, gaugesMax, tries)
	if err != nil || n == 0 {
		return err
	}
	if err := decodeGauges(b, p); err != nil || !details {
		return err
	}
	n, b, err = newest(r, detailsAt, detailsStep, detailsHead+detailsMax, tries)
	if err != nil || n == 0 {
		return err
	}
	return decodeDetails(b, p)
}
