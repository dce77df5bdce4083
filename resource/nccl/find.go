//go:build linux && cgo

package nccl

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// installed is where the wheel nvidia-nccl-cu* puts the library: beside the packages that the process has loaded
// something from, and in the environment that VIRTUAL_ENV names.
func installed() []string {
	var sites []string
	if f, err := nopoll.Open("/proc/self/maps"); err == nil {
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
	if env := environ.Get("VIRTUAL_ENV"); env != "" {
		sites = append(sites, packages(filepath.Join(env, "lib"))...)
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

// packages are the folders of packages of the Pythons in lib.
func packages(lib string) (sites []string) {
	folder, err := nopoll.Open(lib)
	if err != nil {
		return nil
	}
	defer folder.Close()
	names, _ := folder.Readdirnames(-1)
	slices.Sort(names)
	for _, n := range names {
		if strings.HasPrefix(n, "python3") {
			sites = append(sites, filepath.Join(lib, n, "site-packages"))
		}
	}
	return sites
}
