package native_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/klauspost/compress/zstd"
)

// FuzzDriver is the blocks of driver traces, as FuzzCistern is those of all; what is read is followed call by call.
func FuzzDriver(f *testing.F) {
	files, _ := recordingtest.DriverScript(f, recordingtest.RandomCalls(3, 60), 20)
	f.Add(blocksOf(files[len(files)-1]), true)
	f.Add(blocksOf(files[0]), false)
	f.Fuzz(func(t *testing.T, in []byte, end bool) {
		b := fileOf(in, end)
		recordingtest.AnyFile(t, b)
		file, err := open.Read(bytes.NewReader(b), "some.file")
		if err != nil || file.Driver == nil {
			return
		}
		tr := driver.NewTracker()
		for i := range file.Driver.Calls {
			tr.Call(&file.Driver.Calls[i], func(*driver.Holding) {}, func(*driver.Holding) {})
		}
	})
}

// FuzzCistern is the contents of blocks: the input is type, length (two bytes), payload, again and again, and gets the
// checksums that the reader asks for.
func FuzzCistern(f *testing.F) {
	file, _ := recordingtest.Written(f, recordingtest.Synthetic())
	seed := blocksOf(file)
	f.Add(seed, true)
	f.Add(seed, false)
	f.Fuzz(func(t *testing.T, in []byte, end bool) { recordingtest.AnyFile(t, fileOf(in, end)) })
}

// blocksOf is a file in the form of FuzzCistern's input; blocks that are compressed are unpacked.
func blocksOf(file []byte) []byte {
	var seed []byte
	z, err := zstd.NewReader(nil)
	if err != nil {
		panic(err)
	}
	defer z.Close()
	for off := len(native.Magic); off+native.BlockHeader < len(file)-16; {
		n := int(binary.LittleEndian.Uint32(file[off+1:]))
		payload := file[off+native.BlockHeader : off+native.BlockHeader+n]
		if raw := binary.LittleEndian.Uint32(file[off+5:]); int(raw) != n {
			if payload, err = z.DecodeAll(payload, nil); err != nil {
				panic(err)
			}
		}
		if len(payload) <= math.MaxUint16 {
			seed = binary.LittleEndian.AppendUint16(append(seed, file[off]), uint16(len(payload)))
			seed = append(seed, payload...)
		}
		off += native.BlockHeader + n
	}
	return seed
}

// fileOf is a file of the blocks in such an input, with the checksums that the reader asks for.
func fileOf(in []byte, end bool) []byte {
	b := []byte(native.Magic)
	at := len(b)
	for len(in) >= 3 {
		n := min(int(binary.LittleEndian.Uint16(in[1:])), len(in)-3)
		at = len(b)
		b = append(b, block(in[0], in[3:3+n])...)
		in = in[3+n:]
	}
	if end {
		b = append(binary.LittleEndian.AppendUint64(b, uint64(at)), native.Trailer...)
	}
	return b
}
