package fleet

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Folder is what lies in a folder of recordings.
type Folder struct {
	Summaries []*Summary // in the order of their paths
	Truncated []string   // summaries that end early
	Bad       []string   // a line for each file that is no summary, or of another version
}

// Load reads the summaries in folders and the folders below them, and no recordings.
func Load(ctx context.Context, folders ...string) (*Folder, error) {
	paths, err := Find(folders...)
	if err != nil {
		return nil, err
	}
	found := make([]*Summary, len(paths))
	var mu sync.Mutex // guards f
	f := &Folder{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, path := range paths {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			s, err := Read(path)
			found[i] = s
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(err, fs.ErrNotExist): // likewise
			case errors.Is(err, ErrTruncated):
				f.Truncated = append(f.Truncated, path)
			case err != nil:
				f.Bad = append(f.Bad, err.Error())
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	slices.Sort(f.Truncated)
	slices.Sort(f.Bad)
	f.Summaries = slices.DeleteFunc(found, func(s *Summary) bool { return s == nil })
	return f, nil
}

// Find finds the summaries in folders and the folders below them, in the order of their paths.
func Find(folders ...string) (paths []string, err error) {
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && strings.HasSuffix(path, Ending) && !strings.HasPrefix(d.Name(), ".") {
				paths = append(paths, path)
			}
			if errors.Is(err, fs.ErrNotExist) && path != folder {
				return nil // an epilog has removed it meanwhile
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

// Jobs are the summaries by job, the one with most processes first.
func (f *Folder) Jobs() []*Job {
	by := map[string]*Job{}
	var jobs []*Job
	for _, s := range f.Summaries {
		id := s.Identity()
		j := by[id.Job]
		if j == nil {
			j = &Job{Name: id.Job}
			by[id.Job] = j
			jobs = append(jobs, j)
		}
		j.processes = append(j.processes, process{id, s})
	}
	slices.SortStableFunc(jobs, func(a, b *Job) int { return cmp.Compare(len(b.processes), len(a.processes)) })
	return jobs
}
