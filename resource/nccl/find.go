//go:build linux && cgo

package nccl

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// installed is where the wheel nvidia-nccl-cu* puts the library: beside the packages that the process has loaded
// something from, and in the environment that VIRTUAL_ENV names.
func installed() []string {
	var sites []string
	if f, err := os.Open("/proc/self/maps"); err == nil {
		for lines := bufio.NewScanner(f); lines.Scan(); {
			_, path, _ := strings.Cut(lines.Text(), "/")
			for _, folder := range []string{"/site-packages/", "/dist-packages/"} {
				if i := strings.Index("/"+path, folder); i >= 0 {
					sites = append(sites, ("/" + path)[:i+len(folder)])
				}
			}
		}
		f.Close()
	}
	if env := os.Getenv("VIRTUAL_ENV"); env != "" {
		more, _ := filepath.Glob(filepath.Join(env, "lib", "python3*", "site-packages"))
		sites = append(sites, more...)
	}
	var found []string
	for _, s := range sites {
		p := filepath.Join(s, "nvidia", "nccl", "lib", soname)
		if _, err := os.Stat(p); err == nil && !slices.Contains(found, p) {
			found = append(found, p)
		}
	}
	return found
}
