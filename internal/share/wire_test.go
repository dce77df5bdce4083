package share

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/memory"
)

func TestOffer(t *testing.T) {
	for _, m := range []memory.Shared{
		{UUID: [16]byte{7}, Size: 512, Offset: 1024, Chunks: []memory.SharedChunk{{Size: 2 << 20, Serial: 9}, {Size: 32 << 20, Serial: 10}}},
		{Size: 1 << 40, IPC: [64]byte{1, 63: 2}},
		{Size: 512, Pool: [64]byte{3, 63: 4}, Chunks: []memory.SharedChunk{{Size: 2 << 20, Serial: 9}}},
	} {
		b, err := offer(m)
		if err != nil {
			t.Fatal(err)
		}
		k, n, err := parseHeader([headerSize]byte(b))
		if k != kindOffer || n != len(b)-headerSize || err != nil {
			t.Errorf("the header of %d bytes says kind %d, %d bytes, %v", len(b), k, n, err)
		}
		if got, err := parseOffer(b[headerSize:]); !reflect.DeepEqual(got, m) || err != nil {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	}
	if _, err := offer(memory.Shared{Chunks: make([]memory.SharedChunk, maxChunks+1)}); err == nil {
		t.Error("more chunks than a message holds were offered")
	}
}

func TestRefusalIsOneLine(t *testing.T) {
	for words, want := range map[string]string{
		"":                            "no reason given",
		"why\nnot\x1b[2J":             "why not [2J",
		strings.Repeat("x", 2000):     strings.Repeat("x", maxWords),
		strings.Repeat("ö", 2000):     strings.Repeat("ö", maxWords/2),
		"half a letter: \xc3":         "half a letter: \ufffd",
		strings.Repeat("\xff x", 600): "",
	} {
		b := refusal(words)
		k, n, err := parseHeader([headerSize]byte(b))
		got := string(b[headerSize:])
		if k != kindRefusal || n != len(got) || err != nil || want != "" && got != want {
			t.Errorf("%q became kind %d, %d bytes, %q, %v", words, k, n, got, err)
		}
	}
}

func FuzzHeader(f *testing.F) {
	f.Add([]byte(hello([16]byte{1}, 2))[:headerSize])
	f.Add([]byte(refusal("no"))[:headerSize])
	f.Add(make([]byte, headerSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) != headerSize {
			return
		}
		k, n, err := parseHeader([headerSize]byte(b))
		if err != nil {
			return
		}
		if again := message(k, n); !bytes.Equal(again, b) {
			t.Errorf("%x is kind %d with %d bytes, whose header is %x", b, k, n, again)
		}
	})
}

func FuzzOffer(f *testing.F) {
	for _, m := range []memory.Shared{{}, {Size: 5, Chunks: make([]memory.SharedChunk, 3)}} {
		b, err := offer(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[headerSize:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < offerSize || len(b) > bounds[kindOffer][1] {
			return // as the header would not allow
		}
		m, err := parseOffer(b)
		if err != nil {
			return
		}
		if again, err := offer(m); err != nil || !bytes.Equal(again[headerSize:], b) {
			t.Errorf("%x became %+v and that %x, %v", b, m, again, err)
		}
	})
}
