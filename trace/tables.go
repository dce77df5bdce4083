package trace

import (
	"encoding/binary"
	"fmt"

	"github.com/cistern-gpu/cistern/internal/text"
)

// interned numbers values in the order in which they are first seen. The last one asked for is found at once: runs of
// the same stream are the rule.
type interned struct {
	vals []uint64
	ids  map[uint64]uint32
	last uint32
}

func (t *interned) id(v uint64) uint32 {
	if int(t.last) < len(t.vals) && t.vals[t.last] == v {
		return t.last
	}
	if id, ok := t.ids[v]; ok {
		t.last = id
		return id
	}
	if t.ids == nil {
		t.ids = map[uint64]uint32{}
	}
	t.last = uint32(len(t.vals))
	t.vals = append(t.vals, v)
	t.ids[v] = t.last
	return t.last
}

// charged is id with the memory of a new value charged.
func (t *interned) charged(b *budget, v uint64) (uint32, error) {
	n := len(t.vals)
	id := t.id(v)
	if len(t.vals) > n {
		return id, b.take(64)
	}
	return id, nil
}

// stackTable holds frames and stacks, each once.
type stackTable struct {
	b        *budget
	frames   []Frame
	frameIDs map[Frame]uint32
	stacks   []Stack
	stackIDs map[string]uint32 // little-endian frame ids → index in stacks
	key      []byte
	text     map[uint32]string // strings of frames, by id in strtab
	names    nativeNames
}

func (t *stackTable) init(b *budget) {
	t.b = b
	t.frameIDs = map[Frame]uint32{}
	t.stacks = []Stack{nil}
	t.stackIDs = map[string]uint32{"": 0}
	t.text = map[uint32]string{}
}

func (t *stackTable) str(strs *strtab, id uint32) (string, error) {
	if id == none {
		return "", nil
	}
	s, ok := t.text[id]
	if !ok {
		s = text.Clean(string(strs.get(uint64(id))))
		if err := t.b.take(int64(len(s)) + 64); err != nil {
			return "", err
		}
		t.text[id] = s
	}
	return s, nil
}

func (t *stackTable) frame(strs *strtab, f *rawFrame) (uint32, error) {
	if f.file == none && f.name == none {
		return 0, fmt.Errorf("a frame has neither filename nor name")
	}
	file, err := t.str(strs, f.file)
	if err != nil {
		return 0, err
	}
	name, err := t.str(strs, f.name)
	if err != nil {
		return 0, err
	}
	read := Frame{File: file, Func: name, Line: int(f.line)}
	if err := t.names.demangle(&read, t.b); err != nil {
		return 0, err
	}
	return t.frameID(read)
}

func (t *stackTable) frameID(f Frame) (uint32, error) {
	id, ok := t.frameIDs[f]
	if !ok {
		if err := t.b.take(160); err != nil {
			return 0, err
		}
		id = uint32(len(t.frames))
		t.frames = append(t.frames, f)
		t.frameIDs[f] = id
	}
	return id, nil
}

// stack interns ids, which stay the caller's.
func (t *stackTable) stack(ids []uint32) (uint32, error) {
	t.key = t.key[:0]
	for _, id := range ids {
		t.key = binary.LittleEndian.AppendUint32(t.key, id)
	}
	id, ok := t.stackIDs[string(t.key)]
	if !ok {
		if err := t.b.take(int64(8*len(ids)) + 128); err != nil {
			return 0, err
		}
		id = uint32(len(t.stacks))
		t.stacks = append(t.stacks, append(Stack(nil), ids...))
		t.stackIDs[string(t.key)] = id
	}
	return id, nil
}
