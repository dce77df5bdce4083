package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker for a release; else it is what the module system knows.
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
			fmt.Fprintf(a.out, "cistern %s", v.Version)
			if v.Revision != "" {
				fmt.Fprintf(a.out, " (%s)", v.Revision)
			}
			fmt.Fprintf(a.out, ", %s, %s\n", v.Go, v.Platform)
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

func buildVersion() versionInfo {
	v := versionInfo{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if v.Version == "" {
		v.Version = info.Main.Version
	}
	if v.Version == "" || v.Version == "(devel)" {
		v.Version = "devel"
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
