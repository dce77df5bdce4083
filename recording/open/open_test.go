package open_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// FuzzRead is the recognition of files and of compression.
func FuzzRead(f *testing.F) {
	file, _ := recordingtest.Written(f, recordingtest.Synthetic())
	f.Add(file)
	old, err := os.ReadFile("../native/testdata/unlabelled.cistern")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(old)
	f.Add([]byte(recordingtest.RMMLog))
	f.Add([]byte("\x80\x02}."))
	f.Add([]byte("{\"a\":1}"))
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(recordingtest.Around(recordingtest.Entry("alloc", 4096, 512)))
	w.Close()
	f.Add(z.Bytes())
	f.Add([]byte("\x28\xb5\x2f\xfd\x04\x00"))
	f.Fuzz(recordingtest.AnyFile)
}

// A file that unpacks to far more than any trace does is given up early.
func TestBombs(t *testing.T) {
	head := recordingtest.Pickle(byte(0x8e), recordingtest.U64(1<<40)) // BINBYTES8
	bomb := func(w io.WriteCloser, out *bytes.Buffer) []byte {
		w.Write(head)
		zeros := make([]byte, 1<<20)
		for range 256 {
			w.Write(zeros)
		}
		w.Close()
		return out.Bytes()
	}
	var g, z bytes.Buffer
	gw, _ := gzip.NewWriterLevel(&g, gzip.BestSpeed)
	recordingtest.Refused(t, bomb(gw, &g), "gzip: decompresses to more than 200 times its size")
	zw, err := zstd.NewWriter(&z)
	if err != nil {
		t.Fatal(err)
	}
	recordingtest.Refused(t, bomb(zw, &z), "zstd: decompresses to more than 200 times its size")
}

func TestWrongKindOfFile(t *testing.T) {
	for name, c := range map[string]struct{ file, want string }{
		"empty":     {"", "the file is empty; expected a PyTorch memory snapshot"},
		"json":      {"{\"segments\": []}", "byte 0: JSON; expected a PyTorch memory snapshot"},
		"png":       {"\x89PNG\r\n\x1a\n0000", "a PNG picture"},
		"zip":       {"PK\x03\x04xxxx", "a zip file (torch.save?)"},
		"text":      {"hello\n", "a file of unknown kind"},
		"html":      {"<!DOCTYPE html>", "HTML or XML"},
		"short":     {"\x1f\x8b", "gzip: unexpected EOF"},
		"other csv": {"a,b,c\n1,2,3\n", "a file of unknown kind"},
	} {
		t.Run(name, func(t *testing.T) { recordingtest.Refused(t, []byte(c.file), c.want) })
	}
	dir := t.TempDir()
	if _, err := open.File(dir); err == nil || !strings.Contains(err.Error(), "a directory; expected a PyTorch") {
		t.Errorf("directory: %v", err)
	}
	path := filepath.Join(dir, "missing")
	if _, err := open.File(path); err == nil || !strings.HasPrefix(err.Error(), path+": ") || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

// Reading holds at most twice the uncompressed file, and a constant.
func TestMemory(t *testing.T) {
	for _, path := range recordingtest.Samples(t) {
		var f *recording.File
		peak := recordingtest.PeakHeap(func() { f = recordingtest.Read(t, path) })
		if limit := uint64(2*f.DecodedBytes + 4<<20); peak > limit {
			t.Errorf("%s: %d bytes held for %d", path, peak, f.DecodedBytes)
		}
	}
}

// Standard input that stays open does not hold up the report.
func TestStandardInput(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func(old *os.File) { os.Stdin = old }(os.Stdin)
	os.Stdin = r
	var z bytes.Buffer
	gw := gzip.NewWriter(&z)
	gw.Write(append(recordingtest.Pickle(byte(0xff)), make([]byte, 100)...))
	gw.Flush()
	if _, err := w.Write(z.Bytes()); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := open.File("-")
		done <- err
	}()
	select {
	case err := <-done:
		if err == nil || !strings.HasPrefix(err.Error(), "standard input: byte 2: ") {
			t.Error(err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("still waiting")
	}
	w.Close()
}
