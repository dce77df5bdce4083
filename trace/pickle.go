package trace

import (
	"encoding/binary"
	"fmt"
	"math"
)

// The pickle machine: Python's pickle, protocols 2 to 5, as far as plain data needs it. An opcode that names a class,
// calls anything or reaches outside the file is refused by its name. Nothing is built that a snapshot does not have:
// each container gets a role from the place where it appears (see snapshot.go), and containers without one are walked
// over and dropped. So there are no cycles, no recursion, and no value that could grow on its own.

// kind is what a value on the machine's stack is: plain data first, then the containers by role.
type kind uint8

const (
	kNone  kind = iota
	kMark       // not a value: where MARK was
	kBool       // u is 0 or 1
	kInt        // u, not negative
	kNeg        // int64(u), negative
	kBig        // an integer beyond 64 bits
	kFloat      // math.Float64frombits(u)
	kStr        // u is the id in strs
	kBytes      // dropped
	kTuple      // dropped
	kPair       // a tuple of two integers: u is the index in pairs
	// Containers. u is the index in the table that goes with the role.
	kSkipList
	kSkipDict
	kRoot     // the snapshot
	kTraces   // device_traces: u is the number of lists appended
	kTrace    // one device's list: u is the device
	kEvent    // u is its index among all events created
	kSegments // the list of segments
	kSegment
	kBlocks // u is the segment
	kBlock
	kFrames
	kFrame
	kSettings
	kSubSettings // a dict inside allocator_settings
	kLabel       // user_metadata, where it is a dict
	numKinds
)

var kindNames = [numKinds]string{"None", "a mark", "a bool", "an int", "a negative int", "an int of more than 64 bits",
	"a float", "a string", "bytes", "a tuple", "a tuple of two ints", "a list", "a dict", "a dict", "a list", "a list",
	"a dict", "a list", "a dict", "a list", "a dict", "a list", "a dict", "a dict", "a dict", "a dict"}

func (k kind) String() string { return kindNames[k] }

type value struct {
	k kind
	u uint64
}

const (
	maxDepth  = 1000    // marks; real snapshots nest 12 deep
	maxString = 4 << 20 // bytes of one string; the longest in real files are stacks of compiled code
)

// machine runs a pickle. It belongs to one goroutine.
type machine struct {
	in    *input
	b     *budget
	strs  *strtab
	stack []value
	marks []int // positions of kMark in stack
	memo  memo
	snapshot
}

func newMachine(in *input) *machine {
	m := &machine{in: in, b: newBudget(in.offset, in.stored)}
	m.strs = newStrtab(m.b)
	m.memo.b = m.b
	m.snapshot.init(m)
	return m
}

