package objects

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
)

// The layout of an object is the header of a safetensors file, as JSON: an object whose keys are the names of tensors,
//
//	{"embed.weight": {"dtype": "F16", "shape": [32000, 4096], "data_offsets": [0, 262144000]}, "__metadata__": {"format": "pt"}}
//
// Offsets are bytes from the beginning of the contents. Unlike in a file, tensors may leave gaps, so that each can be aligned.

const (
	// MaxLayout is the most bytes of a layout.
	MaxLayout = 16 << 20
	// MaxTensors is the most tensors.
	MaxTensors = 200_000
	maxDims    = 64
	maxKey     = 1024
	// Align is the alignment of tensors that AppendLayout's callers lay out, in bytes.
	Align = 512
)

// Tensor is a part of an object.
type Tensor struct {
	Name   string
	DType  string   // as safetensors names them: F32, F16, BF16, I64, U8, F8_E4M3, BOOL
	Shape  []uint64 // empty for a scalar
	Offset uint64   // bytes from the beginning of the object
	Size   uint64   // bytes
}

type entry struct {
	DType   string    `json:"dtype"`
	Shape   []uint64  `json:"shape"`
	Offsets [2]uint64 `json:"data_offsets"`
}

// width is the bits of an element of the types that are known, 0 of others.
func width(dtype string) uint64 {
	switch dtype {
	case "F64", "I64", "U64", "C64":
		return 64
	case "F32", "I32", "U32":
		return 32
	case "F16", "BF16", "I16", "U16":
		return 16
	case "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ":
		return 8
	case "F4":
		return 4
	}
	return 0
}

// check is what is wrong with a tensor of an object of so many bytes.
func (t *Tensor) check(size uint64) error {
	if t.Name == "" || len(t.Name) > maxKey {
		return fmt.Errorf("a tensor's name of %d bytes: expected 1 to %d", len(t.Name), maxKey)
	}
	fail := func(format string, args ...any) error {
		return fmt.Errorf("tensor %.200q: %s", t.Name, fmt.Sprintf(format, args...))
	}
	switch {
	case t.DType == "" || len(t.DType) > MaxLabel:
		return fail("a dtype of %d bytes: expected 1 to %d", len(t.DType), MaxLabel)
	case len(t.Shape) > maxDims:
		return fail("%d dimensions: expected at most %d", len(t.Shape), maxDims)
	case t.Offset > size || t.Size > size-t.Offset:
		return fail("%d bytes at %d do not lie within the object's %d", t.Size, t.Offset, size)
	}
	elements := uint64(1)
	for _, n := range t.Shape {
		hi, lo := bits.Mul64(elements, n)
		if elements = lo; hi != 0 || lo > 1<<58 {
			return fail("the shape %v is too large", t.Shape)
		}
	}
	if w := width(t.DType); w != 0 && (elements*w+7)/8 != t.Size {
		return fail("%d bytes: a tensor %s of shape %v has %d", t.Size, t.DType, t.Shape, (elements*w+7)/8)
	}
	return nil
}

// AppendLayout appends the layout of tensors in an object of size bytes, in the order of their names.
func AppendLayout(b []byte, size uint64, tensors []Tensor) ([]byte, error) {
	if len(tensors) > MaxTensors {
		return nil, fmt.Errorf("%d tensors: expected at most %d", len(tensors), MaxTensors)
	}
	all := make(map[string]entry, len(tensors))
	for i := range tensors {
		t := &tensors[i]
		if err := t.check(size); err != nil {
			return nil, err
		}
		if _, twice := all[t.Name]; twice || t.Name == metadata {
			return nil, fmt.Errorf("tensor %.200q is there twice, or not a name that a tensor can have", t.Name)
		}
		all[t.Name] = entry{t.DType, append([]uint64{}, t.Shape...), [2]uint64{t.Offset, t.Offset + t.Size}}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	if len(text) > MaxLayout {
		return nil, fmt.Errorf("a layout of %d bytes: expected at most %d", len(text), MaxLayout)
	}
	return append(b, text...), nil
}

const metadata = "__metadata__"

// ParseLayout reads the layout of an object of size bytes. The tensors are in the order of their offsets.
func ParseLayout(b []byte, size uint64) ([]Tensor, error) {
	if len(b) > MaxLayout {
		return nil, fmt.Errorf("a layout of %d bytes: expected at most %d", len(b), MaxLayout)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("layout: expected a JSON object")
	}
	var all []Tensor
	seen := map[string]bool{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, fmt.Errorf("layout: %w", err)
		}
		name, ok := t.(string)
		if !ok || seen[name] {
			return nil, fmt.Errorf("layout: tensor %.200q is there twice", name)
		}
		seen[name] = true
		if name == metadata {
			var texts map[string]string
			if err := d.Decode(&texts); err != nil {
				return nil, fmt.Errorf("layout: %s: %w", metadata, err)
			}
			continue
		}
		if len(all) == MaxTensors {
			return nil, fmt.Errorf("layout: more than %d tensors", MaxTensors)
		}
		var e entry
		if err := d.Decode(&e); err != nil {
			return nil, fmt.Errorf("layout: tensor %.200q: %w", name, err)
		}
		if e.Offsets[1] < e.Offsets[0] {
			return nil, fmt.Errorf("layout: tensor %.200q ends before it begins", name)
		}
		x := Tensor{Name: name, DType: e.DType, Shape: e.Shape, Offset: e.Offsets[0], Size: e.Offsets[1] - e.Offsets[0]}
		if err := x.check(size); err != nil {
			return nil, fmt.Errorf("layout: %w", err)
		}
		all = append(all, x)
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("layout: more follows the JSON object")
	}
	slices.SortStableFunc(all, func(x, y Tensor) int { return cmp.Or(cmp.Compare(x.Offset, y.Offset), cmp.Compare(x.Name, y.Name)) })
	return all, nil
}

// LayOut gives each tensor of a size an offset that is a multiple of Align, and returns the size of the object.
func LayOut(tensors []Tensor) (size uint64, err error) {
	for i := range tensors {
		t := &tensors[i]
		if size > 1<<60 || t.Size > 1<<60 {
			return 0, fmt.Errorf("tensor %.200q: %d bytes at %d are too many", t.Name, t.Size, size)
		}
		t.Offset = size
		size += (t.Size + Align - 1) &^ (Align - 1)
	}
	return max(size, 1), nil
}

// Sum is the checksum of a layout.
func Sum(layout []byte) string {
	sum := sha256.Sum256(layout)
	return hex.EncodeToString(sum[:])
}
