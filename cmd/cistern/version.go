package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	allocator "github.com/cistern-gpu/cistern"
)

// version may be set by the linker; else it is the library's.
var version = ""

func newVersion(a *app) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this command",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			v := buildVersion()
			if asJSON {
				_ = writeJSON(a.out, v, true) // checkedWriter remembers
				return nil
			}
			fmt.Fprintln(a.out, v)
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}

// versionInfo is what `cistern version --json` prints.
type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision"` // of the source, "-dirty" where it was changed; empty if unknown
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// String is the version as a line.
func (v versionInfo) String() string {
	revision := ""
	if v.Revision != "" {
		revision = " (" + v.Revision + ")"
	}
	return fmt.Sprintf("cistern %s%s, %s, %s", v.Version, revision, v.Go, v.Platform)
}

func buildVersion() versionInfo {
	v := versionInfo{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if v.Version == "" {
		v.Version = allocator.Version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	dirty := false
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value[:min(len(s.Value), 12)]
		case "vcs.modified":
			dirty = s.Value == "true"
		}
	}
	if dirty && v.Revision != "" {
		v.Revision += "-dirty"
	}
	return v
}