// run executes the pickle up to STOP.
func (m *machine) run() error {
	in := m.in
	var opAt int64
	for {
		if in.end-in.pos < 16 {
			if !in.need(16) && in.pos == in.end {
				return in.truncated("the pickle, before its STOP")
			}
		}
		opAt = in.offset()
		op := in.buf[in.pos]
		in.pos++
		var err error
		switch op {
		case opBinget:
			if in.end-in.pos < 1 {
				return in.truncated("BINGET")
			}
			i := in.buf[in.pos]
			in.pos++
			err = m.recall(uint64(i))
		case opMemoize:
			err = m.remember(m.memo.n)
		case opLong1:
			if in.end-in.pos < 1 {
				return in.truncated("LONG1")
			}
			n := int(in.buf[in.pos])
			in.pos++
			if in.end-in.pos < n && !in.need(n) {
				return in.truncated("LONG1")
			}
			err = m.push(long(in.buf[in.pos : in.pos+n]))
			in.pos += n
		case opBinint1:
			if in.end-in.pos < 1 {
				return in.truncated("BININT1")
			}
			err = m.push(value{kInt, uint64(in.buf[in.pos])})
			in.pos++
		case opBinint:
			if in.end-in.pos < 4 {
				return in.truncated("BININT")
			}
			i := int64(int32(binary.LittleEndian.Uint32(in.buf[in.pos:])))
			in.pos += 4
			k := kInt
			if i < 0 {
				k = kNeg
			}
			err = m.push(value{k, uint64(i)})
		case opBinint2:
			if in.end-in.pos < 2 {
				return in.truncated("BININT2")
			}
			err = m.push(value{kInt, uint64(binary.LittleEndian.Uint16(in.buf[in.pos:]))})
			in.pos += 2
		case opLongBinget:
			if in.end-in.pos < 4 {
				return in.truncated("LONG_BINGET")
			}
			i := binary.LittleEndian.Uint32(in.buf[in.pos:])
			in.pos += 4
			err = m.recall(uint64(i))
		case opMark:
			if len(m.marks) >= maxDepth {
				err = fmt.Errorf("nested more than %d deep", maxDepth)
				break
			}
			if m.marks, err = grow(m.b, m.marks, 8); err == nil {
				m.marks = append(m.marks, len(m.stack))
				err = m.push(value{k: kMark})
			}
		case opEmptyDict:
			err = m.newDict()
		case opEmptyList:
			err = m.newList()
		case opSetitems, opAppends, opTuple:
			if len(m.marks) == 0 {
				err = fmt.Errorf("%s without a MARK", opNames[op])
				break
			}
			p := m.marks[len(m.marks)-1]
			m.marks = m.marks[:len(m.marks)-1]
			items := m.stack[p+1:]
			m.stack = m.stack[:p]
			switch {
			case op == opTuple:
				err = m.pushTuple(items)
			case p == 0:
				err = fmt.Errorf("%s without a container", opNames[op])
			case op == opSetitems:
				err = m.setItems(m.stack[p-1], items)
			default:
				err = m.appendItems(m.stack[p-1], items)
			}
		case opSetitem:
			n := len(m.stack)
			if n < m.floor()+3 {
				err = fmt.Errorf("SETITEM on an empty stack")
				break
			}
			m.stack = m.stack[:n-2]
			err = m.setItems(m.stack[n-3], m.stack[n-2:n])
		case opAppend:
			n := len(m.stack)
			if n < m.floor()+2 {
				err = fmt.Errorf("APPEND on an empty stack")
				break
			}
			m.stack = m.stack[:n-1]
			err = m.appendItems(m.stack[n-2], m.stack[n-1:n])
		case opShortBinunicode, opShortBinstring:
			if in.end-in.pos < 1 {
				return in.truncated(opNames[op])
			}
			n := uint64(in.buf[in.pos])
			in.pos++
			err = m.pushString(n, opNames[op])
		case opBinunicode, opBinstring, opBinunicode8:
			n, ok := m.count(op)
			if !ok {
				return in.truncated(opNames[op])
			}
			err = m.pushString(n, opNames[op])
		case opShortBinbytes, opBinbytes, opBinbytes8, opBytearray8:
			n, ok := m.count(op)
			if !ok || !in.skip(n) {
				return in.truncated(opNames[op])
			}
			err = m.push(value{k: kBytes})
		case opTuple1, opTuple2, opTuple3:
			k := int(op-opTuple1) + 1
			n := len(m.stack) - k
			if n < m.floor() {
				err = fmt.Errorf("%s on an empty stack", opNames[op])
				break
			}
			items := m.stack[n:]
			m.stack = m.stack[:n]
			err = m.pushTuple(items)
		case opEmptyTuple:
			err = m.push(value{k: kTuple})
		case opNone:
			err = m.push(value{})
		case opNewtrue:
			err = m.push(value{kBool, 1})
		case opNewfalse:
			err = m.push(value{kBool, 0})
		case opBinfloat:
			if in.end-in.pos < 8 {
				return in.truncated("BINFLOAT")
			}
			err = m.push(value{kFloat, binary.BigEndian.Uint64(in.buf[in.pos:])})
			in.pos += 8
		case opBinput:
			if in.end-in.pos < 1 {
				return in.truncated("BINPUT")
			}
			i := in.buf[in.pos]
			in.pos++
			err = m.remember(uint64(i))
		case opLongBinput:
			if in.end-in.pos < 4 {
				return in.truncated("LONG_BINPUT")
			}
			i := binary.LittleEndian.Uint32(in.buf[in.pos:])
			in.pos += 4
			err = m.remember(uint64(i))
		case opFrame:
			if in.end-in.pos < 8 {
				return in.truncated("FRAME")
			}
			in.pos += 8 // a hint for readers that buffer by frame
		case opProto:
			if in.end-in.pos < 1 {
				return in.truncated("PROTO")
			}
			if v := in.buf[in.pos]; v < 2 || v > 5 {
				err = fmt.Errorf("pickle protocol %d; expected 2 to 5", v)
			}
			in.pos++
		case opLong4:
			n, ok := m.count(op)
			if !ok {
				return in.truncated("LONG4")
			}
			if n > 255 {
				err = fmt.Errorf("an integer of %d bytes; expected at most 255", n)
				break
			}
			if !in.need(int(n)) {
				return in.truncated("LONG4")
			}
			err = m.push(long(in.buf[in.pos : in.pos+int(n)]))
			in.pos += int(n)
		case opStop:
			if len(m.stack) != 1 || m.stack[0].k != kRoot {
				what := "nothing"
				if len(m.stack) > 0 {
					what = m.stack[len(m.stack)-1].k.String()
				}
				err = fmt.Errorf("the pickle holds %s; expected a snapshot (a dict with device_traces and segments)", what)
				break
			}
			return m.finish()
		default:
			switch {
			case refused[op] != "":
				err = fmt.Errorf("opcode %s %s; a snapshot has plain data only", opNames[op], refused[op])
			case opNames[op] != "":
				err = fmt.Errorf("opcode %s; expected the plain data of pickle protocols 2 to 5", opNames[op])
			default:
				err = fmt.Errorf("byte 0x%02x is no pickle opcode", op)
			}
		}
		if err != nil {
			if _, ok := err.(*Error); ok {
				return err
			}
			return atByte(opAt, "%s", err)
		}
	}
}

