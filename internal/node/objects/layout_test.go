package objects

import (
	"reflect"
	"strings"
	"testing"
)

func TestLayout(t *testing.T) {
	tensors := []Tensor{{Name: "b", DType: "F16", Shape: []uint64{3, 5}, Size: 30}, {Name: "a", DType: "I64", Shape: []uint64{}, Size: 8},
		{Name: "none", DType: "U8", Shape: []uint64{0, 7}}, {Name: "new", DType: "X9", Shape: []uint64{2}, Size: 77}}
	size, err := LayOut(tensors)
	if err != nil || size != 3*Align {
		t.Fatal(size, err)
	}
	b, err := AppendLayout(nil, size, tensors)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseLayout(b, size)
	want := []Tensor{tensors[0], tensors[1], tensors[3], tensors[2]}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	if got, err := ParseLayout([]byte(`{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}} `), 8); err != nil || len(got) != 1 || got[0].Offset != 4 {
		t.Error(got, err)
	}
	for text, words := range map[string]string{
		``:   "a JSON object",
		`[]`: "a JSON object",
		`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}`: "EOF",
		`{} {}`: "more follows",
		`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}`:                               "ends before",
		`{"a":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}}`:                               "do not lie",
		`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}`:                               "of shape",
		`{"a":{"dtype":"","shape":[2],"data_offsets":[0,1]}}`:                                 "dtype",
		`{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}`:                              `tensor "a"`,
		`{"a":{"dtype":"Q","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,1]}}`: "too large",
		`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}`:                        "twice",
		`{"__metadata__":7}`: "__metadata__",
		`{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`: "name of 0 bytes",
	} {
		if _, err := ParseLayout([]byte(text), 8); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v; want %q", text, err, words)
		}
	}
	twice := []Tensor{{Name: "a", DType: "U8", Shape: []uint64{}, Size: 1}, {Name: "a", DType: "U8", Shape: []uint64{}, Size: 1}}
	if _, err := AppendLayout(nil, 8, twice); err == nil {
		t.Error("a name is there twice")
	}
}

// FuzzLayout: what is read as a layout lies within the object, and can be written again.
func FuzzLayout(f *testing.F) {
	f.Add([]byte(`{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}`), uint64(8))
	f.Add([]byte(`{"a":{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]},"b":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}`), uint64(9))
	f.Fuzz(func(t *testing.T, b []byte, size uint64) {
		all, err := ParseLayout(b, size)
		if err != nil {
			return
		}
		for _, x := range all {
			if x.Offset > size || x.Size > size-x.Offset {
				t.Fatalf("%+v lies outside of %d bytes", x, size)
			}
		}
		again, err := AppendLayout(nil, size, all)
		if err != nil {
			t.Fatal(err)
		}
		same, err := ParseLayout(again, size)
		if err != nil || len(same) != len(all) {
			t.Fatalf("%v became %v, %v", all, same, err)
		}
	})
}
