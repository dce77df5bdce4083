// Package pytorch reads and writes PyTorch's memory snapshots, which are pickles.
//
// pickle.go runs a pickle, and can build nothing but plain data. roles.go gives each container the role that its place in
// the file says; fields.go and labels.go turn its entries into events, frames, segments and labels as it is completed;
// derive.go makes traces of them. write.go writes snapshots.
package pytorch

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// The pickle machine: Python's pickle, protocols 2 to 5, as far as plain data needs it. An opcode that names a class,
// calls anything or reaches outside the file is refused by its name. Nothing is built that a snapshot does not have:
// each container gets a role from the place where it appears (roles.go), and containers without one are walked
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
	kSubSettings // a dict inside allocator_settings, or inside Cistern's own
	kEnvironment // Cistern's own
	kLabel       // user_metadata, where it is a dict
	numKinds
)

var kindNames = [numKinds]string{"None", "a mark", "a bool", "an int", "a negative int", "an int of more than 64 bits",
	"a float", "a string", "bytes", "a tuple", "a tuple of two ints", "a list", "a dict", "a dict", "a list", "a list",
	"a dict", "a list", "a dict", "a list", "a dict", "a list", "a dict", "a dict", "a dict", "a dict", "a dict"}

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
	in    *input.Input
	b     *input.Budget
	strs  *strtab
	stack []value
	marks []int // positions of kMark in stack
	memo  memo
	snapshot
}

func newMachine(in *input.Input) *machine {
	m := &machine{in: in, b: input.NewBudget(in.Offset, in.Stored)}
	m.strs = newStrtab(m.b)
	m.memo.b = m.b
	m.snapshot.init(m)
	return m
}

// run executes the pickle up to STOP.
func (m *machine) run() error {
	in := m.in
	for {
		if in.End-in.Pos < 16 {
			if !in.Need(16) && in.Pos == in.End {
				return in.Truncated("the pickle, before its STOP")
			}
		}
		at := in.Offset()
		op := in.Buf[in.Pos]
		in.Pos++
		arg, ok := m.operand(op)
		if !ok {
			return in.Truncated(opNames[op])
		}
		var err error
		if op == opStop {
			if err = m.stop(); err == nil {
				return m.finish()
			}
		} else {
			err = m.do(op, arg)
		}
		if err != nil {
			if _, ok := err.(*recording.Error); ok {
				return err
			}
			return input.AtByte(at, "%s", err)
		}
	}
}

// operand reads the little-endian number of fixed width behind an opcode, 0 where it has none.
func (m *machine) operand(op byte) (arg uint64, ok bool) {
	in, n := m.in, int(operands[op])
	if n == 0 {
		return 0, true
	}
	if in.End-in.Pos >= 8 {
		arg = binary.LittleEndian.Uint64(in.Buf[in.Pos:]) & (math.MaxUint64 >> (64 - 8*n))
	} else {
		if in.End-in.Pos < n {
			return 0, false
		}
		for i := n - 1; i >= 0; i-- {
			arg = arg<<8 | uint64(in.Buf[in.Pos+i])
		}
	}
	in.Pos += n
	return arg, true
}

// do carries out an opcode with its operand.
func (m *machine) do(op byte, arg uint64) error {
	switch op {
	case opBinget, opLongBinget:
		return m.recall(arg)
	case opMemoize:
		return m.remember(m.memo.n)
	case opBinput, opLongBinput:
		return m.remember(arg)
	case opBinint1, opBinint2:
		return m.push(value{kInt, arg})
	case opBinint:
		if i := int64(int32(arg)); i < 0 {
			return m.push(value{kNeg, uint64(i)})
		}
		return m.push(value{kInt, arg})
	case opLong1, opLong4:
		return m.pushLong(op, arg)
	case opBinfloat:
		return m.push(value{kFloat, bits.ReverseBytes64(arg)})
	case opNone:
		return m.push(value{})
	case opNewtrue:
		return m.push(value{kBool, 1})
	case opNewfalse:
		return m.push(value{kBool, 0})
	case opMark:
		return m.mark()
	case opEmptyDict:
		return m.newDict()
	case opEmptyList:
		return m.newList()
	case opEmptyTuple:
		return m.push(value{k: kTuple})
	case opSetitems, opAppends, opTuple:
		return m.collect(op)
	case opSetitem, opAppend:
		return m.addOne(op)
	case opTuple1, opTuple2, opTuple3:
		return m.shortTuple(op)
	case opShortBinunicode, opShortBinstring, opBinunicode, opBinstring, opBinunicode8:
		return m.pushString(arg, opNames[op])
	case opShortBinbytes, opBinbytes, opBinbytes8, opBytearray8:
		if !m.in.Skip(arg) {
			return m.in.Truncated(opNames[op])
		}
		return m.push(value{k: kBytes})
	case opFrame: // a hint for readers that buffer by frame
		return nil
	case opProto:
		if arg < 2 || arg > 5 {
			return fmt.Errorf("pickle protocol %d; expected 2 to 5", arg)
		}
		return nil
	}
	return notData(op)
}