// floor is how much of the stack lies below the last MARK, itself included: only what collects it may reach there.
func (m *machine) floor() int {
	if len(m.marks) == 0 {
		return 0
	}
	return m.marks[len(m.marks)-1] + 1
}

func (m *machine) push(v value) error {
	if len(m.stack) == cap(m.stack) {
		var err error
		if m.stack, err = grow(m.b, m.stack, 16); err != nil {
			return err
		}
	}
	m.stack = append(m.stack, v)
	return nil
}

// count reads the length that op's argument begins with.
func (m *machine) count(op byte) (uint64, bool) {
	in := m.in
	n := 4
	switch op {
	case opShortBinbytes:
		n = 1
	case opBinunicode8, opBinbytes8, opBytearray8:
		n = 8
	}
	if !in.need(n) {
		return 0, false
	}
	var u uint64
	for i := n - 1; i >= 0; i-- {
		u = u<<8 | uint64(in.buf[in.pos+i])
	}
	in.pos += n
	return u, true
}

func (m *machine) pushString(n uint64, op string) error {
	in := m.in
	if n <= windowSize {
		if in.end-in.pos < int(n) && !in.need(int(n)) {
			return in.truncated(op)
		}
		id, err := m.strs.id(in.buf[in.pos : in.pos+int(n)])
		if err != nil {
			return err
		}
		in.pos += int(n)
		return m.push(value{kStr, uint64(id)})
	}
	if n > maxString {
		return fmt.Errorf("a string of %d bytes; expected at most %d", n, maxString)
	}
	// Longer than the window: collected piece by piece, so that the length costs nothing before its bytes are there.
	var text []byte
	for uint64(len(text)) < n {
		if in.pos == in.end && !in.need(1) {
			return in.truncated(op)
		}
		k := min(n-uint64(len(text)), uint64(in.end-in.pos))
		text = append(text, in.buf[in.pos:in.pos+int(k)]...)
		in.pos += int(k)
	}
	id, err := m.strs.id(text)
	if err != nil {
		return err
	}
	return m.push(value{kStr, uint64(id)})
}

