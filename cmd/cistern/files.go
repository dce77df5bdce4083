package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// memoryBudget bounds what the files being worked on may take, by a guess from their sizes. A file beyond it is
// worked on alone.
const memoryBudget = 4 << 30

// weight guesses the bytes that a file takes once read: a snapshot decodes to about its size, which compression had
// made some thirty times smaller.
func weight(path string) int64 {
	st, err := os.Stat(path)
	if path == "-" || err != nil || !st.Mode().IsRegular() {
		return memoryBudget / 4
	}
	return max(1<<20, min(memoryBudget, st.Size()*20))
}

// What Go's collector is to keep to: the promise for a small file, less what is outside its heap, and what a reader may take more of
// larger ones.
const (
	smallMemory   = 192 << 20
	memoryPerByte = 256
)

// boundMemory has Go collect garbage more often near what the files may take, until the function that it returns is called. A limit
// of the user's own (GOMEMLIMIT) stays.
func boundMemory(paths []string) (end func()) {
	limit := int64(smallMemory)
	for _, path := range paths {
		st, err := os.Stat(path)
		if path == "-" || err != nil || !st.Mode().IsRegular() || st.Size() > 1<<40 {
			return func() {}
		}
		limit += memoryPerByte * st.Size()
	}
	const none = math.MaxInt64
	if debug.SetMemoryLimit(-1) != none {
		return func() {}
	}
	debug.SetMemoryLimit(limit)
	return func() { debug.SetMemoryLimit(none) }
}

// outcome is what became of one file.
type outcome[T any] struct {
	value T
	err   error
}

// eachFile reads the files and calls work on each, several at once, within GOMAXPROCS and the memory budget. done
// takes the outcomes in the order of paths, on the caller's goroutine, each as soon as those before it are there.
func eachFile[T any](ctx context.Context, a *app, paths []string, bar *progress,
	work func(f *recording.File, step func(done, total int)) (T, error), done func(i int, o outcome[T])) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer boundMemory(paths)()
	results := make([]chan outcome[T], len(paths))
	for i := range results {
		results[i] = make(chan outcome[T], 1)
	}
	memory := semaphore.NewWeighted(memoryBudget)
	next := make(chan int)
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(paths)) {
		workers.Go(func() {
			for i := range next {
				w := weight(paths[i])
				if memory.Acquire(ctx, w) != nil {
					continue // the run is over
				}
				v, err := one(a, paths[i], bar.file(i, paths[i]), work)
				memory.Release(w)
				results[i] <- outcome[T]{v, err}
			}
		})
	}
	go func() {
		defer close(next)
		for i := range paths {
			select {
			case next <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	for i := range paths {
		select {
		case o := <-results[i]:
			bar.pause()
			done(i, o)
			bar.resume()
		case <-ctx.Done():
			bar.end()
			return ctx.Err()
		}
	}
	workers.Wait()
	bar.end()
	return nil
}

// one reads and works on one file. Reading is the first tenth of its progress.
func one[T any](a *app, path string, step func(float64), work func(*recording.File, func(int, int)) (T, error)) (T, error) {
	var zero T
	f, err := a.read(path)
	if err != nil {
		return zero, err
	}
	if err := a.device.of(f); err != nil {
		return zero, fmt.Errorf("%s: %w", displayPath(path), err)
	}
	step(0.1)
	v, err := work(f, func(done, total int) {
		if total > 0 {
			step(0.1 + 0.9*float64(done)/float64(total))
		}
	})
	if err != nil {
		return zero, fmt.Errorf("%s: %w", displayPath(path), err)
	}
	step(1)
	return v, nil
}

// read reads one file; "-" is the command's standard input.
func (a *app) read(path string) (*recording.File, error) {
	if path == "-" {
		return open.Read(a.in, path)
	}
	return open.File(path)
}

func displayPath(path string) string {
	if path == "-" {
		return "standard input"
	}
	return path
}
