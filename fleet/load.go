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
	Bad       []string   // a line for each file that is no summary, or of another version, and for each folder that cannot be read
}

// Load reads the summaries in folders and the folders below them, and no recordings.
func Load(ctx context.Context, folders ...string) (*Folder, error) {
	f := &Folder{}
	places, err := find(folders, func(err error) { f.Bad = append(f.Bad, err.Error()) })
	if err != nil {
		return nil, err
	}
	found := make([]*Summary, len(places))
	var mu sync.Mutex // guards f
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, p := range places {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			s, err := Read(p.path)
			if s != nil {
				s.Folder = p.folder
			}
			found[i] = s
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(err, fs.ErrNotExist): // likewise
			case errors.Is(err, ErrTruncated):
				f.Truncated = append(f.Truncated, p.path)
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

// Find finds the summaries in folders and the folders below them, in the order of their paths. warn is called for each folder below
// that cannot be read.
func Find(warn func(error), folders ...string) (paths []string, err error) {
	places, err := find(folders, warn)
	for _, p := range places {
		paths = append(paths, p.path)
	}
	return paths, err
}

// place is a summary, and the folder in whose search it was found.
type place struct{ folder, path string }

func find(folders []string, warn func(error)) (places []place, err error) {
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err == nil:
				if !d.IsDir() && strings.HasSuffix(path, Ending) && !strings.HasPrefix(d.Name(), ".") {
					places = append(places, place{folder, path})
				}
			case path == folder:
				return err
			case !errors.Is(err, fs.ErrNotExist): // else an epilog has removed it meanwhile
				warn(err)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(places, func(a, b place) int { return cmp.Compare(a.path, b.path) })
	return slices.CompactFunc(places, func(a, b place) bool { return a.path == b.path }), nil
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