// long is a little-endian two's complement integer.
func long(b []byte) value {
	n := len(b)
	if n == 0 {
		return value{kInt, 0}
	}
	neg := b[n-1]&0x80 != 0
	pad := byte(0)
	if neg {
		pad = 0xff
	}
	for n > 8 && b[n-1] == pad {
		n-- // sign bytes above the 64 bits that are kept
	}
	if n > 8 {
		return value{k: kBig}
	}
	var u uint64
	for i := n - 1; i >= 0; i-- {
		u = u<<8 | uint64(b[i])
	}
	if !neg {
		return value{kInt, u}
	}
	if n < 8 {
		u |= math.MaxUint64 << (8 * n)
	} else if u>>63 == 0 {
		return value{k: kBig}
	}
	return value{kNeg, u}
}

// pushTuple makes a tuple of items. Only pairs of numbers mean anything in a snapshot: they name pools.
func (m *machine) pushTuple(items []value) error {
	if len(items) != 2 || items[0].k != kInt || items[1].k != kInt {
		return m.push(value{k: kTuple})
	}
	p := PoolID{items[0].u, items[1].u}
	id, ok := m.pairIDs[p]
	if !ok {
		if err := m.b.take(96); err != nil {
			return err
		}
		id = uint32(len(m.pairs))
		m.pairs = append(m.pairs, p)
		m.pairIDs[p] = id
	}
	return m.push(value{kPair, uint64(id)})
}

// remember stores the top of the stack as memo entry i.
func (m *machine) remember(i uint64) error {
	if len(m.stack) == 0 || m.stack[len(m.stack)-1].k == kMark {
		return fmt.Errorf("a memo entry for nothing")
	}
	return m.memo.put(i, m.stack[len(m.stack)-1])
}

// recall pushes memo entry i.
func (m *machine) recall(i uint64) error {
	if i >= m.memo.n {
		return fmt.Errorf("memo entry %d does not exist", i)
	}
	e := m.memo.chunks[i/memoChunk][i%memoChunk]
	k := kind(e >> 56)
	if k == kMark {
		return fmt.Errorf("memo entry %d does not exist", i)
	}
	u := e & (1<<56 - 1)
	if k == kInt || k == kNeg || k == kFloat {
		u = m.memo.wide[u]
	}
	return m.push(value{k, u})
}

// memo is what the pickle's PUT opcodes stored, 8 bytes an entry: kind in the top byte, u below. Numbers, which
// picklers do not memoise, are in wide.
type memo struct {
	b      *budget
	chunks [][]uint64
	n      uint64 // entries, unset ones included
	wide   []uint64
}

const memoChunk = 4096

func (t *memo) put(i uint64, v value) error {
	// Picklers number their entries 0, 1, 2…; a gap may be left, a leap may not.
	if i > t.n+memoChunk {
		return fmt.Errorf("memo entry %d after %d entries", i, t.n)
	}
	u := v.u
	if v.k == kInt || v.k == kNeg || v.k == kFloat {
		var err error
		if t.wide, err = grow(t.b, t.wide, 8); err != nil {
			return err
		}
		u = uint64(len(t.wide))
		t.wide = append(t.wide, v.u)
	}
	for ; t.n <= i; t.n++ {
		if t.n%memoChunk == 0 {
			if err := t.b.take(memoChunk*8 + 24); err != nil {
				return err
			}
			t.chunks = append(t.chunks, make([]uint64, memoChunk))
		}
		t.chunks[t.n/memoChunk][t.n%memoChunk] = uint64(kMark) << 56
	}
	t.chunks[i/memoChunk][i%memoChunk] = uint64(v.k)<<56 | u
	return nil
}

// float is a number as a float64.
func (v value) float() float64 {
	switch v.k {
	case kFloat:
		return math.Float64frombits(v.u)
	case kInt:
		return float64(v.u)
	case kNeg:
		return float64(int64(v.u))
	}
	return 0
}
