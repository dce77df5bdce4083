//go:build linux && cgo

package main

/*
#include <stdlib.h>
#include "launch.h"
#include "shim.h"
#include "stack.h"

#cgo noescape launch_say
#cgo nocallback launch_say
#cgo nocallback launch_start
#cgo nocallback launch_environment
#cgo nocallback launch_folder
#cgo nocallback stack_prepare
*/
import "C"

import (
	"os"
	"path/filepath"
	"runtime/cgo"
	"sync"
	"syscall"
	"unsafe"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/dump"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/outfile"
	"github.com/cistern-gpu/cistern/memory"
)

// say gives people a line.
func say(line string) {
	text := C.CString(line + "\n")
	defer C.free(unsafe.Pointer(text))
	C.launch_say(text, C.size_t(len(line)+1))
}

// source is the allocator as package dump reads it.
type source struct{ *engine.Allocator }

func (s source) Record(dev cuda.Device, most int) (memory.Record, bool) {
	d, ok := s.Started(dev)
	if !ok {
		return memory.Record{}, false
	}
	return d.Views.Record(most), true
}

func (s source) StackFrames(stack uint32) []uint64 { return s.Stacks.Frames(stack) }

// reporter is what writes the files of requests that failed.
func reporter(a *engine.Allocator) *dump.Reporter {
	return &dump.Reporter{Allocator: source{a}, Names: names, Getenv: getenv, Environ: environment, Library: folder(), Start: launch, Say: say}
}

// names are those of what the numbers of blocks and events stand for here.
func names() dump.Names {
	return dump.Names{
		Tag:            tagText,
		Library:        libraryText,
		DefaultLibrary: uint8(defaultLibrary()),
		Frames:         frames.named,
		Getenv:         getenv,
	}
}

func getenv(name string) string {
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	return goString(C.shim_getenv(text))
}

// environment is the environment as it is now.
func environment() []string {
	var out []string
	list := C.launch_environment()
	for ; list != nil && *list != nil; list = (**C.char)(unsafe.Add(unsafe.Pointer(list), unsafe.Sizeof(*list))) {
		out = append(out, goString(*list))
	}
	return out
}

// folder is where this library lies.
func folder() string {
	file := goString(C.launch_folder())
	if real, err := filepath.EvalSymlinks(file); err == nil {
		file = real
	}
	if !filepath.IsAbs(file) {
		return "" // as it was found in a folder that the process may have left
	}
	return filepath.Dir(file)
}

// launch starts a program that this process has nothing more to do with.
func launch(c dump.Child) error {
	output, err := nopoll.OpenFile(c.Output, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, outfile.Private)
	if err != nil {
		return err
	}
	defer output.Close()
	args, freeArgs := cStrings(append([]string{c.Command}, c.Args...))
	defer freeArgs()
	env, freeEnv := cStrings(c.Env)
	defer freeEnv()
	if errno := C.launch_start(args, env, C.int(output.Fd())); errno != 0 {
		return syscall.Errno(errno)
	}
	return nil
}

// cStrings is a list of strings as C has it, and what frees it.
func cStrings(list []string) (**C.char, func()) {
	mem := C.calloc(C.size_t(len(list)+1), C.size_t(unsafe.Sizeof(uintptr(0))))
	if mem == nil {
		panic("no host memory for the arguments of a program")
	}
	out := unsafe.Slice((**C.char)(mem), len(list)+1)
	for i, s := range list {
		out[i] = C.CString(s)
	}
	return &out[0], func() {
		for _, s := range out {
			C.free(unsafe.Pointer(s))
		}
		C.free(mem)
	}
}

// reportHistory is whether the history that is kept began with cistern_report, and with no other call.
type reportHistory struct {
	sync.Mutex
	began bool // guarded by Mutex
}

// reporting reports whether files are written of requests that fail.
func reporting() bool {
	l := current.Load()
	return l != nil && l.reporter.On()
}

// report has the file of a request that failed written where that is wanted, and is its name.
func report(oom *memory.OutOfMemoryError, lines []string) string {
	l := current.Load()
	if l == nil || !l.reporter.On() {
		return ""
	}
	if oom.Thread == 0 {
		oom.Thread = uint32(C.stack_thread())
	}
	file := l.reporter.OutOfMemory(oom, lines)
	tidy()
	return file
}

// failedRequest is one that is to be written down.
type failedRequest struct {
	oom   *memory.OutOfMemoryError
	lines []string
}

//export coreFailed
func coreFailed(which C.uintptr_t, by *C.stack_origin) {
	var code C.int
	defer caught(&code)
	h := cgo.Handle(which)
	f := h.Value().(*failedRequest)
	h.Delete()
	if l := current.Load(); l != nil && f.oom.Stack == 0 {
		f.oom.Stack = l.stackOf(by)
	}
	keepReport(report(f.oom, f.lines))
}

// reportTo has files written to a folder from now on.
func (l *library) reportTo(dir string, child bool) error {
	if dir != "" {
		C.stack_prepare()
	}
	return l.reporter.To(dir, child)
}

// historyFor has a history kept for the reports, where there is none, and ends the one that is kept for nothing else.
func (l *library) historyFor(reports bool) {
	l.forReports.Lock()
	defer l.forReports.Unlock()
	switch {
	case reports && l.NeedHistory(config.ReportHistory):
		l.forReports.began = true
	case !reports && l.forReports.began:
		l.SetHistory(0)
		l.forReports.began = false
	default:
		return
	}
	for d := range l.devices {
		record(cuda.Device(d), reports)
	}
}

//export coreReport
func coreReport(dir *C.char, child C.int) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	text := goString(dir)
	if dir != nil && text == "" {
		return fail(&failure{C.CISTERN_INVALID, "dir is empty: expected the name of a folder, or NULL"})
	}
	if err := l.reportTo(text, text != "" && child != 0); err != nil {
		return fail(err)
	}
	l.historyFor(text != "")
	return C.CISTERN_OK
}

//export coreTraceWrite
func coreTraceWrite(path *C.char) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	name := goString(path)
	if name == "" {
		return fail(&failure{C.CISTERN_INVALID, "path is empty: expected the name of a file"})
	}
	defer tidy()
	if err := dump.Write(name, source{l.Allocator}, names()); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}