// notData is the error of an opcode that no snapshot has.
func notData(op byte) error {
	switch {
	case refused[op] != "":
		return fmt.Errorf("opcode %s %s; a snapshot has plain data only", opNames[op], refused[op])
	case opNames[op] != "":
		return fmt.Errorf("opcode %s; expected the plain data of pickle protocols 2 to 5", opNames[op])
	}
	return fmt.Errorf("byte 0x%02x is not a pickle opcode", op)
}

// stop checks what the pickle holds at its end.
func (m *machine) stop() error {
	if len(m.stack) == 1 && m.stack[0].k == kRoot {
		return nil
	}
	what := "nothing"
	if len(m.stack) > 0 {
		what = m.stack[len(m.stack)-1].k.String()
	}
	return fmt.Errorf("the pickle holds %s; expected a snapshot (a dict with device_traces and segments)", what)
}

func (m *machine) mark() (err error) {
	if len(m.marks) >= maxDepth {
		return fmt.Errorf("nested more than %d deep", maxDepth)
	}
	if m.marks, err = input.Grow(m.b, m.marks, 8); err != nil {
		return err
	}
	m.marks = append(m.marks, len(m.stack))
	return m.push(value{k: kMark})
}

// collect takes what lies above the last MARK into a tuple, or into the container below the MARK.
func (m *machine) collect(op byte) error {
	if len(m.marks) == 0 {
		return fmt.Errorf("%s without a MARK", opNames[op])
	}
	p := m.marks[len(m.marks)-1]
	m.marks = m.marks[:len(m.marks)-1]
	items := m.stack[p+1:]
	m.stack = m.stack[:p]
	switch {
	case op == opTuple:
		return m.pushTuple(items)
	case p == 0:
		return fmt.Errorf("%s without a container", opNames[op])
	case op == opSetitems:
		return m.setItems(m.stack[p-1], items)
	}
	return m.appendItems(m.stack[p-1], items)
}

// addOne takes one item, or one key with its value, into the container below.
func (m *machine) addOne(op byte) error {
	items := 1
	if op == opSetitem {
		items = 2
	}
	n := len(m.stack) - items
	if n < m.floor()+1 {
		return fmt.Errorf("%s on an empty stack", opNames[op])
	}
	top := m.stack[n:]
	m.stack = m.stack[:n]
	if op == opSetitem {
		return m.setItems(m.stack[n-1], top)
	}
	return m.appendItems(m.stack[n-1], top)
}

func (m *machine) shortTuple(op byte) error {
	n := len(m.stack) - (int(op-opTuple1) + 1)
	if n < m.floor() {
		return fmt.Errorf("%s on an empty stack", opNames[op])
	}
	items := m.stack[n:]
	m.stack = m.stack[:n]
	return m.pushTuple(items)
}

func (m *machine) pushLong(op byte, n uint64) error {
	in := m.in
	if n > 255 {
		return fmt.Errorf("an integer of %d bytes; expected at most 255", n)
	}
	if in.End-in.Pos < int(n) && !in.Need(int(n)) {
		return in.Truncated(opNames[op])
	}
	v := long(in.Buf[in.Pos : in.Pos+int(n)])
	in.Pos += int(n)
	return m.push(v)
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
		if m.stack, err = input.Grow(m.b, m.stack, 16); err != nil {
			return err
		}
	}
	m.stack = append(m.stack, v)
	return nil
}

func (m *machine) pushString(n uint64, op string) error {
	in := m.in
	if n <= input.WindowSize {
		if in.End-in.Pos < int(n) && !in.Need(int(n)) {
			return in.Truncated(op)
		}
		id, err := m.strs.id(in.Buf[in.Pos : in.Pos+int(n)])
		if err != nil {
			return err
		}
		in.Pos += int(n)
		return m.push(value{kStr, uint64(id)})
	}
	if n > maxString {
		return fmt.Errorf("a string of %d bytes; expected at most %d", n, maxString)
	}
	// Longer than the window: collected piece by piece, so that the length costs nothing before its bytes are there.
	var text []byte
	for uint64(len(text)) < n {
		if in.Pos == in.End && !in.Need(1) {
			return in.Truncated(op)
		}
		k := min(n-uint64(len(text)), uint64(in.End-in.Pos))
		text = append(text, in.Buf[in.Pos:in.Pos+int(k)]...)
		in.Pos += int(k)
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
	p := recording.PoolID{items[0].u, items[1].u}
	id, ok := m.pairIDs[p]
	if !ok {
		if err := m.b.Take(96); err != nil {
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
	b      *input.Budget
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
		if t.wide, err = input.Grow(t.b, t.wide, 8); err != nil {
			return err
		}
		u = uint64(len(t.wide))
		t.wide = append(t.wide, v.u)
	}
	for ; t.n <= i; t.n++ {
		if t.n%memoChunk == 0 {
			if err := t.b.Take(memoChunk*8 + 24); err != nil {
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
