package dump_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/dump"
	runs "github.com/cistern-gpu/cistern/recording/open"
)

// A Go program has a file written when it runs out of memory, for `cistern report` to explain.
func ExampleReporter() {
	opts, err := cistern.ParseOptions("driver:sim:1GiB,stacks:native,history:100000")
	if err != nil {
		panic(err)
	}
	drv, err := open.Open(opts.Driver)
	if err != nil {
		panic(err)
	}
	a, err := cistern.New(drv, opts)
	if err != nil {
		panic(err)
	}
	dev, err := a.Device(0)
	if err != nil {
		panic(err)
	}
	stream, err := dev.Stream(0)
	if err != nil {
		panic(err)
	}
	dir, err := os.MkdirTemp("", "reports")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)

	reports := &dump.Reporter{Allocator: a, Say: func(string) {}}
	if err := reports.To(dir, false); err != nil {
		panic(err)
	}
	_, err = dev.Alloc(2<<30, stream)
	var oom *cistern.OutOfMemoryError
	if errors.As(err, &oom) {
		file := reports.OutOfMemory(oom, []string{oom.Error()})
		f, err := runs.File(file)
		if err != nil {
			panic(err)
		}
		failure := f.Traces[0].Failures[0]
		fmt.Println(filepath.Ext(file), failure.Requested, f.Traces[0].Frames[f.Traces[0].Stacks[failure.Stack][0]].Func)
	}
	// Output: .cistern 2147483648 github.com/cistern-gpu/cistern/dump_test.ExampleReporter
}
